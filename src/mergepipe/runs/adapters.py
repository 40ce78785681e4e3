"""Write the files of a LoRA adapter as PEFT reads them; make the recipe that adds adapters to a base."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.stored_adapters import PREFIX, read_adapter
from mergepipe.core.blocks import F32
from mergepipe.errors import MismatchError, NotFoundError, RecipeError
from mergepipe.recipes.references import named_location
from mergepipe.storage import owned
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import os_errors
from mergepipe.storage.stores import Stores

WEIGHTS_NAME = "adapter_model.safetensors"
_LENGTH_BYTES = 8
_ALIGNMENT = 8


LargestShape = tuple[str, tuple[int, ...]]
"""The name of a tensor that an adapter may hold, and its largest shape: its own is known when it is written."""


class AdapterWriter:
    """Writes a safetensors file tensor by tensor, of shapes that are known only then.

    Room for the largest possible header is left in front; what it does not need is filled with spaces, as the format
    allows. Memory: one tensor.
    """

    def __init__(self, path: Path, possible: Iterable[LargestShape], ledger: Ledger) -> None:
        self._path = path
        self._ledger = ledger
        self._rows: dict[str, dict[str, object]] = {}
        self._written_bytes = 0
        largest = {name: _row(shape, (1 << 62, 1 << 62)) for name, shape in possible}
        self._header_bytes = -(-len(_header(largest)) // _ALIGNMENT) * _ALIGNMENT
        with os_errors(path, "creating it"):
            self._descriptor = owned.create_file(path)

    def append(self, name: str, values: NDArray[Any], shape: Sequence[int], dtype: str = F32.name) -> None:
        """Write one tensor behind those before it; the name of its dtype is no longer than that of float32."""
        content = np.ascontiguousarray(values).tobytes()
        start = self._written_bytes
        self._write(content, _LENGTH_BYTES + self._header_bytes + start)
        self._written_bytes += len(content)
        self._rows[name] = _row(tuple(shape), (start, self._written_bytes), dtype)

    def relabel(self, name: str, other: str) -> None:
        """Give a tensor that is written a name that is no longer."""
        self._rows[other] = self._rows.pop(name)

    def finish(self) -> int:
        """Write the header, make the file durable, and return its size."""
        header = _header(self._rows).ljust(self._header_bytes)
        self._write(len(header).to_bytes(_LENGTH_BYTES, "little") + header, 0)
        with os_errors(self._path, "making it durable"):
            owned.sync_file(self._descriptor)
        return _LENGTH_BYTES + self._header_bytes + self._written_bytes

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


def target_modules(adapted: Iterable[str], modules: Collection[str]) -> list[str]:
    """Name the adapted modules: by their last names where these mean no other module, else in full.

    PEFT adapts every module of which `target` is the whole name or the end of it after a dot.
    """
    chosen, parents = set(adapted), {word for module in modules for word in module.split(".")[:-1]}
    by_leaf: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_leaf[module.rpartition(".")[2]].append(module)
    targets: list[str] = []
    for leaf, alike in sorted(by_leaf.items()):
        chosen_alike = sorted(chosen.intersection(alike))
        targets += [leaf] if len(chosen_alike) == len(alike) and leaf not in parents else chosen_alike
    return targets


def _row(shape: tuple[int, ...], offsets: tuple[int, int], dtype: str = F32.name) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _header(rows: Mapping[str, Mapping[str, object]]) -> bytes:
    content = {"__metadata__": {"format": "pt"}, **rows}
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


# --- the recipe of adding adapters to a base: a merge like any other ---


def apply_recipe(base: str, adapters: Sequence[str], weights: Sequence[float], dtype: str | None) -> dict[str, object]:
    """Return the recipe of `base` with `adapters` added, each times its weight; relative paths stay relative."""
    if not adapters:
        raise RecipeError.of("option.missing", "ADAPTER", "no adapter is given", "name one or more behind the base")
    if weights and len(weights) != len(adapters):
        message = f"{len(weights)} for {len(adapters)} adapters"
        raise RecipeError.of("option.conflict", "--weight", message, "give one for each, in order, or none")
    check_saved_modules(Stores(), adapters)
    models = [{"model": {"model": base}, "lora": adapter} for adapter in adapters]
    if len(adapters) == 1 and (not weights or weights[0] == 1.0):
        return {"merge_method": "passthrough", "models": [{"model": models[0]}], "dtype": dtype or "auto"}
    listed = [
        {"model": model, "parameters": {"weight": weight}}
        for model, weight in zip(models, weights or [1.0] * len(adapters), strict=True)
    ]
    return {"merge_method": "task_arithmetic", "base_model": base, "models": listed, "dtype": dtype or "auto"}


def check_saved_modules(store: Store, adapters: Sequence[str]) -> None:
    """Refuse adapters of which two store one module in full: at most one of them can be what the model has."""
    owners: dict[str, str] = {}
    for text, location in zip(adapters, located_adapters(store, adapters), strict=True):
        for module in read_adapter(store, location).saved_modules:
            if module in owners:
                message = f"it stores {module} in full, and so does {owners[module]}"
                raise MismatchError.of("adapter.mismatch", text, message, "apply one of the two, or merge their models")
            owners[module] = text


def located_adapters(store: Store, adapters: Sequence[str]) -> list[Location]:
    """Return where adapters are: at paths, addresses or ids of the Hub."""
    locations = []
    for text in adapters:
        location = store.pin(named_location(store, text).absolute())
        if store.stat(location) is None:
            raise NotFoundError.of("model.not-found", text, "there is no such adapter", "give its folder, or its id")
        locations.append(location)
    return locations
