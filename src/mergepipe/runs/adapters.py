"""Write the files of a LoRA adapter as PEFT reads them; make the recipe that adds adapters to a base."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.adapter_forms import read_adapter
from mergepipe.checkpoints.sparse_patches import read_patch
from mergepipe.checkpoints.stored_adapters import PREFIX
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, DTYPES, F32
from mergepipe.core.units import plural
from mergepipe.errors import MismatchError, NotFoundError, RecipeError
from mergepipe.recipes.model_location import locate_model
from mergepipe.recipes.recipe import Recipe
from mergepipe.snapshots.manifest import OutputTensor
from mergepipe.snapshots.shards import (
    BlockTable,
    ShardLayout,
    TensorDigest,
    TensorSpec,
    block_digest,
    file_digest_of,
    table_of,
)
from mergepipe.storage import owned
from mergepipe.storage.contract import Digested, Store, is_folder
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import os_errors
from mergepipe.storage.stores import Stores

WEIGHTS_NAME = "adapter_model.safetensors"
_LENGTH_BYTES = 8
_ALIGNMENT = 8


PT_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})
LargestShape = tuple[str, tuple[int, ...]]
"""The name of a tensor that an adapter may hold, and its largest shape: its own is known when it is written."""


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """A finished weight file with the digests of its tensors, both in the order of the file."""

    layout: ShardLayout
    digests: tuple[TensorDigest, ...]

    @property
    def file_bytes(self) -> int:
        return self.layout.file_bytes

    @property
    def notices(self) -> tuple[str, ...]:
        """Warn about infinities and NaN in what was written."""
        held = [digest for digest in self.digests if digest.not_finite]
        if not held:
            return ()
        first = f"first {plural(held[0].not_finite, 'value')} of '{held[0].name}'"
        where = f"{len(held)} of {plural(len(self.digests), 'tensor')}, {first}"
        return (f"infinities or NaN in {where}: an input holds them, or a result is beyond float32",)

    @property
    def table(self) -> BlockTable:
        """The digests of the header and of all blocks."""
        return table_of((self.layout,), self.digests)

    @property
    def file(self) -> Digested:
        """The record of the file."""
        roots = {digest.name: digest.root for digest in self.digests}
        return Digested(self.layout.name, self.file_bytes, file_digest_of(self.layout, roots))

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """The records of the tensors."""
        return tuple(
            OutputTensor(spec.name, spec.dtype.name, spec.shape, self.layout.name, digest.root, "merge", "")
            for spec, digest in zip(self.layout.tensors, self.digests, strict=True)
        )


class AdapterWriter:
    """Writes a safetensors file tensor by tensor, of shapes that are known only then.

    Room for the largest possible header is left in front; what it does not need is filled with spaces, as the format
    allows. Memory: one tensor.
    """

    def __init__(
        self, path: Path, possible: Iterable[LargestShape], ledger: Ledger, metadata: Mapping[str, str] = PT_METADATA
    ) -> None:
        self._path = path
        self._ledger = ledger
        self._rows: dict[str, _Row] = {}
        self._blocks: dict[str, tuple[bytes, ...]] = {}
        self._not_finite = Counter[str]()
        self._written_bytes = 0
        largest = {name: _row(shape, (1 << 62, 1 << 62)) for name, shape in possible}
        self._header_bytes = -(-len(_header(largest, metadata)) // _ALIGNMENT) * _ALIGNMENT
        with os_errors(path, "creating it"):
            self._descriptor = owned.create_file(path)

    def append(self, name: str, values: NDArray[Any], shape: Sequence[int], dtype: str = F32.name) -> None:
        """Write one tensor behind those before it; the name of its dtype is no longer than that of float32."""
        if values.dtype.kind == "f":
            self._not_finite[name] = values.size - int(np.isfinite(values).sum())
        content = np.ascontiguousarray(values).tobytes()
        start = self._written_bytes
        self._write(content, _LENGTH_BYTES + self._header_bytes + start)
        self._written_bytes += len(content)
        self._rows[name] = _row(tuple(shape), (start, self._written_bytes), dtype)
        step = DEFAULT_BLOCK_ELEMENTS * DTYPES[dtype].itemsize
        self._blocks[name] = tuple(block_digest(content[at : at + step]) for at in range(0, len(content), step))

    def relabel(self, name: str, other: str) -> None:
        """Give a tensor that is written a name that is no longer."""
        self._rows[other] = self._rows.pop(name)
        self._blocks[other] = self._blocks.pop(name)
        self._not_finite[other] = self._not_finite.pop(name, 0)

    def finish(self, metadata: Mapping[str, str] = PT_METADATA) -> WrittenWeights:
        """Write the header, with texts that are no longer than those that were announced; make the file durable."""
        header = self._padded_header(metadata)
        self._write(header, 0)
        with os_errors(self._path, "making it durable"):
            owned.sync_file(self._descriptor)
        rows = sorted(self._rows.items(), key=lambda item: item[1]["data_offsets"])
        specs = tuple(TensorSpec(name, DTYPES[row["dtype"]], tuple(row["shape"])) for name, row in rows)
        digests = tuple(TensorDigest(name, self._blocks[name], self._not_finite[name]) for name, _ in rows)
        return WrittenWeights(ShardLayout(self._path.name, specs, header), digests)

    def _padded_header(self, metadata: Mapping[str, str]) -> bytes:
        header = _header(self._rows, metadata).ljust(self._header_bytes)
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header

    def __enter__(self) -> AdapterWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _write(self, content: bytes, offset: int) -> None:
        with os_errors(self._path, f"writing at byte {offset}"):
            owned.write_at(self._descriptor, content, offset)
        self._ledger.charge(str(self._path), Purpose.OUTPUT, len(content))


def factor_names(module: str, *, is_embedding: bool = False) -> tuple[str, str]:
    """Return the names of the factors A and B of a module in PEFT's files."""
    if is_embedding:
        return f"{PREFIX}{module}.lora_embedding_A", f"{PREFIX}{module}.lora_embedding_B"
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def adapter_config(
    *,
    base_model: str | None,
    revision: str | None,
    ranks: Mapping[str, int],
    modules: Collection[str],
    saved_modules: Sequence[str],
    transposed: bool,
    task_type: str | None,
    more: Mapping[str, object] | None = None,
) -> bytes:
    """Write `adapter_config.json`; `ranks` are those of the adapted modules, `modules` all that have a weight.

    `more` are options that differ from those of a plain LoRA.

    `lora_alpha` equals the rank of each module, so that the product of its factors is the difference itself.
    """
    rank = max(ranks.values(), default=1)
    rank_pattern = {module: module_rank for module, module_rank in ranks.items() if module_rank != rank}
    config = {
        "alpha_pattern": rank_pattern,
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": list(saved_modules) or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": rank_pattern,
        "revision": revision,
        "target_modules": target_modules(ranks, modules),
        "task_type": task_type,
        "use_dora": False,
        "use_rslora": False,
        **(more or {}),
    }
    return (json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


_OF_LLAVA = {
    "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
}  # fmt: skip


def module_prefixes(architecture: Mapping[str, object], names: Iterable[str]) -> Mapping[str, str]:
    """Return how published names begin that transformers (since 4.52) changes, and how names of modules do instead."""
    firsts = {name.partition(".")[0] for name in names}
    if {"language_model", "vision_tower"} <= firsts:
        return _OF_LLAVA
    if "visual" in firsts:
        return {"visual.": "model.visual.", "model.": "model.language_model."}
    return {"": "transformer."} if architecture.get("model_type") == "gpt2" and "transformer" not in firsts else {}


def target_modules(adapted: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Name exactly the adapted modules: by the shortest ends of names that no other module has, else in full.

    PEFT adapts every module of which `target` is the whole name or the end of it after a dot; `modules` are those that
    have a weight, and the parts of the model that hold them are modules too.
    """
    chosen = set(adapted)
    others = {*modules, *(parent for module in modules for parent in _parents_of(module))} - chosen
    other_ends = {end for module in others for end in _ends_of(module)}
    targets = set()
    for module in chosen:
        usable = (end for end in _ends_of(module) if end not in other_ends and not end[0].isdigit())
        targets.add(next(usable, module))
    return sorted(targets)


def stated_targets(adapted: Iterable[str], stated: Iterable[str]) -> list[str]:
    """Name the modules of merged adapters by the `stated` targets of these, and in full where none names a module.

    PEFT has adapted every module that a target names, so that no module of the base without factors has such a name.
    """
    names = set(stated)
    targets = set()
    for module in adapted:
        usable = (end for end in _ends_of(module) if end in names)
        targets.add(next(usable, module))
    return sorted(targets)


def targets_of(config: Mapping[str, object]) -> list[str]:
    """Return the targets of an adapter's configuration that name all modules with that end; none of a pattern."""
    stated = config.get("target_modules")
    is_limited = any(config.get(key) not in (None, [], "") for key in ("layers_to_transform", "exclude_modules"))
    if is_limited or not isinstance(stated, list):
        return []
    return [target for target in stated if isinstance(target, str)]


def _ends_of(name: str) -> list[str]:
    """List the ends of a dotted name, the shortest first, the whole name last."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]


def _parents_of(name: str) -> list[str]:
    """List the dotted names above a name."""
    parts = name.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts))]


class _Row(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


def _row(shape: tuple[int, ...], offsets: tuple[int, int], dtype: str = F32.name) -> _Row:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _header(rows: Mapping[str, _Row], metadata: Mapping[str, str]) -> bytes:
    content = {"__metadata__": dict(metadata), **rows}
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


# --- the recipe of adding adapters to a base: a merge like any other ---


def apply_recipe(base: str, adapters: Sequence[str], weights: Sequence[float], dtype: str | None) -> dict[str, object]:
    """Return the recipe of `base` with `adapters` added, each times its weight; relative paths stay relative."""
    if not adapters:
        raise RecipeError.of("option.missing", "ADAPTER", "no adapter is given", "name one or more after the base")
    if weights and len(weights) != len(adapters):
        message = f"{len(weights)} for {len(adapters)} adapters"
        raise RecipeError.of("option.conflict", "--weight", message, "give one for each, in order, or none")
    check_saved_modules(Stores(), adapters)
    models = [{"model": base, "lora": adapter} for adapter in adapters]
    if len(adapters) == 1 and (not weights or weights[0] == 1.0):
        return {"merge_method": "passthrough", "models": [{"model": models[0]}], "dtype": dtype or "auto"}
    listed = [
        {"model": model, "parameters": {"weight": weight}}
        for model, weight in zip(models, weights or [1.0] * len(adapters), strict=True)
    ]
    return {"merge_method": "task_arithmetic", "base_model": base, "models": listed, "dtype": dtype or "auto"}


def folds_adapters(recipe: Recipe) -> bool:
    """Whether a recipe adds adapters to one base, each times a weight, and does nothing else: see `apply_recipe`."""
    models = recipe.models
    if not models or recipe.parameters or any(model.adapter is None for model in models):
        return False
    base = recipe.base
    if recipe.operator.name == "passthrough":
        return len(models) == 1 and base is None and not models[0].parameters
    if recipe.operator.name != "task_arithmetic" or base is None or base.adapter is not None:
        return False
    for model in models:
        is_weighted = isinstance(model.parameters.get("weight"), float)
        if model.path != base.path or model.numbers is not None or not is_weighted:
            return False
    return True


def check_saved_modules(store: Store, adapters: Sequence[str]) -> None:
    """Refuse adapters of which two store one module in full: at most one of them can be what the model has."""
    owners: dict[str, str] = {}
    for text, location in zip(adapters, located_adapters(store, adapters), strict=True):
        if not is_folder(store, location) or read_patch(store, location) is not None:  # nothing is stored in full
            continue
        for module in read_adapter(store, location).saved_modules:
            if module in owners:
                message = f"it stores {module} in full, and so does {owners[module]}"
                raise MismatchError.of("adapter.mismatch", text, message, "apply one of the two, or merge their models")
            owners[module] = text


def located_adapters(store: Store, adapters: Sequence[str]) -> list[Location]:
    """Return where adapters are: at paths, addresses or ids of the Hub."""
    locations = []
    for text in adapters:
        location = store.pin(locate_model(store, text).absolute())
        if store.stat(location) is None:
            raise NotFoundError.of("model.not-found", text, "there is no such adapter", "give its folder, or its id")
        locations.append(location)
    return locations
