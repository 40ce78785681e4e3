"""Distances between models on disk, in float64 over all tensors, read by the safetensors library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Tensors = Mapping[str, NDArray[np.float64]]


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


def rounded_to_bf16(tensors: Tensors) -> dict[str, NDArray[np.float64]]:
    """Round float32 values to bfloat16, nearest even, as a merge does on output. The input is not modified."""
    return {name: t.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) for name, t in tensors.items()}


def distance(left: Tensors, right: Tensors) -> float:
    """`‖left - right‖` over all tensors.

    Raises:
        ValueError: they do not hold the same tensors.
    """
    return math.sqrt(sum(float(np.sum(np.square(a - b))) for a, b in _pairs(left, right)))


def norm(tensors: Tensors) -> float:
    """`‖tensors‖` over all tensors."""
    return math.sqrt(sum(float(np.sum(np.square(tensor))) for tensor in tensors.values()))


def delta_size(base: Path, expert: Path) -> DeltaSize:
    """Compare an expert with its base."""
    base_tensors, expert_tensors = read_tensors(base), read_tensors(expert)
    n_changed = sum(int(np.count_nonzero(a != b)) for a, b in _pairs(base_tensors, expert_tensors))
    n_elements = sum(tensor.size for tensor in base_tensors.values())
    return DeltaSize(distance(expert_tensors, base_tensors) / norm(base_tensors), n_changed / n_elements)


def _pairs(left: Tensors, right: Tensors) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    if {name: t.shape for name, t in left.items()} != {name: t.shape for name, t in right.items()}:
        raise ValueError("the models do not hold the same tensors")
    return ((left[name], right[name]) for name in left)
