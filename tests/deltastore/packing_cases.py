"""For the tests of packing: families of tensors of several blocks, cheap to write, and their stores as trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, DType
from mergepipe.core.strict_json import digest_of
from mergepipe.deltastore.codec import BlockContext, decode_block, decode_deltas
from mergepipe.deltastore.pieces import PIECES_OF, EncodedBlock, Level, RawBytes
from support.bucket_outputs import files_below
from support.model_folders import recipe_of
from support.public_names import BLOCK_ELEMENTS, HEADER_NAME
from support.rounding import decode, encode
from support.safetensors_bytes import file_bytes

N_WIDE = 3 * BLOCK_ELEMENTS + 5001
SHAPES = {"a.wide": (1, N_WIDE), "b.norm": (777,), "c.square": (512, 513), "d.wide": (BLOCK_ELEMENTS + 16,)}
Tensors = Mapping[str, NDArray[np.uint16]]
Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackFamily:
    """A base and experts in directories of one file each, or of a file a tensor."""

    root: Path
    base: Path
    experts: tuple[Path, ...]

    def recipe(self, operator: str = "task_arithmetic", experts: Sequence[Path] | None = None) -> Path:
        """Write a recipe that merges the experts, or some others."""
        own = {"weight": 0.5} | ({} if operator in ("linear", "task_arithmetic") else {"density": 0.4})
        models = dict.fromkeys(self.experts if experts is None else experts, own)
        path = self.root / f"{operator}.yml"
        path.write_text(json.dumps(recipe_of(operator, models, self.base, dtype="bfloat16")))
        return path


def halves(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """As bf16, to the nearest."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.asarray(rounded, np.uint16)


def make_family(root: Path, n_experts: int = 2) -> PackFamily:
    """Write a family; the last expert's files are one a tensor, so that its order is another one."""
    rng = np.random.default_rng(7)
    base = {name: (rng.standard_normal(shape) * 0.02).astype(np.float32) for name, shape in SHAPES.items()}
    root.mkdir(parents=True, exist_ok=True)
    places = [write_model(root / "base", {name: halves(values) for name, values in base.items()})]
    for e in range(n_experts):
        moved = {
            name: halves((v + rng.standard_normal(v.shape) * 1e-4 * (e + 1)).astype(np.float32))
            for name, v in base.items()
        }
        in_parts = n_experts > 1 and e == n_experts - 1
        places.append(write_model(root / f"expert-{e + 1}", moved, in_parts=in_parts))
    return PackFamily(root, places[0], tuple(places[1:]))


def write_model(folder: Path, tensors: Tensors, *, in_parts: bool = False) -> Path:
    """A directory with weights, a config and notes; in parts: a file a tensor, in reversed order."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "test"}')
    (folder / "notes.txt").write_text(f"about {folder.name}")
    if not in_parts:
        (folder / "model.safetensors").write_bytes(content_of(tensors))
        return folder
    names = sorted(tensors, reverse=True)
    weight_map = {name: f"model-{i + 1:05}-of-{len(names):05}.safetensors" for i, name in enumerate(names)}
    for name, file in weight_map.items():
        (folder / file).write_bytes(content_of({name: tensors[name]}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def content_of(tensors: Tensors) -> bytes:
    """A safetensors file of bf16 tensors."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    return file_bytes(header, b"".join(values.tobytes() for values in tensors.values()))


def store_tree(root: Path) -> dict[str, bytes]:
    """Every file of the stores below a directory, with the paths in their headers as if they were not relative."""
    files = files_below(root)
    headers = [name for name in files if Path(name).name == HEADER_NAME]
    return files | {name: _header_with_absolute_paths(files[name], (root / name).parent) for name in headers}


def _header_with_absolute_paths(raw: bytes, folder: Path) -> bytes:
    """The bytes of a header but for what depends on where its store lies: two paths, and so the digest."""
    header = json.loads(raw)
    absolute = {key: str((folder / header[key]).resolve()) for key in ("base", "expert")}
    resolved = {key: value for key, value in (header | absolute).items() if key != "digest"}
    for key, value in (absolute | {"digest": digest_of(resolved)}).items():
        old, new = (f"{json.dumps(key)}: {json.dumps(text)}".encode() for text in (header[key], value))
        assert raw.count(old) == 1
        raw = raw.replace(old, new)
    return raw


def relabel(store: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the header of a store and let its digest fit again: a store that was made to lie."""
    path = store / HEADER_NAME
    document = json.loads(path.read_text())
    change(document)
    del document["digest"]
    path.write_text(json.dumps({**document, "digest": digest_of(document)}))
    return store


# --- blocks


def as_bytes(stored: NDArray[np.generic]) -> RawBytes:
    return np.frombuffer(stored.tobytes(), np.uint8).copy()


def weights(n: int, dtype: DType, seed: int = 0, scale: float = 0.02) -> RawBytes:
    values_N = (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)
    return as_bytes(encode(values_N, dtype))


def deltas_of(base: RawBytes, expert: RawBytes, dtype: DType = BF16, base_dtype: DType | None = None) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.asarray(decode(expert.tobytes(), dtype) - decode(base.tobytes(), base_dtype or dtype))


def decoded(block: EncodedBlock, context: BlockContext, nbytes: int) -> RawBytes:
    out = np.full(nbytes, 0xA5, np.uint8)
    decode_block(block.codec, block.pieces, context, out)
    return out


def deltas_at(block: EncodedBlock, level: Level, context: BlockContext, n: int) -> Floats:
    """Deltas at a level, from nothing but the pieces that it reads."""
    pieces = {piece: content for piece, content in block.pieces.items() if piece in PIECES_OF[level]}
    out = np.full(n, np.nan, np.float32)
    decode_deltas(block.codec, level, pieces, context, out)
    return out
