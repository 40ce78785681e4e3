"""Baseline: the merge script a user writes with torch and safetensors, one whole tensor at a time.

Runs in an environment with torch: `python naive_torch.py METHOD OUT_DIR BASE_DIR EXPERT_DIR...`. The arithmetic is
float32, as ours is; the file is written by `save_file`, without fsync.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

DENSITY = 0.2


def linear(base: Tensor, experts: list[Tensor]) -> Tensor:
    return torch.stack([base, *(expert.float() for expert in experts)]).mean(dim=0)


def ties(base: Tensor, experts: list[Tensor]) -> Tensor:
    deltas = torch.stack([expert.float() - base for expert in experts])
    for delta in deltas:
        magnitudes = delta.abs().flatten()
        keep = max(1, int(DENSITY * magnitudes.numel()))
        threshold = magnitudes.topk(keep, sorted=False).values.min()
        delta[delta.abs() < threshold] = 0
    return base + elect(deltas)


def dare_ties(base: Tensor, experts: list[Tensor]) -> Tensor:
    deltas = torch.stack([expert.float() - base for expert in experts])
    deltas *= torch.rand_like(deltas) < DENSITY
    deltas /= DENSITY
    return base + elect(deltas)


def elect(deltas: Tensor) -> Tensor:
    sign = deltas.sum(dim=0).sign()
    agrees = (deltas.sign() == sign) & (deltas != 0)
    return (deltas * agrees).sum(dim=0) / agrees.sum(dim=0).clamp(min=1)


METHODS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {"linear": linear, "ties": ties, "dare_ties": dare_ties}


def main(method: str, out: str, base: str, *experts: str) -> None:
    torch.manual_seed(0)
    merge = METHODS[method]
    files: list[Any] = [safe_open(Path(model, "model.safetensors"), framework="pt") for model in (base, *experts)]
    merged = {}
    for name in files[0].keys():  # noqa: SIM118 - not a dict
        tensors: list[Tensor] = [file.get_tensor(name) for file in files]
        result = merge(tensors[0].float(), tensors[1:])
        merged[name] = result.to(tensors[0].dtype)
    Path(out).mkdir()
    save_file(merged, Path(out, "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
