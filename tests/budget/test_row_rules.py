"""Rules that need whole rows, under budgets: rows and blocks seldom end together, and memory may be small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mergepipe
from support.model_folders import recipe_of, write_model

METHODS = {"della": {"epsilon": 0.1}, "breadcrumbs": {"gamma": 0.1}}


@pytest.fixture(name="folder", params=[0, 4088], ids=["at any place", "on a page"])
def make_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    shapes = {"a.weight": (301, 1300), "b.weight": (64, 4096), "c.norm": (333,)}
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for model in ("base", "one", "two"):
        scale = np.float32(0.0 if model == "base" else 0.02)
        tensors = {
            name: array + scale * rng.standard_normal(array.shape).astype(np.float32) for name, array in base.items()
        }
        path = write_model(tmp_path / model, tensors) / "model.safetensors"
        if request.param:  # the header is filled up with spaces, so that the tensors begin on a page
            raw = path.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = raw[8 : 8 + length].ljust(request.param)
            path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    return tmp_path


@pytest.mark.parametrize("memory_bytes", [40 << 20, 1 << 30])
@pytest.mark.parametrize("method", ["della", "breadcrumbs"])
def test_merge__of_whole_rows_keeps_its_budget(folder: Path, method: str, memory_bytes: int) -> None:
    parameters = {"weight": 0.5, "density": 0.5, **METHODS[method]}
    recipe = recipe_of(method, {folder / "one": {}, folder / "two": {}}, folder / "base", parameters=parameters)
    options: dict[str, Any] = {"catalog": False, "seed": 3, "memory_bytes": memory_bytes}
    mergepipe.merge(recipe, folder / "full", **options)
    options |= {"block_elements": 16384, "select": "norm" if method == "della" else "sample"}
    for budget in ("0%", "60%", "100%"):
        report = mergepipe.merge(recipe, folder / budget, budget=budget, **options)
        assert report.planned_bytes is not None
        assert report.budget_bytes is not None
        assert report.expert_bytes + report.analysis_bytes <= report.planned_bytes <= report.budget_bytes
    full, planned = (load_file(folder / name / "model.safetensors") for name in ("full", "100%"))
    assert {name: array.tobytes() for name, array in full.items()} == {n: a.tobytes() for n, a in planned.items()}
