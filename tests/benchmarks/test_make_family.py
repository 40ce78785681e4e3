"""The families that benchmarks merge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mergepipe.core.blocks import F32
from support.families import TINY, write_family


def test_write_family__fitted_deltas_have_the_measured_sizes_directions_and_cosines(tmp_path: Path) -> None:
    shape = replace(TINY, hidden=512, intermediate=1024)
    paths = write_family(tmp_path, shape, 3, dtype=F32, is_fitted=True)
    base, first_expert, _, third_expert = (load_file(model / "model.safetensors") for model in paths.models)
    matrices = [
        tensor.name
        for tensor in shape.tensors()
        if len(tensor.shape) > 1 and min(tensor.shape) >= 512 and not tensor.is_embedding
    ]
    assert len(matrices) >= shape.layers
    for name in matrices:
        first, third = ((expert[name] - base[name]).astype(np.float64) for expert in (first_expert, third_expert))
        assert first.std() == pytest.approx(1.8e-3, rel=0.05)
        assert 0.0 < (first * third).sum() / np.linalg.norm(first) / np.linalg.norm(third) < 0.1
        squares = np.linalg.svd(first, compute_uv=False) ** 2
        assert 0.26 < squares[:16].sum() / squares.sum() < 0.75
