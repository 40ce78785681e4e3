"""Rules of several stages give the same bytes whatever the memory and the threads: held in memory, or read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

import mergepipe
from mergepipe.options import MergeOptions
from support.disk_families import write_family

SHAPE = (1500, 700)
RECIPES: dict[str, dict[str, float | bool]] = {
    "sce": {"select_topk": 0.3}, "model_stock": {"filter_wise": True}, "ramplus_tl": {}, "multislerp": {},
    "breadcrumbs_ties": {"rescale": True}, "della": {},
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_merge__of_several_stages_does_not_depend_on_memory_and_threads(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    base = rng.standard_normal(SHAPE).astype(np.float32) * np.float32(0.05)
    models = [{"t": base + e * rng.standard_normal(SHAPE).astype(np.float32) * np.float32(1e-3)} for e in range(4)]
    family = write_family(tmp_path, tuple(models))
    each = {"weight": 0.4, "density": 0.5} if name not in ("sce", "model_stock", "ramplus_tl") else {}
    each = {"weight": 0.4} if name == "multislerp" else each
    listed = [{"model": str(expert), "parameters": each} for expert in family.places[1:]]
    recipe = tmp_path / "recipe.yml"
    content = {"merge_method": name, "base_model": str(family.places[0]), "models": listed, "parameters": RECIPES[name]}
    recipe.write_text(yaml.safe_dump(content))
    reread = {}
    for memory_bytes, threads in ((14 << 20, 3), (1 << 30, 1)):
        out = tmp_path / f"out-{threads}"
        report = mergepipe.merge(
            recipe, out, options=MergeOptions(memory_bytes=memory_bytes, threads=threads, catalog=False)
        )
        reread[threads] = report.analysis_bytes
    merged = [next((tmp_path / f"out-{threads}").glob("*.safetensors")).read_bytes() for threads in (3, 1)]
    assert merged[0] == merged[1]
    assert reread[3] > reread[1]
