"""Synthetic checkpoint families: a base and experts fine-tuned from it, written by streaming."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, DType
from support.family_shapes import DEMO, QWEN3_0_6B, TINY, TINY_LLAMA, Architecture, FamilyShape, FamilyTensor
from support.rounding import NUMPY_DTYPES

__all__ = [
    "CANCELLING_AND_AGREEING",
    "DEMO", "QWEN3_0_6B", "TINY", "TINY_LLAMA", "Architecture", "FamilyPaths", "FamilyShape", "FamilyTensor",
    "family_bytes", "family_paths", "write_family", "write_models",
]  # fmt: skip

MIN_DELTA_STD = 3e-5
MAX_DELTA_STD = 1e-3
_WEIGHT_STD = np.float32(0.02)
_MIXED_STD = np.float32(1e-3)
_LEAST_PIVOT = 1e-6
Cosines = Sequence[Sequence[float]]
"""By expert its cosines with all experts, 1 with itself."""
CANCELLING_AND_AGREEING: Cosines = ((1, -0.95, 0, 0), (-0.95, 1, 0, 0), (0, 0, 1, 0.95), (0, 0, 0.95, 1))
"""Four experts: what the first two change nearly cancels, what the last two change is nearly the same."""
_TILE_ELEMENTS = 64 * 1024
_SIDECAR_BYTES = 64 * 1024  # generous room for config and tokenizer


@dataclass(frozen=True, slots=True)
class FamilyPaths:
    """Where the models of a family are: directories as `transformers` reads them."""

    base: Path
    experts: tuple[Path, ...]

    @property
    def models(self) -> tuple[Path, ...]:
        """The base, then the experts."""
        return (self.base, *self.experts)


@dataclass(frozen=True, slots=True)
class _Shard:
    """One weight file: its header and its tensors in the order they are stored, without gaps."""

    name: str
    tensors: tuple[FamilyTensor, ...]
    header: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The files every model of one family has."""

    shape: FamilyShape
    dtype: DType
    shards: tuple[_Shard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards) + _SIDECAR_BYTES


def family_paths(root: Path, experts: int) -> FamilyPaths:
    """Say where `write_family` puts the models."""
    return FamilyPaths(root / "base", tuple(root / f"expert-{i}" for i in range(1, experts + 1)))


def family_bytes(shape: FamilyShape, experts: int, dtype: DType = BF16) -> int:
    """Disk a family needs, rounded up by some KB a model."""
    return (1 + experts) * _layout(shape, dtype, None).nbytes


def _delta_std(seed: int, expert: int, tensor: str) -> float:
    """Standard deviation of the delta of `tensor` in expert number `expert` (from 1), before rounding."""
    low, high = math.log(MIN_DELTA_STD), math.log(MAX_DELTA_STD)
    return math.exp(_generator(seed, expert, f"size of {tensor}").uniform(low, high))


def write_family(
    root: Path,
    shape: FamilyShape,
    experts: int,
    seed: int = 0,
    dtype: DType = BF16,
    shard_bytes: int | None = None,
    *,
    threads: int = 2,
    is_fitted: bool = False,
    cosines: Cosines | None = None,
) -> FamilyPaths:
    """Write a base and `experts` models fine-tuned from it under `root`; same arguments, same bytes.

    Weights are N(0, 0.02²), norms around 1. An expert is the base plus a normal delta whose size is drawn per expert
    and tensor (`_delta_std`), or one like those of fine-tunes (`is_fitted`, see `_FittedDelta`), rounded to `dtype`;
    experts 2, 4, ... have the base's embeddings, bit for bit. With `cosines` all deltas are normal and of one size, and
    those of each pair of experts have the given cosine before rounding.
    `shard_bytes` caps the tensor bytes of a file (a larger tensor has its own); None writes one file a model.
    Memory: about 2 MB a thread, whatever the shape. FileExistsError: a model is there.
    """
    if experts < 0:
        raise ValueError(f"experts: {experts} is negative")
    layout = _layout(shape, dtype, shard_bytes)
    paths = family_paths(root, experts)
    mixing = None if cosines is None else mixing_of(cosines)
    if mixing is not None and len(mixing) != experts:
        raise ValueError(f"cosines of {len(mixing)} experts for {experts}")
    _write_models([_Model(layout, paths, number, seed, is_fitted, mixing) for number in range(1 + experts)], threads)
    return paths


def mixing_of(cosines: Cosines) -> tuple[tuple[float, ...], ...]:
    """Return the lower triangle `L` with `L L^T` the cosines: row i mixes independent deltas into that of expert i.

    Raises:
        ValueError: no deltas have these cosines.
    """
    rows: list[list[float]] = []
    for i, of_expert in enumerate(cosines):
        row: list[float] = []
        for j in range(i):
            rest = of_expert[j] - sum(row[k] * rows[j][k] for k in range(j))
            row.append(rest / rows[j][j] if rows[j][j] > _LEAST_PIVOT else 0.0)
        square = of_expert[i] - sum(value * value for value in row)
        row.append(math.sqrt(max(0.0, square)))
        rows.append(row)
        given = [sum(a * b for a, b in zip(row, other, strict=False)) for other in rows]
        if of_expert[i] != 1.0 or not np.allclose(given, of_expert[: i + 1], atol=1e-9):
            raise ValueError(f"not the cosines of deltas: {cosines}")
    return tuple(map(tuple, rows))


def write_models(
    root: Path, shape: FamilyShape, numbers: Sequence[int], seed: int = 0, dtype: DType = BF16, *, threads: int = 2
) -> tuple[Path, ...]:
    """Write some models of a family with the bytes of `write_family`: 0 is the base, which experts begin with."""
    layout, paths = _layout(shape, dtype, None), family_paths(root, max(numbers))
    models = [_Model(layout, paths, number, seed) for number in sorted(numbers)]
    _write_models(models, threads)
    return tuple(model.directory for model in models)


def _write_models(models: Sequence[_Model], threads: int) -> None:
    base = [model for model in models if model.number == 0]
    for model in base:
        _write_model(model)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_write_model, models[len(base) :]))


def _layout(shape: FamilyShape, dtype: DType, shard_bytes: int | None) -> _Layout:
    groups = list(_cut(shape.tensors(), dtype.itemsize, shard_bytes))
    names = (
        ["model.safetensors"]
        if shard_bytes is None
        else [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    )
    return _Layout(shape, dtype, tuple(_shard(n, g, dtype) for n, g in zip(names, groups, strict=True)))


def _cut(
    tensors: tuple[FamilyTensor, ...], itemsize: int, shard_bytes: int | None
) -> Iterator[tuple[FamilyTensor, ...]]:
    group: list[FamilyTensor] = []
    group_bytes = 0
    for tensor in tensors:
        nbytes = tensor.n_elements * itemsize
        if group and shard_bytes is not None and group_bytes + nbytes > shard_bytes:
            yield tuple(group)
            group, group_bytes = [], 0
        group.append(tensor)
        group_bytes += nbytes
    yield tuple(group)


def _shard(name: str, tensors: tuple[FamilyTensor, ...], dtype: DType) -> _Shard:
    """Lay tensors out by name, which is what the safetensors library does within one dtype."""
    ordered = tuple(sorted(tensors, key=lambda t: t.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.n_elements * dtype.itemsize
        entries[tensor.name] = {"dtype": dtype.name, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return _Shard(name, ordered, header, len(header) + end)


def _index(layout: _Layout) -> str:
    tensor_bytes = sum(shard.nbytes - len(shard.header) for shard in layout.shards)
    weight_map = {tensor.name: shard.name for shard in layout.shards for tensor in shard.tensors}
    content = {"metadata": {"total_size": tensor_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class _Model:
    """One model to write: number 0 is the base, which is written before any expert."""

    layout: _Layout
    paths: FamilyPaths
    number: int
    seed: int
    is_fitted: bool = False
    mixing: tuple[tuple[float, ...], ...] | None = None

    @property
    def directory(self) -> Path:
        return self.paths.models[self.number]

    def is_frozen(self, tensor: FamilyTensor) -> bool:
        return self.mixing is None and self.number > 0 and self.number % 2 == 0 and tensor.is_embedding

    def changes(self, tensor: FamilyTensor) -> _Values:
        """What this model adds to the base's tensor, from its first element on; all of a tensor for the base."""
        random = _generator(self.seed, self.number, tensor.name)
        if self.number == 0:
            return _NormalValues(random, _WEIGHT_STD)
        if self.mixing is not None:
            parts = enumerate(self.mixing[self.number - 1])
            named = [(share, _generator(self.seed, 0, f"delta {k} of {tensor.name}")) for k, share in parts]
            return _MixedValues(tuple((share, _NormalValues(one, _MIXED_STD)) for share, one in named))
        if self.is_fitted and len(tensor.shape) > 1:
            return _FittedDelta(random, _generator(self.seed, 0, f"shared by deltas of {tensor.name}"), tensor)
        return _NormalValues(random, np.float32(_delta_std(self.seed, self.number, tensor.name)))


class _Values(Protocol):
    """The values of one tensor, in order."""

    def take(self, n_elements: int) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class _NormalValues:
    random: np.random.Generator
    std: np.float32

    def take(self, n_elements: int) -> NDArray[np.float32]:
        return self.std * self.random.standard_normal(n_elements, np.float32)


@dataclass(frozen=True, slots=True)
class _MixedValues:
    """A sum of independent values, each times its share."""

    parts: tuple[tuple[float, _Values], ...]

    def take(self, n_elements: int) -> NDArray[np.float32]:
        total = np.zeros(n_elements, np.float32)
        for share, values in self.parts:
            total += np.float32(share) * values.take(n_elements)
        return total


class _FittedDelta:
    """A delta like those of four full fine-tunes of a public language model of 135M (Adam, 40 steps, rate 4e-4).

    Measured there: all matrices change by the same size (1.7e-3 to 1.9e-3 of standard deviation, by Adam's steps), the
    elements within a row are about normal (kurtosis 2.7), rows differ by 3 to 13 % (embeddings by 50 %), 16 directions
    hold 26 to 60 % of the squares, and experts' deltas have cosines of 0.01 to 0.08 (embeddings 0.5).
    Not fitted: how sizes differ in fine-tunes by other optimizers.
    """

    STD = np.float32(1.8e-3)
    RANK = 16

    def __init__(self, random: np.random.Generator, shared: np.random.Generator, tensor: FamilyTensor) -> None:
        self._random, self._shared, self._next = random, shared, 0
        n_rows, self._n_columns = tensor.shape[0], tensor.n_elements // tensor.shape[0]
        spread, cosine = (0.5, 0.5) if tensor.is_embedding else (random.uniform(0.03, 0.13), shared.uniform(0.01, 0.08))
        low_rank = random.uniform(0.26, 0.6)
        self._scale_R = self.STD * np.exp(spread * (random.standard_normal(n_rows, np.float32) - spread))
        own = 1 - cosine
        shares = np.sqrt(np.array([cosine, own * (1 - low_rank), own * low_rank / self.RANK], np.float32))
        self._together, self._alone, self._directed = shares
        self._left_RK = random.standard_normal((n_rows, self.RANK), np.float32)
        self._right_KC = random.standard_normal((self.RANK, self._n_columns), np.float32)

    def take(self, n_elements: int) -> NDArray[np.float32]:
        first, stop = self._next, self._next + n_elements
        self._next = stop
        rows = slice(first // self._n_columns, -(-stop // self._n_columns))
        skipped = first - rows.start * self._n_columns
        directed = (self._left_RK[rows] @ self._right_KC).reshape(-1)[skipped : skipped + n_elements]
        scale = np.repeat(self._scale_R[rows], self._n_columns)[skipped : skipped + n_elements]
        together, alone = (each.standard_normal(n_elements, np.float32) for each in (self._shared, self._random))
        changed: NDArray[np.float32] = scale * (
            self._together * together + self._alone * alone + self._directed * directed
        )
        return changed


def _write_model(model: _Model) -> None:
    directory = model.directory
    directory.mkdir(parents=True)
    for shard in model.layout.shards:
        with (directory / shard.name).open("xb") as file:
            file.write(shard.header)
            if model.number == 0:
                _write_tensors(file, None, shard, model)
            else:
                with (model.paths.base / shard.name).open("rb") as base:
                    base.seek(len(shard.header))
                    _write_tensors(file, base, shard, model)
    if model.layout.shards[0].name != "model.safetensors":
        (directory / "model.safetensors.index.json").write_text(_index(model.layout), encoding="utf-8")
    write_sidecars(directory, model.layout.shape, model.layout.dtype)


def _write_tensors(file: BinaryIO, base: BinaryIO | None, shard: _Shard, model: _Model) -> None:
    stored = NUMPY_DTYPES[model.layout.dtype.name]
    for tensor in shard.tensors:
        changes = model.changes(tensor)
        for n_elements in _tiles(tensor.n_elements):
            raw = b"" if base is None else base.read(n_elements * stored.itemsize)
            if not model.is_frozen(tensor):
                values_N = changes.take(n_elements)
                values_N += np.frombuffer(raw, stored).astype(np.float32) if raw else np.float32(tensor.is_norm)
                raw = values_N.astype(stored).tobytes()
            file.write(raw)


def _tiles(n_elements: int) -> Iterator[int]:
    for start in range(0, n_elements, _TILE_ELEMENTS):
        yield min(_TILE_ELEMENTS, n_elements - start)


def _generator(seed: int, number: int, purpose: str) -> np.random.Generator:
    key = int.from_bytes(sha256(purpose.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.SFC64([seed, number, key]))


# --- the files beside the weights: config, generation config and a byte-level tokenizer ---

END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_ID = 256


def write_sidecars(directory: Path, shape: FamilyShape, dtype: DType = BF16) -> None:
    """Write everything but the weights of one model into `directory`."""
    files = {
        "config.json": _config(shape, dtype),
        "generation_config.json": {"eos_token_id": _END_OF_TEXT_ID, "do_sample": False},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "model_max_length": 2048,
        },
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


def _config(shape: FamilyShape, dtype: DType) -> dict[str, object]:
    return {
        "architectures": [shape.architecture.value],
        "model_type": "qwen3" if shape.architecture is Architecture.QWEN3 else "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "eos_token_id": _END_OF_TEXT_ID,
        "torch_dtype": dtype.recipe_name,
    }


def _tokenizer() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": _END_OF_TEXT_ID, "content": END_OF_TEXT, **plain, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _byte_vocabulary(), "merges": []},
    }


def _byte_vocabulary() -> dict[str, int]:
    """One token per byte, id = byte value, spelled as ByteLevel does: unprintable bytes move above U+0100, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}
    return dict(sorted(spelled.items(), key=lambda item: item[1]))
