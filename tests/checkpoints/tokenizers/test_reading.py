"""Vocabularies from tokenizer files, sound ones and ones that lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vocabulary_cases import fast_tokenizer

from mergepipe.checkpoints.added_tokens import extended, extended_files
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.vocabulary import AddedToken, TokenizerFiles, Vocabulary, read_vocabulary
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.refusals import refuses

File = bytes | str | dict[str, object]


def checkpoint(directory: Path, **files: File) -> Checkpoint:
    """A checkpoint of small files only: `tokenizer__json` is tokenizer.json."""
    names = []
    for key, content in files.items():
        name = key.replace("__", ".")
        text = json.dumps(content) if isinstance(content, dict) else content
        (directory / name).write_bytes(text.encode() if isinstance(text, str) else text)
        names.append(name)
    return Checkpoint(Location.local(directory), Location.local(directory), {}, (), tuple(sorted(names)))


def ids(directory: Path, **files: File) -> dict[str, int]:
    found = read_vocabulary(checkpoint(directory, **files), LocalStore())
    assert found is not None
    return dict(found.ids)


def varint(value: int) -> bytes:
    raw = b""
    while value > 0x7F:
        raw, value = raw + bytes([value & 0x7F | 0x80]), value >> 7
    return raw + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def pieces(*texts: str) -> bytes:
    """A sentencepiece model: pieces with a score and a type, and a trainer's settings after them."""
    records = [message(1, message(1, text.encode()) + b"\x15\x00\x00\x80\x3f" + b"\x18\x01") for text in texts]
    return b"".join(records) + message(2, b"\x18\x01" + message(1, b"corpus"))


def test_read_vocabulary__of_every_kind_of_file(tmp_path: Path) -> None:
    added: File = {"added_tokens_decoder": {"3": {"content": "<x>", "special": True}}}
    wanted = {"a": 0, "b": 1, "c": 2, "<x>": 3}
    kinds: dict[str, File] = {
        "tokenizer__json": fast_tokenizer(["a", "b", "c"]),
        "vocab__json": {"c": 2, "a": 0, "b": 1},
        "vocab__txt": "a\nb\r\nc\n",
        "tokenizer__model": pieces("a", "b", "c"),
        "spiece__model": pieces("a", "b", "c"),
    }
    for name, content in kinds.items():
        assert ids(tmp_path, **{name: content, "tokenizer_config__json": added}) == wanted, name


def test_read_vocabulary__a_unigram_model_numbers_its_pieces_by_place(tmp_path: Path) -> None:
    document: File = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.5]]}, "added_tokens": []}
    assert ids(tmp_path, tokenizer__json=document) == {"<unk>": 0, "▁a": 1}


def test_read_vocabulary__keeps_the_settings_of_added_tokens(tmp_path: Path) -> None:
    found = read_vocabulary(checkpoint(tmp_path, tokenizer__json=fast_tokenizer(["a"], {"<x>": 1})), LocalStore())
    assert found is not None
    assert found.added == {"<x>": AddedToken("<x>", special=True, normalized=False)}
    assert (found.n_ids, found.as_added("a")) == (2, AddedToken("a"))


def test_read_vocabulary__settings_may_state_that_there_is_no_maximal_length(tmp_path: Path) -> None:
    settings: File = {"model_max_length": int(1e30)}
    assert ids(tmp_path, vocab__json={"a": 0}, tokenizer_config__json=settings) == {"a": 0}


def test_read_vocabulary__nothing_to_read_is_none(tmp_path: Path) -> None:
    assert read_vocabulary(checkpoint(tmp_path), LocalStore()) is None


FAST = fast_tokenizer(["a", "b"])
LIES: list[tuple[dict[str, File], str]] = [
    ({"tokenizer__json": "{"}, "not valid JSON"),
    ({"tokenizer__json": '{"model": {"vocab": {"a": 0, "a": 1}}}'}, "'a' occurs twice"),
    ({"tokenizer__json": {"model": {}}}, "'model' needs a 'vocab', found None"),
    ({"tokenizer__json": {"model": {"vocab": [3]}}}, "a list of .piece, score. is needed, found 3"),
    ({"tokenizer__json": {"model": {"vocab": {}}}}, "there is no token"),
    ({"tokenizer__json": {"model": {"vocab": {"a": -1}}}}, "the id of 'a' must be between 0 and"),
    ({"tokenizer__json": {"model": {"vocab": {"a": True}}}}, "found True"),
    ({"tokenizer__json": {"model": {"vocab": {"a": 1 << 40}}}}, "found 1099511627776"),
    ({"tokenizer__json": {"model": {"vocab": {"a": 3, "b": 3}}}}, "'a' and 'b' both have the id 3"),
    ({"tokenizer__json": {**FAST, "added_tokens": [{"content": "a", "id": 9}]}}, "ids 0 and 9"),
    ({"tokenizer__json": {**FAST, "added_tokens": [{"id": 9}]}}, "needs its 'content'"),
    (
        {"tokenizer__json": {**FAST, "added_tokens": [{"content": "x", "id": 9, "special": 1}]}},
        "'special' of 'x' must be true or false, found 1",
    ),
    (
        {"tokenizer__json": FAST, "tokenizer_config__json": {"added_tokens_decoder": {"7": {"content": "x"}}}},
        "tokenizer_config.json gives 'x', which tokenizer.json lacks, the id 7: it would get 2",
    ),
    (
        {"vocab__json": {"a": 0}, "tokenizer_config__json": {"added_tokens_decoder": {"-1": {"content": "x"}}}},
        "has the id '-1'",
    ),
    ({"vocab__json": {"a": 0}, "tokenizer_config__json": {"added_tokens_decoder": []}}, "an object"),
    ({"vocab__json": {"a": 0}, "added_tokens__json": {"a": 1}}, "'a' has the ids 0 and 1"),
    ({"vocab__txt": "a\na\n"}, "'a' has the ids 0 and 1"),
    ({"vocab__txt": b"a\n\xff\n"}, "found byte 0xff at 2"),
    ({"tokenizer__model": b""}, "is it a sentencepiece model?"),
    ({"tokenizer__model": pieces("a", "a")}, "'a' occurs twice"),
    ({"tokenizer__model": message(1, b"\x18\x01")}, "has no text"),
    ({"tokenizer__model": pieces("abc")[:4]}, "needs"),
    ({"tokenizer__model": b"\x0a" + varint(1 << 60) + b"x"}, "found 1"),
    ({"tokenizer__model": b"\xff" * 20}, "does not end"),
    ({"tokenizer__model": b"\x0b\x00"}, "wire type 3"),
    ({"tokenizer__model": b"\x02\x00"}, "field 0"),
    ({"tokenizer__model": b"\x08\x00"}, "must be a message"),
    ({"tokenizer__model": message(1, message(1, b"\xff"))}, "not UTF-8"),
]


@pytest.mark.parametrize(("files", "part"), LIES, ids=range(len(LIES)))
def test_read_vocabulary__names_every_lie(files: dict[str, File], part: str, tmp_path: Path) -> None:
    with refuses(CorruptError, "tokenizer.damaged", f"{tmp_path}.*{part}"):
        read_vocabulary(checkpoint(tmp_path, **files), LocalStore())


def test_read_vocabulary__a_huge_file_is_not_read(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, tokenizer__json="{}")
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate(200 << 20)
    with pytest.raises(CorruptError, match="209715200 bytes, at most 134217728 are read"):
        read_vocabulary(model, LocalStore())


def test_read_vocabulary__refuses_ids_that_only_code_knows(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"save the tokenizer with a tokenizer\.json"):
        read_vocabulary(checkpoint(tmp_path, qwen__tiktoken=b"YQ== 0"), LocalStore())
    shifted: dict[str, File] = {"tokenizer_class": "XLMRobertaTokenizer"}
    model = checkpoint(tmp_path, tokenizer__model=pieces("a"), tokenizer_config__json=dict(shifted))
    with pytest.raises(UnsupportedError, match="ids other than their positions"):
        read_vocabulary(model, LocalStore())


NEW = (AddedToken("<n>", special=True, normalized=False), AddedToken("d"))


def test_extended_files__of_a_fast_tokenizer_are_read_back(tmp_path: Path) -> None:
    settings: File = {"added_tokens_decoder": {"2": {"content": "<x>"}}}
    model = checkpoint(
        tmp_path, tokenizer__json=fast_tokenizer(["a", "b"], {"<x>": 2}), tokenizer_config__json=settings
    )
    check_reading_back(model, tmp_path, {"tokenizer.json", "tokenizer_config.json"})


def test_extended_files__of_a_slow_tokenizer_are_read_back(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, vocab__json={"a": 0, "b": 1}, merges__txt="#version\n")
    check_reading_back(model, tmp_path, {"tokenizer_config.json", "added_tokens.json"})


def check_reading_back(model: Checkpoint, directory: Path, names: set[str]) -> None:
    before = read_vocabulary(model, LocalStore())
    assert before is not None
    output = extended(before, NEW)
    changed = extended_files(TokenizerFiles(model, LocalStore()), output, NEW)
    assert set(changed) == names
    for name, content in changed.items():
        (directory / name).write_bytes(content)
    sidecars = tuple(sorted({*model.sidecars, *changed}))
    after = read_vocabulary(
        Checkpoint(Location.local(directory), Location.local(directory), {}, (), sidecars), LocalStore()
    )
    assert after == Vocabulary(output.ids, {**before.added, **{token.content: token for token in NEW}}, before.file)


def test_extended_files__nothing_new_changes_nothing(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, vocab__json={"a": 0})
    assert extended_files(TokenizerFiles(model, LocalStore()), Vocabulary({"a": 0}, {}, "x"), ()) == {}


def test_extended_files__give_tokens_the_ids_that_the_tokenizers_library_gives(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = checkpoint(tmp_path, tokenizer__json=fast_tokenizer(["a", "b"], {"<x>": 2}))
    before = read_vocabulary(model, LocalStore())
    assert before is not None
    output = extended(before, NEW)
    raw = extended_files(TokenizerFiles(model, LocalStore()), output, NEW)["tokenizer.json"]
    loaded = tokenizers.Tokenizer.from_str(raw.decode())
    assert loaded.get_vocab() == dict(output.ids)
    assert loaded.encode("a d <n>b").ids == [0, 4, 3, 1]
