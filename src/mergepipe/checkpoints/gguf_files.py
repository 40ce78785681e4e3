"""GGUF files: opened as checkpoints under the names of Hugging Face, and written from a merged model."""

from __future__ import annotations

import math
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.codes import CodedTensor, Scheme
from mergepipe.checkpoints.config_files import config_bytes, parse_config
from mergepipe.checkpoints.contract import GGUF_SUFFIX, Checkpoint, CheckpointFile, Readable, TensorEntry
from mergepipe.checkpoints.open_files import decoded, open_files, read_span
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.checkpoints.sentencepiece import read_pieces
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, SETTINGS_NAME, read_vocabulary
from mergepipe.core.blocks import BF16, DTYPES, F16, F32, DType, Span, element_count
from mergepipe.core.strict_json import shown
from mergepipe.errors import MergePipeError, UnsupportedError, damaged, library, unsupported
from mergepipe.storage import owned
from mergepipe.storage.contract import Digested, FileId, FileStatus, Store
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output import write_durably

ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF's architecture by `model_type`, of those whose tensors GGUF holds as they are but for their names and rows."""
READ_ARCHITECTURES: Final = (*dict.fromkeys(ARCHITECTURES.values()), "qwen3moe")
IN_PAIRS: Final = ("llama",)  # the rows of Q and K stand as llama.cpp rotates them: neighbours, not halves of a head
_MODULES: Final = ("model.embed_tokens", "model.norm", "lm_head")
EMBEDDING: Final = "model.embed_tokens.weight"
_LAYER_MODULES: Final = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj",
)  # fmt: skip
_STACKED: Final = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<matrix>\w+_proj\.weight)")
PAIRED: Final = re.compile(r"model\.layers\.\d+\.self_attn\.(?P<role>[qk])_proj\.(weight|bias)")
_SCALED_ROPES: Final = ("LINEAR", "YARN")  # names of gguf's
_ROPE_FACTORS: Final = "rope_freqs.weight"
_PLAIN: Final[Mapping[str, DType]] = {"F32": F32, "F16": F16, "BF16": BF16}
_ADVICE: Final = "name the safetensors model that it was converted from"
_OWN_CONFIG: Final = "give the model its own config.json"
_CONVERTER: Final = "merge into a folder, and convert that with llama.cpp's convert_hf_to_gguf.py"
_PIECES: Final = "tokenizer.model"
_READ_BYTES: Final = 1 << 20
_MOST_HEADER_BYTES: Final = 256 << 20  # the tokens and merges of 262,000 tokens take 12 MB
_MOST_TENSORS: Final = 1 << 20
_MOST_MATRICES: Final = 1 << 18  # 384 experts in 61 layers have 70,000
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


Json = Mapping[str, Any]


def gguf_library(where: object) -> Any:
    """Return the gguf package, which only this module imports."""
    return library("gguf", where, "gguf")


# --- reading ---


@dataclass(frozen=True, slots=True)
class GGUFRows(Scheme):
    """Rows of a GGUF tensor as gguf dequantises them; `head_rows` are those of a head whose halves lie interleaved."""

    type_name: str
    row_bytes: int
    head_rows: int = 0

    def spans(self, rows: Span) -> tuple[Span, ...]:
        step = max(1, self.head_rows)
        first, last = rows.start // step * step, -(-rows.stop // step) * step
        return (Span(first * self.row_bytes, last * self.row_bytes),)

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        plain = _PLAIN.get(self.type_name)
        if plain is not None:
            values = decoded(raw[0], plain.kernel_code).reshape(-1, self.columns)
        else:
            gguf = gguf_library("")
            stored = raw[0].reshape(-1, self.row_bytes)
            values = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[self.type_name])
        if self.head_rows:
            halves = values.reshape(-1, self.head_rows // 2, 2, self.columns).swapaxes(1, 2)
            first = rows.start % self.head_rows
            values = halves.reshape(-1, self.columns)[first : first + rows.n_elements]
        return np.ascontiguousarray(values, np.float32)


def open_gguf(store: Store, path: Location, status: FileStatus) -> Checkpoint:
    """Open a GGUF file; reads its header, which holds the tokenizer too.

    Raises:
        UnsupportedError: `extra.missing`; an architecture whose names are not known, or one of several files.
        CorruptError: `checkpoint.damaged`, it is cut off or contradicts itself.
    """
    gguf = gguf_library(path)
    header = Header(store, path)
    facts, infos = header.read()
    architecture = str(facts.get("general.architecture"))
    if architecture not in READ_ARCHITECTURES:
        message = (
            f"is of the architecture {shown(architecture)}; of GGUF files {', '.join(READ_ARCHITECTURES)} are read"
        )
        raise unsupported(path, message, _ADVICE)
    if facts.get("split.count", 1) not in (0, 1):
        hint = "join them with llama-gguf-split"
        raise unsupported(path, f"is one of {facts['split.count']} files", hint)
    keys = ("block_count", "attention.head_count", "attention.head_count_kv")
    n_layers, n_heads, n_of_keys = (facts.get(f"{architecture}.{key}") for key in keys)
    counts = [count for count in (n_layers, n_heads, n_of_keys or n_heads) if type(count) is int]
    if len(counts) < 3 or not all(0 < count < _MOST_TENSORS for count in counts):
        raise header.damaged("does not say how many layers and heads there are")
    if counts[0] > len(infos):
        raise header.damaged(f"says that it has {counts[0]} layers, and has {len(infos)} tensors")
    names = {stored: name for name, stored in stored_names(gguf, architecture, counts[0])}
    heads = {"q": counts[1], "k": counts[2]} if architecture in IN_PAIRS else {}
    tensors: dict[str, Readable] = {}
    schemes: set[str] = set()
    for info in infos:
        if info[0] == _ROPE_FACTORS:
            continue  # follows from the configuration
        if info[0] not in names:
            raise unsupported(path, f"holds {shown(info[0])}, and {architecture} models have no such tensor", _ADVICE)
        for tensor in header.tensors_of(gguf, names[info[0]], info, heads):
            tensors[tensor.name] = tensor
            if len(tensors) > _MOST_MATRICES:
                raise header.damaged(f"has more than {_MOST_MATRICES} tensors and matrices of experts")
        kind = gguf.GGMLQuantizationType(info[2]).name
        schemes |= set() if kind in _PLAIN else {f"GGUF {kind}"}
    file = CheckpointFile(path, FileId(path.name, header.size_bytes, status.version, header.digest))
    return Checkpoint(
        path, path.parent, MappingProxyType(tensors), (file,), (), quantisation=", ".join(sorted(schemes))
    )


Info = tuple[str, tuple[int, ...], int, int]  # of a tensor: its name, dimensions, type, and offset in the file


class Header:
    """The header of a GGUF file: its facts, and what it says of each tensor. Memory: the header."""

    def __init__(self, store: Store, path: Location) -> None:
        self.path, self.size_bytes = path, store.size_bytes(path)
        self.digest = ""
        self._store = store
        self._content = bytearray()
        self._at = 0

    def damaged(self, message: str) -> MergePipeError:
        return damaged(self.path, message, "download it again")

    def read(self) -> tuple[dict[str, Any], list[Info]]:
        """Return the facts without arrays, and name, dimensions, type and offset in the file of each tensor."""
        magic, version, n_tensors, n_facts = self._take("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise self.damaged(f"is not GGUF of version 2 or 3: {shown(magic)}, {version}")
        if max(n_tensors, n_facts) > _MOST_TENSORS:
            raise self.damaged(f"claims {n_tensors} tensors and {n_facts} metadata values")
        facts = {self._text(): self._value(*self._take("<I")) for _ in range(n_facts)}
        infos = []
        for _ in range(n_tensors):
            name, (n_dims,) = self._text(), self._take("<I")
            if n_dims > 4:
                raise self.damaged(f"{shown(name)} has {n_dims} dimensions")
            dims = self._take(f"<{n_dims}Q")
            infos.append((name, dims, *self._take("<IQ")))
        alignment = facts.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or len({info[0] for info in infos}) < n_tensors:
            raise self.damaged("has a tensor twice, or an invalid alignment")
        self.digest = blake3(self._content[: self._at]).hexdigest(length=16)
        start = -(-self._at // alignment) * alignment
        return facts, [(name, dims, kind, start + offset) for name, dims, kind, offset in infos]

    def tensors_of(self, gguf: Any, name: str, info: Info, heads: Mapping[str, int]) -> Iterator[Readable]:
        """Yield what is read of a tensor, of stacked experts one by one: their matrices follow each other."""
        stored, dims, kind, offset = info
        match = _STACKED.fullmatch(name)
        if match is None:
            yield self.tensor(gguf, name, info, heads)
            return
        if len(dims) != 3 or not all(dims):
            raise self.damaged(f"{shown(stored)} of {list(reversed(dims))} is not a stack of experts")
        for expert in range(dims[2]):
            of_expert = f"{match['experts']}.{expert}.{match['matrix']}"
            tensor = self.tensor(gguf, of_expert, (stored, dims[:2], kind, offset), heads)
            offset += tensor.nbytes
            yield tensor

    def tensor(self, gguf: Any, name: str, info: Info, heads: Mapping[str, int]) -> Readable:
        """Return what is read of a tensor; `heads` are those of Q and K where their rows are in pairs."""
        granularity = self._store.terms(self.path).granularity_bytes
        shape = tuple(reversed(info[1]))
        try:
            kind = gguf.GGMLQuantizationType(info[2])
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.damaged(f"{shown(name)} is of the unknown type {info[2]}") from None
        columns = shape[-1] if shape else 1
        nbytes = element_count(shape) // block * block_bytes
        if columns % block or info[3] + nbytes > self.size_bytes:
            raise self.damaged(f"{shown(name)} of {list(shape)} reaches beyond the file, or is not of whole blocks")
        plain = _PLAIN.get(kind.name)
        if plain is None and kind not in gguf.quants._type_traits:
            message = f"{shown(name)} is {kind.name}, which gguf {gguf.__name__} does not read"
            raise unsupported(self.path, message, _ADVICE)
        head_rows = rows_of_head(name, shape, heads, self.path)
        if plain is not None and not head_rows:
            return TensorEntry(name, plain, shape, self.path, info[3], nbytes, granularity_bytes=granularity)
        if len(shape) == 1:  # a bias: its rows are its elements
            columns = 1
        row_bytes = columns // block * block_bytes
        entry = TensorEntry(name, DTYPES["U8"], (nbytes,), self.path, info[3], nbytes, granularity_bytes=granularity)
        return CodedTensor(name, shape, (entry,), GGUFRows(columns, kind.name, row_bytes, head_rows), plain or BF16)

    def _value(self, kind: int) -> Any:
        """Read a value; of an array nothing is kept."""
        if kind in _SCALARS:
            return self._take(f"<{_SCALARS[kind]}")[0]
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise self.damaged(f"has a value of the unknown kind {kind}")
        item, length = self._take("<IQ")
        if item in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[item]))
        elif item == _STRING and length <= _MOST_HEADER_BYTES // 8:
            for _ in range(length):
                self._skip(*self._take("<Q"))
        else:
            raise self.damaged(f"has an array of {length} values of kind {item}")
        return None

    def _text(self) -> str:
        (length,) = self._take("<Q")
        at = self._at
        self._skip(length)
        return self._content[at : self._at].decode(errors="replace")

    def _take(self, form: str) -> tuple[Any, ...]:
        at = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._content, at)

    def _skip(self, nbytes: int) -> None:
        """Go on by some bytes, of which the last is then read."""
        end = self._at + nbytes
        if end > min(self.size_bytes, _MOST_HEADER_BYTES):
            raise self.damaged(f"is cut off, or its header has more than {_MOST_HEADER_BYTES} bytes")
        while end > len(self._content):
            more = max(_READ_BYTES, end - len(self._content))
            read = self._store.read_metadata(self.path, len(self._content), min(more, self.size_bytes))
            if not read:
                raise self.damaged("is cut off inside its header")
            self._content += read
        self._at = end


def rows_of_head(name: str, shape: tuple[int, ...], heads: Mapping[str, int], where: object) -> int:
    """Return the rows of a head of Q or K by their `heads`, where these are in pairs; 0 of all else."""
    match = PAIRED.fullmatch(name)
    if match is None or not heads:
        return 0
    head_rows, rest = divmod(shape[0], heads[match["role"]])
    if rest or head_rows % 2 or not head_rows:
        message = f"{shown(name)} has {shape[0]} rows for {heads[match['role']]} heads"
        raise damaged(where, message, "it needs a configuration of its own")
    return head_rows


def stored_names(gguf: Any, architecture: str, n_layers: int) -> Iterator[tuple[str, str]]:
    """Pair the names of Hugging Face with those of GGUF, as gguf's own map has them."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    to_stored = gguf.get_tensor_name_map(kind, n_layers)
    modules = [*_MODULES, *(f"model.layers.{i}.{module}" for i in range(n_layers) for module in _LAYER_MODULES)]
    for name in (f"{module}.{ending}" for module in modules for ending in ("weight", "bias")):
        stored = to_stored.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is not None:
            yield name, stored


# --- writing ---


_LIKE_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final[Mapping[object, str]] = {
    _LIKE_GPT4.format(digits=r"\p{N}{1,3}"): "llama-bpe", _LIKE_GPT4.format(digits=r"\p{N}"): "qwen2",
}  # fmt: skip
"""llama.cpp's name of a tokenizer by the expression that it splits text with."""
_ENCODING: Final = re.compile(r"(?i).*?[-._](F32|F16|BF16|Q8_0|I?Q\d\w*)")
_FILE_TYPES: Final = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_CHUNK_ELEMENTS: Final = 4 << 20
Read = Callable[[TensorEntry, Span], NDArray[np.uint8]]


def stores_codes(name: str) -> bool:
    """Whether the matrices of a file of this name are stored as codes with scales."""
    match = _ENCODING.fullmatch(name.removesuffix(GGUF_SUFFIX))
    return match is not None and match[1].upper() == "Q8_0"


@dataclass(frozen=True, slots=True)
class GGUFTarget:
    """How a model is written as GGUF: its architecture, names and vocabulary, all checked before it is merged.

    The end of the file's name says how matrices are stored (`-F16`, `-BF16`, `-F32`, `-Q8_0`, as llama.cpp names its
    files), else they stay as they are; vectors are float32.
    """

    name: str
    config: Json
    tokenizer: Json
    small_files: Mapping[str, bytes]
    encoding: str
    architecture: str
    names: Mapping[str, str]

    @classmethod
    def of(cls, name: str, small_files: Mapping[str, bytes], tensors: Mapping[str, tuple[int, ...]]) -> GGUFTarget:
        """Check that a model of these small files and shapes by name can be written.

        Raises:
            UnsupportedError: gguf is missing, or the architecture, a tensor, the tokenizer or the encoding is unknown.
            CorruptError: the configuration lacks a number, or the tokenizer contradicts itself or the tensors.
        """
        gguf = gguf_library(name)
        match = _ENCODING.fullmatch(name.removesuffix(GGUF_SUFFIX))
        encoding = match[1].upper() if match else ""
        if encoding and encoding not in _FILE_TYPES:
            hint = f"name it for one of {', '.join(_FILE_TYPES)}, and quantise that with llama-quantize"
            raise UnsupportedError.of("model.unsupported", name, f"{encoding} is not written", hint)
        config, tokenizer = (
            parse_config(small_files[file], file) if file in small_files else {}
            for file in (CONFIG_NAME, "tokenizer.json")
        )
        architecture = ARCHITECTURES.get(str(config.get("model_type")), "")
        if not architecture:
            known = ", ".join(ARCHITECTURES)
            message = f"the model is of the type {shown(config.get('model_type'))}; {known} are written as GGUF"
            raise UnsupportedError.of("model.unsupported", name, message, _CONVERTER)
        target = cls(name, config, tokenizer, small_files, encoding, architecture, {})
        n_layers = min(target._count("num_hidden_layers"), len(tensors))
        names = dict(stored_names(gguf, architecture, n_layers))
        if unknown := [tensor for tensor in tensors if tensor not in names]:
            message = f"{len(unknown)} tensors have no name in GGUF, {shown(unknown[0])} among them"
            raise UnsupportedError.of("model.unsupported", name, message, _CONVERTER)
        target._add_facts(gguf, gguf.GGUFWriter(None, architecture))
        for tensor, shape in tensors.items() if architecture in IN_PAIRS else ():
            rows_of_head(tensor, shape, target._heads(), name)
        target._tokens(gguf, tensors.get(EMBEDDING, (0,))[0])
        return replace(target, names=names)

    def write(self, store: Store, model: Path, path: Path) -> Digested:
        """Write the file durably from a model's safetensors file; return its record.

        Memory: 4 million elements, in float32, and the vocabulary.
        """
        gguf = gguf_library(self.name)
        entries = read_header(store, Location.local(model)).entries
        with tempfile.TemporaryDirectory(prefix="mergepipe-gguf-") as folder:
            ids = {key: value for key, value in self.config.items() if key.endswith("_token_id")}
            stated = {key: value for key, value in ids.items() if type(value) is int and value >= 0}
            for name, content in {**self.small_files, CONFIG_NAME: config_bytes(stated)}.items():
                if "/" not in name:
                    write_durably(Path(folder) / name, content, Ledger())
            writer = gguf.GGUFWriter(None, self.architecture)
            self._add_facts(gguf, writer)
            n_rows = next(entry.shape[0] for entry in entries if entry.name == EMBEDDING)
            self._add_vocabulary(gguf, writer, Path(folder), n_rows)
        kinds = [self._kind(gguf, entry) for entry in entries]
        factors = self._rope_factors()
        if factors is not None:
            writer.add_tensor_info(_ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for entry, kind in zip(entries, kinds, strict=True):
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            nbytes = entry.n_elements // block * block_bytes
            writer.add_tensor_info(self.names[entry.name], entry.shape, np.dtype(np.float32), nbytes, kind)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        stream = writer.fout[0]
        writer.write_padding(stream, stream.tell())
        if factors is not None:
            stream.write(factors.tobytes())
            writer.write_padding(stream, factors.nbytes)
        with open_files(store, [Location.local(model)]) as files:
            read = partial(read_span, files=files, purpose=Purpose.METADATA)
            for entry, kind in zip(entries, kinds, strict=True):
                written = 0
                for rows in self._rows(entry, read):
                    written += stream.write(np.ascontiguousarray(gguf.quants.quantize(rows, kind)).tobytes())
                writer.write_padding(stream, written)
        stream.flush()
        owned.sync_file(stream.fileno())
        writer.close()
        digest = blake3()
        digest.update_mmap(path)
        return Digested(path.name, path.stat().st_size, digest.hexdigest(length=16))

    def _kind(self, gguf: Any, entry: TensorEntry) -> Any:
        """The type of a stored tensor, as llama.cpp's converter chooses it."""
        kinds = gguf.GGMLQuantizationType
        if len(entry.shape) < 2 or entry.name.endswith("norm.weight"):
            return kinds.F32
        kind = kinds[self.encoding or (entry.dtype.name if entry.dtype.name in _PLAIN else "F32")]
        return kinds.F16 if entry.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind

    def _rows(self, entry: TensorEntry, read: Read) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor in float32, some rows at a time, those of Q and K in the order of the format."""
        columns = entry.shape[-1] if len(entry.shape) > 1 else 1
        heads = self._heads() if self.architecture in IN_PAIRS else {}
        head_rows = rows_of_head(entry.name, entry.shape, heads, self.name)
        row_step = head_rows or 1
        step = max(1, _CHUNK_ELEMENTS // (columns * row_step)) * row_step * columns
        for first in range(0, entry.n_elements, step):
            span = Span(first, min(entry.n_elements, first + step))
            values = decoded(read(entry, span), entry.dtype.kernel_code).reshape(-1, columns)
            if head_rows:
                values = values.reshape(-1, 2, head_rows // 2, columns).swapaxes(1, 2).reshape(-1, columns)
            yield values if len(entry.shape) > 1 else values.reshape(-1)

    def _number(self, key: str, default: float | None = None, *, of: Json | None = None) -> float:
        """Return a number above 0 of the configuration, or of a part of it."""
        section = self.config if of is None else of
        value: object = default if section.get(key) is None else section[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 31:
            message = f"its configuration states {shown(value)} as '{key}', where a number above 0 is needed"
            raise damaged(self.name, message, _OWN_CONFIG)
        return float(value)

    def _count(self, key: str, default: float | None = None) -> int:
        return int(self._number(key, default))

    def _heads(self) -> dict[str, int]:
        n_heads = self._count("num_attention_heads")
        return {"q": n_heads, "k": self._count("num_key_value_heads", n_heads)}

    def _head_size(self) -> int:
        return self._count("head_dim", self._count("hidden_size") // self._heads()["q"])

    def _rope(self) -> Json:
        """The rotary embedding's parameters."""
        rope = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else None
        if str(kind).upper() not in ("DEFAULT", "LLAMA3", *_SCALED_ROPES):
            message = f"its rotary embedding is of a type that is not written: {shown(kind)}"
            raise UnsupportedError.of("model.unsupported", self.name, message, _CONVERTER)
        theta = self._number("rope_theta", self._number("rope_theta", 10000.0), of=rope)
        return {**rope, "rope_type": kind, "rope_theta": theta}

    def _rope_factors(self) -> NDArray[np.float32] | None:
        """Return the divisor of each rotary frequency. Source: Llama 3.1's scaling of rotary embeddings."""
        rope, size = self._rope(), self._head_size()
        if rope["rope_type"] != "llama3":
            return None
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, context = (self._number(key, of=rope) for key in keys)
        waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
        share = np.clip((context / waves - low) / (high - low), 0, 1)
        return np.asarray(1 / ((1 - share) / factor + share), np.float32)

    def _add_facts(self, gguf: Any, writer: Any) -> None:
        rope, heads = self._rope(), self._heads()
        writer.add_context_length(self._count("max_position_embeddings", 2048))
        writer.add_embedding_length(self._count("hidden_size"))
        writer.add_block_count(self._count("num_hidden_layers"))
        writer.add_feed_forward_length(self._count("intermediate_size"))
        writer.add_head_count(heads["q"])
        writer.add_head_count_kv(heads["k"])
        for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
            add(self._head_size())
        writer.add_layer_norm_rms_eps(self._number("rms_norm_eps", 1e-6))
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"].upper() in _SCALED_ROPES:
            writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
            writer.add_rope_scaling_factor(self._number("factor", of=rope))
        if rope["rope_type"] == "yarn":
            length = self._number("original_max_position_embeddings", self._number("max_position_embeddings"), of=rope)
            writer.add_rope_scaling_orig_ctx_len(int(length))
        writer.add_file_type(_FILE_TYPES.get(self.encoding, 1))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    # --- the vocabulary ---

    def _vocabulary_kind(self) -> str:
        """Return llama.cpp's name of how a byte-level tokenizer splits text; empty for SentencePiece.

        Raises:
            UnsupportedError: it is another tokenizer.
        """
        splitter = self.tokenizer.get("pre_tokenizer") or {}
        steps = splitter.get("pretokenizers", [splitter])
        if steps and steps[-1].get("type") == "ByteLevel" and self.tokenizer.get("model", {}).get("type") == "BPE":
            stated = [(step.get("pattern") or {}).get("Regex") for step in steps if step.get("type") == "Split"]
            kind = _SPLITS.get(stated[0]) if len(stated) == 1 and len(steps) == 2 else None
            kind = "gpt-2" if len(steps) == 1 and steps[0].get("use_regex", True) else kind
            if kind is not None:
                return kind
        elif _PIECES in self.small_files:
            return ""
        message = f"its tokenizer splits text in another way than Llama 3, Qwen 2 and GPT-2, and there is no {_PIECES}"
        raise UnsupportedError.of("model.unsupported", self.name, message, _CONVERTER)

    def _tokens(self, gguf: Any, n_rows: int) -> list[tuple[str, float, int]]:
        """Return text, score and type of each row's token: a piece's own, but for tokens that are added.

        Raises:
            CorruptError: the tokenizer's files contradict themselves, or it has more tokens than rows.
        """
        types, root = gguf.TokenType, Location.local(Path(self.name))
        pieces = {} if self._vocabulary_kind() else read_pieces(self.small_files[_PIECES], where=_PIECES)
        stored = Checkpoint(root, root, MappingProxyType({}), (), tuple(self.small_files))
        vocabulary = read_vocabulary(stored, self.small_files)
        assert vocabulary is not None
        if vocabulary.n_ids > n_rows:
            message = f"its tokenizer has {vocabulary.n_ids} tokens, and the embedding {n_rows} rows"
            raise damaged(self.name, message, "give it the model's own tokenizer")
        added_score = -1000.0 if pieces else 0.0
        tokens = [(f"[PAD{row}]", added_score, int(types.UNUSED)) for row in range(n_rows)]
        for text, row in vocabulary.ids.items():
            score, kind = pieces.get(text, (added_score, types.NORMAL))
            added = vocabulary.added.get(text)
            if added is not None and kind in (types.NORMAL, types.USER_DEFINED):
                kind = types.CONTROL if added.special else types.USER_DEFINED
            tokens[row] = text, score, int(kind)
        return tokens

    def _add_vocabulary(self, gguf: Any, writer: Any, folder: Path, n_rows: int) -> None:
        kind, tokens = self._vocabulary_kind(), self._tokens(gguf, n_rows)
        if not kind:
            writer.add_token_scores([score for _, score, _ in tokens])
            settings = parse_config(self.small_files.get(SETTINGS_NAME, b"{}"), SETTINGS_NAME)
            if isinstance(settings.get("add_prefix_space"), bool):
                writer.add_add_space_prefix(settings["add_prefix_space"])
        writer.add_vocab_size(n_rows)
        writer.add_tokenizer_model("gpt2" if kind else "llama")
        writer.add_tokenizer_pre(kind or "default")
        writer.add_token_list([text for text, _, _ in tokens])
        writer.add_token_types([type_ for _, _, type_ in tokens])
        gguf.SpecialVocab(folder, load_merges=bool(kind), n_vocab=n_rows).add_to_gguf(writer, quiet=True)
