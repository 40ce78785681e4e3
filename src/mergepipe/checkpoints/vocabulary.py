"""A model's vocabulary, read from untrusted tokenizer files; ambiguous ones are an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.sentencepiece import MAX_TOKEN_ID, read_pieces
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.storage.contract import Store, sidecar_limit
from mergepipe.storage.location import Location

# --- a model's vocabulary as frozen values: token ids, and settings of added tokens ---


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in text before the tokenizer's own rules, with the settings of that match.

    The fields are those that tokenizer files write, in their order, without the id.
    """

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`ids`: every token with its id, added ones too, by id; no two share one. `file` is the source."""

    ids: Mapping[str, int]
    added: Mapping[str, AddedToken]
    file: str

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a vocabulary needs a token")

    @property
    def n_ids(self) -> int:
        """One more than the largest id: the rows of an embedding of all tokens."""
        return max(self.ids.values()) + 1

    def as_added(self, token: str) -> AddedToken:
        """Return the token as another tokenizer adds it, with its settings here if it is an added one."""
        return self.added.get(token, AddedToken(token))


# --- read a checkpoint's vocabulary from untrusted tokenizer files; ambiguous ones are an error ---


FAST_NAME = "tokenizer.json"
SETTINGS_NAME = "tokenizer_config.json"
ADDED_NAME = "added_tokens.json"
CONFIG_NAME = "config.json"
DECODER_KEY = "added_tokens_decoder"
_MAX_INTEGER_DIGITS = 40  # settings state "no maximal length" as int(1e30)
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
# Their ids are not the places of their pieces.
_SHIFTED = ("XLMRoberta", "Camembert", "MBart", "Barthez", "Nllb", "XGLM", "Pegasus", "XLMProphetNet")
_TIKTOKEN_SUFFIX = ".tiktoken"


def read_vocabulary(checkpoint: Checkpoint, store: Store | Mapping[str, bytes]) -> Vocabulary | None:
    """Read the vocabulary of a checkpoint; None if it has no tokenizer file. `store`: or its small files."""
    for name, read in _READERS.items():
        if name in checkpoint.sidecars:
            return read(TokenizerFiles(checkpoint, store), name)
    foreign = next((name for name in checkpoint.sidecars if name.endswith(_TIKTOKEN_SUFFIX)), None)
    if foreign is not None:
        message, hint = "its ids are given by code, which is never run", f"save the tokenizer with a {FAST_NAME}"
        raise UnsupportedError.of("tokenizer.unsupported", checkpoint.root / foreign, message, hint)
    return None


class TokenizerFiles:
    """The small files of one checkpoint, of a bounded size."""

    def __init__(self, checkpoint: Checkpoint, store: Store | Mapping[str, bytes]) -> None:
        self._checkpoint = checkpoint
        self._store = store

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint.sidecars

    def path(self, name: str) -> Location:
        """Return the path of a file."""
        return self._checkpoint.root / name

    def raw(self, name: str) -> bytes:
        """Read all bytes of one file."""
        if isinstance(self._store, Mapping):
            return self._store[name]
        return self._store.read_small(self.path(name), sidecar_limit(name))

    def document(self, name: str) -> dict[str, JsonValue]:
        """Read one file as a JSON object; empty if it does not exist."""
        if name not in self:
            return {}
        return parse_object(
            self.raw(name), where=self.path(name), code="tokenizer.damaged", max_integer_digits=_MAX_INTEGER_DIGITS
        )

    def error(self, name: str, message: str) -> MergePipeError:
        return CorruptError.of("tokenizer.damaged", self.path(name), message)


def _read_fast(files: TokenizerFiles, name: str) -> Vocabulary:
    """Read `tokenizer.json`, then tokens that only `tokenizer_config.json` adds, as loaders do."""
    document = files.document(name)
    model = document.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = _Ids(files, name)
    if isinstance(vocab, dict):
        ids.add_all(vocab.items())
    elif isinstance(vocab, list):
        ids.add_all((_piece(files, name, pair), index) for index, pair in enumerate(vocab))
    else:
        raise files.error(name, f"'model' needs a 'vocab', found {shown(vocab)}")
    added = {}
    listed = document.get("added_tokens")
    for record in listed if isinstance(listed, list) else []:
        token = _added_token(files, name, record)
        ids.add(token.content, record.get("id") if isinstance(record, dict) else None)
        added[token.content] = token
    for token, index in _decoder(files):
        if token.content not in ids:
            ids.add_next(token.content, index)
            added[token.content] = token
    return ids.vocabulary(added)


def _piece(files: TokenizerFiles, name: str, pair: JsonValue) -> str:
    match pair:
        case [str() as piece, *_]:
            return piece
    raise files.error(name, f"a list of [piece, score] is needed, found {shown(pair)}")


def _read_slow_json(files: TokenizerFiles, name: str) -> Vocabulary:
    ids = _Ids(files, name)
    ids.add_all(files.document(name).items())
    return _with_added(files, ids)


def _read_pieces(files: TokenizerFiles, name: str) -> Vocabulary:
    kind = files.document(SETTINGS_NAME).get("tokenizer_class")
    if isinstance(kind, str) and kind.startswith(_SHIFTED):
        message = f"{shown(kind)} gives its pieces ids other than their positions"
        hint = f"save the tokenizer with a {FAST_NAME}"
        raise UnsupportedError.of("tokenizer.unsupported", files.path(name), message, hint)
    ids = _Ids(files, name)
    ids.add_all((piece, index) for index, piece in enumerate(read_pieces(files.raw(name), where=files.path(name))))
    return _with_added(files, ids)


def _read_lines(files: TokenizerFiles, name: str) -> Vocabulary:
    raw = files.raw(name)
    try:
        lines = raw.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise files.error(name, f"must be UTF-8, found byte 0x{raw[error.start]:02x} at {error.start}") from None
    ids = _Ids(files, name)
    ids.add_all((line.rstrip("\r"), index) for index, line in enumerate(lines[:-1] if not lines[-1] else lines))
    return _with_added(files, ids)


_READERS: Mapping[str, Callable[[TokenizerFiles, str], Vocabulary]] = {
    FAST_NAME: _read_fast,
    "vocab.json": _read_slow_json,
    "tokenizer.model": _read_pieces,
    "spiece.model": _read_pieces,
    "sentencepiece.bpe.model": _read_pieces,
    "vocab.txt": _read_lines,
}
VOCABULARY_NAMES = (*_READERS, ADDED_NAME)  # what says which token has which id
TOKENIZER_NAMES = frozenset({
    *_READERS, SETTINGS_NAME, ADDED_NAME, "special_tokens_map.json", "merges.txt", "tekken.json",
})  # fmt: skip


def _with_added(files: TokenizerFiles, ids: _Ids) -> Vocabulary:
    """Add the tokens of the files beside a slow tokenizer."""
    added = {}
    for token, index in files.document(ADDED_NAME).items():
        ids.add(token, index)
        added[token] = AddedToken(token)
    for described, index in _decoder(files):
        ids.add(described.content, index)
        added[described.content] = described
    return ids.vocabulary(added)


def _decoder(files: TokenizerFiles) -> list[tuple[AddedToken, int]]:
    """Read the added tokens of `tokenizer_config.json`, by id."""
    decoder = files.document(SETTINGS_NAME).get(DECODER_KEY, {})
    if not isinstance(decoder, dict):
        raise files.error(SETTINGS_NAME, f"'{DECODER_KEY}' must be an object, found {shown(decoder)}")
    added_tokens = []
    for text, record in decoder.items():
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_TOKEN_ID))):
            raise files.error(SETTINGS_NAME, f"'{DECODER_KEY}' has the id {shown(text)}")
        added_tokens.append((_added_token(files, SETTINGS_NAME, record), int(text)))
    return sorted(added_tokens, key=lambda pair: pair[1])


def _added_token(files: TokenizerFiles, name: str, record: JsonValue) -> AddedToken:
    content = record.get("content") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(content, str):
        raise files.error(name, f"an added token needs its 'content', found {shown(record)}")
    flags = {}
    for flag in _FLAGS:
        value = record.get(flag, flag == "normalized")
        if not isinstance(value, bool):
            raise files.error(name, f"'{flag}' of {shown(content)} must be true or false, found {shown(value)}")
        flags[flag] = value
    return AddedToken(content, **flags)


class _Ids:
    """Collects the ids of one file; refuses duplicate tokens and ids."""

    def __init__(self, files: TokenizerFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._ids: dict[str, int] = {}
        self._tokens: dict[int, str] = {}

    def __contains__(self, token: object) -> bool:
        return token in self._ids

    def add_all(self, pairs: Iterable[tuple[str, JsonValue]]) -> None:
        for token, index in pairs:
            self.add(token, index)

    def add(self, token: str, index: JsonValue) -> None:
        if type(index) is not int or not 0 <= index <= MAX_TOKEN_ID:
            raise self._error(f"the id of {shown(token)} must be between 0 and {MAX_TOKEN_ID}, found {shown(index)}")
        if self._ids.setdefault(token, index) != index:
            raise self._error(f"{shown(token)} has the ids {self._ids[token]} and {index}")
        if self._tokens.setdefault(index, token) != token:
            raise self._error(f"{shown(self._tokens[index])} and {shown(token)} both have the id {index}")

    def add_next(self, token: str, index: int) -> None:
        """Add a token that loaders number themselves, after all others."""
        after = max(self._tokens, default=-1) + 1
        if index != after:
            raise self._error(
                f"{SETTINGS_NAME} gives {shown(token)}, which {self._name} lacks, the id {index}: it would get {after}"
            )
        self.add(token, index)

    def vocabulary(self, added: Mapping[str, AddedToken]) -> Vocabulary:
        if not self._ids:
            raise self._error("there is no token")
        by_id = {token: index for index, token in sorted(self._tokens.items())}
        return Vocabulary(MappingProxyType(by_id), MappingProxyType(dict(added)), self._name)

    def _error(self, message: str) -> MergePipeError:
        return self._files.error(self._name, message)
