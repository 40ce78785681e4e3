"""Distances between models on disk, read by the safetensors library: over all tensors, or tensor by tensor."""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - safetensors needs its bfloat16
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

_BLOCK_ELEMENTS = 256 * 1024


@dataclass(frozen=True, slots=True)
class DeltaSize:
    """How far a fine-tuned model is from its base: `‖M_i - M_0‖ / ‖M_0‖`, and the share of elements that differ."""

    relative_norm: float
    changed_fraction: float


def read_tensors(model: Path) -> dict[str, NDArray[np.float64]]:
    """All tensors of a model directory, decoded to float64 (exactly: its dtypes are narrower)."""
    tensors: dict[str, NDArray[np.float64]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            tensors |= {name: opened.get_tensor(name).astype(np.float64) for name in opened.keys()}  # noqa: SIM118
    if not tensors:
        raise FileNotFoundError(f"no safetensors file in {model}")
    return tensors


@dataclass(frozen=True, slots=True)
class MergeErrors:
    """How far a merge is from the full one: over what the full one changed, and by the papers' measures.

    `error` is `‖M_A - M_full‖ / ‖M_full - M_0‖`, `relative_l2` is `‖M_A - M_full‖ / ‖M_full‖`.
    """

    error: float
    relative_l2: float


def merge_errors(merged: Path, full: Path, base: Path) -> MergeErrors:
    """Compare a merge with the full one, a tensor in memory at a time, by blocks of 256 Ki elements."""
    lost = whole = moved = 0.0
    with ExitStack() as stack:
        models = [_opened(model, stack) for model in (merged, full, base)]
        for name in sorted(models[1]):
            tensor, wanted, origin = (model[name].get_tensor(name).astype(np.float32).ravel() for model in models)
            moved += _squared(wanted - origin)
            for start in range(0, len(wanted), _BLOCK_ELEMENTS):
                block = slice(start, start + _BLOCK_ELEMENTS)
                lost += _squared(tensor[block] - wanted[block])
                whole += _squared(wanted[block])
    return MergeErrors(math.sqrt(lost) / math.sqrt(moved), math.sqrt(lost) / math.sqrt(whole))


def main(merged: str, full: str, base: str) -> None:
    """Print the errors of a merge: in a process of its own, so that a caller stays small."""
    print(json.dumps(asdict(merge_errors(Path(merged), Path(full), Path(base)))))


def _opened(model: Path, stack: ExitStack) -> dict[str, Any]:
    """Open the files of a model; return the open file of each tensor."""
    files = [stack.enter_context(safe_open(file, framework="numpy")) for file in sorted(model.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _squared(values_N: NDArray[np.float32]) -> float:
    return float(np.dot(values_N, values_N))


def delta_size(base: Path, expert: Path) -> DeltaSize:
    """Compare an expert with its base.

    Raises:
        ValueError: they do not hold the same tensors.
    """
    bases, experts = read_tensors(base), read_tensors(expert)
    if {name: t.shape for name, t in bases.items()} != {name: t.shape for name, t in experts.items()}:
        raise ValueError("the models do not hold the same tensors")
    moved = math.sqrt(sum(float(np.sum(np.square(experts[name] - tensor))) for name, tensor in bases.items()))
    norm = math.sqrt(sum(float(np.sum(np.square(tensor))) for tensor in bases.values()))
    n_changed = sum(int(np.count_nonzero(experts[name] != tensor)) for name, tensor in bases.items())
    return DeltaSize(moved / norm, n_changed / sum(tensor.size for tensor in bases.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
