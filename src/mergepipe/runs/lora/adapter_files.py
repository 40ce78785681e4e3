"""Write the files of a LoRA adapter as PEFT reads them: `adapter_model.safetensors` and `adapter_config.json`."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import F32
from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.ranges import os_errors

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of float32 that the adapter may hold: its size is known only when it is written, this is the largest."""

    name: str
    largest_shape: tuple[int, ...]


class AdapterWriter:
    """Writes a safetensors file tensor by tensor, of shapes that are known only then.

    Room for the largest possible header is left in front; what it does not need is filled with spaces, as the format
    allows. Memory: one tensor.
    """

    def __init__(self, path: Path, possible: Iterable[AdapterTensor], ledger: Ledger) -> None:
        self._path = path
        self._ledger = ledger
        self._rows: dict[str, dict[str, object]] = {}
        self._written_bytes = 0
        largest = {tensor.name: _row(tensor.largest_shape, (1 << 62, 1 << 62)) for tensor in possible}
        self._header_bytes = -(-len(_header(largest)) // _ALIGNMENT) * _ALIGNMENT
        with os_errors(path, "creating it"):
            self._descriptor = owned.create_file(path)

    def append(self, name: str, values: NDArray[np.float32], shape: Sequence[int]) -> None:
        """Write one tensor of float32 behind those before it."""
        content = memoryview(np.ascontiguousarray(values).tobytes())
        start = self._written_bytes
        self._write(content, _LENGTH_BYTES + self._header_bytes + start)
        self._written_bytes += len(content)
        self._rows[name] = _row(tuple(shape), (start, self._written_bytes))

    def relabel(self, name: str, other: str) -> None:
        """Give a tensor that is written a name that is no longer."""
        self._rows[other] = self._rows.pop(name)

    def finish(self) -> int:
        """Write the header, make the file durable, and return its size."""
        header = _header(self._rows).ljust(self._header_bytes)
        self._write(memoryview(len(header).to_bytes(_LENGTH_BYTES, "little") + header), 0)
        with os_errors(self._path, "making it durable"):
            owned.sync_file(self._descriptor)
        return _LENGTH_BYTES + self._header_bytes + self._written_bytes

    def __enter__(self) -> AdapterWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def _write(self, content: memoryview, offset: int) -> None:
        done = 0
        with os_errors(self._path, f"writing at byte {offset}"):
            while done < len(content):
                done += os.pwrite(self._descriptor, content[done:], offset + done)
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
    chosen = set(adapted)
    by_leaf: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_leaf[module.rpartition(".")[2]].append(module)
    targets: list[str] = []
    for leaf, alike in sorted(by_leaf.items()):
        chosen_alike = sorted(chosen.intersection(alike))
        targets += [leaf] if chosen_alike and len(chosen_alike) == len(alike) else chosen_alike
    return targets


def _row(shape: tuple[int, ...], offsets: tuple[int, int]) -> dict[str, object]:
    return {"dtype": F32.name, "shape": list(shape), "data_offsets": list(offsets)}


def _header(rows: Mapping[str, Mapping[str, object]]) -> bytes:
    content = {"__metadata__": {"format": "pt"}, **rows}
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
