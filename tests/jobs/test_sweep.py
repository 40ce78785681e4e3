"""Sweeps: errors are those of the outputs, nothing is left behind, budgets hold."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.errors import MismatchError, RecipeError
from mergepipe.jobs.diff import distance
from mergepipe.options import MergeOptions, PlanOptions, home_of
from mergepipe.reports import Progress, SweepReport
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.families import TINY, write_family

NORM = PlanOptions(select="norm")
RECIPE = """\
merge_method: {operator}
base_model: base
models:
- {{model: expert-1, parameters: {{weight: 0.7{density}}}}}
- {{model: expert-2, parameters: {{weight: 0.5{density}}}}}
dtype: float32
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_family(tmp_path, TINY, 2)
    path = tmp_path / "recipe.yml"
    path.write_text(RECIPE.format(operator="task_arithmetic", density=""))
    return path


def sweep(recipe: Path, *budgets: str, select: str = "norm") -> SweepReport:
    return mergepipe.sweep(recipe, budgets, work=recipe.parent, select=select)


def test_sweep__errors_are_those_of_merges_made_apart(recipe: Path, tmp_path: Path) -> None:
    report = sweep(recipe, "30%")
    mergepipe.merge(recipe, tmp_path / "full")
    mergepipe.merge(recipe, tmp_path / "budgeted", budget="30%", options=NORM.common(MergeOptions))
    store = LocalStore()
    full, budgeted, base = (
        open_checkpoint(store, Location.local(tmp_path / name)) for name in ("full", "budgeted", "base")
    )
    error = distance(store, budgeted, full, lambda _: None)
    changed = distance(store, full, base, lambda _: None)
    assert report.changed_norm == pytest.approx(changed, rel=1e-12)
    assert report.points[0].error == pytest.approx(error / changed, rel=1e-12)
    assert report.points[0].flattering_error == pytest.approx(error / report.full_norm, rel=1e-12)


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "dare_linear"])
def test_sweep__everything_is_the_full_merge_and_nothing_is_the_base(recipe: Path, operator: str) -> None:
    density = "" if operator == "task_arithmetic" else ", density: 0.5"
    recipe.write_text(RECIPE.format(operator=operator, density=density))
    nothing, _, everything, _ = sweep(recipe, "0", "100%").points
    assert nothing.expert_bytes == 0
    assert nothing.error == pytest.approx(1.0)
    assert everything.error == 0.0


def test_sweep__leaves_nothing_behind(recipe: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    sweep(recipe, "50%")
    assert set(tmp_path.iterdir()) == before
    with mergepipe.Catalog.open(home_of(None)) as catalog:
        assert catalog.snapshots() == ()
        assert catalog.stats().digests == 0


def test_sweep__stopped_on_the_way_it_leaves_nothing(recipe: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())

    def stop(progress: Progress) -> None:
        if progress.phase.startswith("50% random"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mergepipe.sweep(recipe, ["50%"], work=tmp_path, options=NORM, on_progress=stop)
    assert set(tmp_path.iterdir()) == before


def test_sweep__of_random_measures_it_once(recipe: Path) -> None:
    assert [point.policy for point in sweep(recipe, "50%", select="random").points] == ["random"]


def test_sweep__of_models_that_change_nothing_has_no_relative_error(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text("merge_method: linear\nbase_model: base\nmodels:\n- {model: copy, parameters: {weight: 1}}\n")
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    report = sweep(recipe, "50%")
    assert report.changed_norm == 0.0
    assert [point.error for point in report.points] == [None, None]
    assert all(math.isfinite(point.seconds) for point in report.points)


def test_sweep__needs_a_budget(recipe: Path) -> None:
    with pytest.raises(RecipeError):
        sweep(recipe)


def test_sweep__leaves_out_tensors_that_it_may(recipe: Path) -> None:
    extra = recipe.parent / "expert-1" / "model.safetensors"
    tensors = {**load_file(extra), "extra.weight": np.zeros(4, np.float32)}
    save_file(tensors, extra)
    with pytest.raises(MismatchError, match=r"extra\.weight"):
        sweep(recipe, "50%")
    report = mergepipe.sweep(recipe, ["50%"], work=recipe.parent, options=NORM, allow_dropped=["extra.*"])
    assert len(report.points) == 2
