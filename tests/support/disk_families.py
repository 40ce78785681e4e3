"""Families of small, awkward checkpoints on disk, and what their merges must be by the oracle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mergepipe.core.blocks import BF16, DTYPES_BY_RECIPE_NAME, F16, F32, F64, DType
from mergepipe.testing import make_family
from support.oracle import MergeCase, expected
from support.random_oracle import kept_by_dare, stream_key_of
from support.rounding import NUMPY_DTYPES, decode
from support.safetensors_bytes import file_bytes

Model = Mapping[str, NDArray[Any]]

SAFETENSORS_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
FLOAT_NAMES = {"float64": F64, "float32": F32, "float16": F16, "bfloat16": BF16}

# name, shape, dtype of the base, dtypes of the experts in turn, share of special values
_TENSORS: tuple[tuple[str, tuple[int, ...], DType, tuple[DType, ...], float], ...] = (
    ("embed.weight", (307, 229), BF16, (BF16, F32, BF16), 0.0),  # several grains, the last one broken
    ("layers.0.odd", (129, 67), BF16, (BF16,), 0.0),
    ("layers.0.norm", (333,), F32, (F32, BF16), 0.0),
    ("layers.1.half", (3, 5, 7), F16, (F16, BF16, F64), 0.0),
    ("layers.1.double", (1001,), F64, (F64, F32), 0.0),
    ("layers.2.special", (4099,), F32, (F32, F16, BF16), 0.3),
    ("layers.2.one", (1,), BF16, (F32,), 0.0),
    ("scalar", (), F32, (BF16, F32), 0.0),
    ("empty", (0, 5), BF16, (F32,), 0.0),
    ("last", (16384 * 2,), BF16, (BF16,), 0.0),
)
UNTOUCHED = "layers.3.untouched"


@dataclass(frozen=True, slots=True)
class DiskFamily:
    """A base and experts: their tensors, and where they lie on disk."""

    models: tuple[Model, ...]
    places: tuple[Path, ...]

    @property
    def n_experts(self) -> int:
        return len(self.models) - 1


def make_models(n_experts: int, seed: int = 0) -> tuple[Model, ...]:
    """The tensors of a base and of experts, in every dtype, shape and kind of value that is awkward."""
    rng = np.random.default_rng(seed)
    models: list[dict[str, NDArray[Any]]] = [{} for _ in range(n_experts + 1)]
    for name, shape, base_dtype, cycle, special in _TENSORS:
        dtypes = tuple(cycle[e % len(cycle)] for e in range(n_experts))
        family = make_family(rng, int(np.prod(shape)), base_dtype, dtypes, special)
        arrays = zip(models, (family.base, *family.experts), (base_dtype, *dtypes), strict=True)
        for model, stored, dtype in arrays:
            model[name] = stored.view(NUMPY_DTYPES[dtype.name]).reshape(shape)
    same = make_family(rng, 777, F32, (), 0.5).base
    for e, model in enumerate(models):
        model[UNTOUCHED] = same.copy()
        model["buffer.ids"] = np.arange(7, dtype=np.int64) + e
        model["buffer.bytes"] = np.full(5, e, np.uint8)
        model["buffer.flags"] = np.array([True, False, e == 0])
    return tuple(models)


def write_single(folder: Path, model: Model) -> Path:
    """A directory with one file, written by the safetensors library."""
    folder.mkdir(parents=True)
    save_file(dict(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "test", "torch_dtype": "bfloat16"}))
    return folder


def write_sharded(folder: Path, model: Model, n_shards: int) -> Path:
    """A directory with shards dealt in reversed order of name, written by the safetensors library, and an index."""
    folder.mkdir(parents=True)
    names = sorted(model, reverse=True)
    weight_map = {}
    for i in range(n_shards):
        file = f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors"
        own = names[i::n_shards]
        save_file({name: model[name] for name in own}, folder / file)
        weight_map.update(dict.fromkeys(own, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_bare(path: Path, model: Model) -> Path:
    """A bare file with its tensors in reversed order of name and at offsets that nothing aligns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {}
    position, parts = 0, []
    for name in sorted(model, reverse=True):
        stored = model[name]
        shape, dtype = list(stored.shape), SAFETENSORS_NAMES[stored.dtype.name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + stored.nbytes]}
        position += stored.nbytes
        parts.append(stored.tobytes())
    text = json.dumps(header)
    path.write_bytes(file_bytes(text + " " * (1 + len(text) % 2), b"".join(parts)))
    return path


def write_family(folder: Path, models: Sequence[Model], layout: int = 0) -> DiskFamily:
    """Store each model; `layout` shifts which of them is a directory, sharded, or a bare file."""
    places = []
    for index, model in enumerate(models):
        name = "base" if index == 0 else f"expert{index}"
        match (index + layout) % 3:
            case 0:
                places.append(write_single(folder / name, model))
            case 1:
                places.append(write_sharded(folder / name, model, 2 + layout % 4))
            case _:
                places.append(write_bare(folder / f"{name}-bare.safetensors", model))
    return DiskFamily(tuple(models), tuple(places))


def write_recipe(path: Path, case: MergeCase, family: DiskFamily, out_dtype: str | None = None) -> Path:
    """The recipe of `case` over the family, as JSON, which is YAML."""
    base, experts = str(family.places[0]), family.places[1:]
    models: list[dict[str, object]] = []
    shared: dict[str, object] = {}
    recipe: dict[str, object] = {"merge_method": case.operator, "models": models, "parameters": shared}
    recipe["dtype"] = "auto"  # dtypes are mixed
    if case.operator != "passthrough":
        recipe["base_model"] = base
    for place, weight, density in zip(experts, case.weights, case.densities, strict=True):
        own: dict[str, object] = {} if case.operator == "slerp" else {"weight": weight}
        if case.operator in ("ties", "dare_linear", "dare_ties", "breadcrumbs"):
            own["density"] = density
        models.append({"model": str(place), "parameters": own})
    match case.operator:
        case "passthrough":
            models.append({"model": base, "parameters": {"scale": case.scale}})
        case "slerp":
            shared["t"] = case.t
        case "linear":
            models.insert(0, {"model": base, "parameters": {"weight": case.base_weight}})
            shared["normalize"] = case.normalize
        case _:
            shared |= {"normalize": case.normalize, "lambda": case.lambda_}
    if case.is_random:
        shared["rescale"] = case.rescale
    if out_dtype is not None:
        recipe["out_dtype"] = out_dtype
    path.write_text(json.dumps(recipe, indent=1))
    return path


def read_snapshot(out: Path) -> Model:
    """All tensors of an output, read by the safetensors library."""
    tensors: dict[str, NDArray[Any]] = {}
    for file in sorted(out.glob("*.safetensors")):
        found = load_file(file)
        if tensors.keys() & found.keys():
            raise AssertionError(f"{file} repeats tensors")
        tensors |= found
    return tensors


def weights_digest(out: Path) -> str:
    """A digest of the names, dtypes, shapes and bytes of all tensors of an output, however it is sharded."""
    hasher = hashlib.sha256()
    for name, stored in sorted(read_snapshot(out).items()):
        hasher.update(f"{name} {stored.dtype} {stored.shape} ".encode())
        hasher.update(stored.tobytes())
    return hasher.hexdigest()


def tree_digest(*places: Path) -> str:
    """A digest of every file below `places`: names, bytes and modification times."""
    hasher = hashlib.sha256()
    for place in places:
        for path in sorted([place, *place.rglob("*")]):
            if path.is_file():
                hasher.update(f"{path} {path.stat().st_mtime_ns} ".encode())
                hasher.update(path.read_bytes())
    return hasher.hexdigest()


def wrong_elements(case: MergeCase, family: DiskFamily, out: Path, seed: int, out_dtype: str | None) -> dict[str, str]:
    """Tensors of a snapshot that are not what the oracle or the base says, with what is wrong with them."""
    found, base = read_snapshot(out), family.models[0]
    if found.keys() != base.keys():
        return dict.fromkeys(found.keys() ^ base.keys(), "missing or too many")
    content_ids = [i["content_id"] for i in json.loads((out / "mergepipe.json").read_text())["inputs"][1:]]
    wrong = {}
    for name, stored in found.items():
        kind = FLOAT_NAMES.get(base[name].dtype.name)
        if kind is None:
            right = stored.dtype == base[name].dtype and np.array_equal(stored, base[name])
        else:
            dtype = DTYPES_BY_RECIPE_NAME[out_dtype] if out_dtype else kind
            right = _is_expected(case, family, name, stored, dtype, seed, content_ids)
        if not right or stored.shape != base[name].shape:
            wrong[name] = f"{stored.dtype} {stored.shape}"
    return wrong


def _is_expected(
    case: MergeCase,
    family: DiskFamily,
    name: str,
    stored: NDArray[Any],
    dtype: DType,
    seed: int,
    content_ids: Sequence[str],
) -> bool:
    if FLOAT_NAMES.get(stored.dtype.name) != dtype:
        return False
    rows = [decode(m[name].tobytes(), FLOAT_NAMES[m[name].dtype.name]) for m in family.models]
    kept_EN = None
    if case.is_random:
        keys = [stream_key_of(seed, identity, name) for identity in content_ids]
        n = len(rows[0])
        kept_EN = np.stack([kept_by_dare(k, n, d) for k, d in zip(keys, case.densities, strict=True)])
    experts_EN = np.stack(rows[1:]) if case.weights else np.zeros((0, len(rows[0])), np.float32)
    return bool(expected(case, rows[0], experts_EN, kept_EN).accepts(stored.reshape(-1), dtype).all())
