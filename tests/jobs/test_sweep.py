"""Sweeps, distances and verdicts: what budgets leave of a merge, and nothing of a gain that was not measured."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.cli.pages import explain_page, sweep_page
from mergepipe.cli.printing import report_text
from mergepipe.errors import MismatchError, RecipeError
from mergepipe.jobs import diff as distances
from mergepipe.jobs.diff import distance, norm
from mergepipe.options import MergeOptions, PlanOptions, home_of
from mergepipe.reports import Progress, SweepReport
from mergepipe.storage.local import LocalStore
from support.disk_families import write_single
from support.families import TINY, write_family
from support.local_models import open_local
from support.model_folders import recipe_of, write_model

NORM = PlanOptions(select="norm")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_family(tmp_path, TINY, 2)
    path = tmp_path / "recipe.yml"
    path.write_text(text_of("task_arithmetic"))
    return path


def text_of(operator: str, **own: float) -> str:
    models = {"expert-1": {"weight": 0.7, **own}, "expert-2": {"weight": 0.5, **own}}
    return json.dumps(recipe_of(operator, models, "base", dtype="float32"))


def sweep(recipe: Path, *budgets: str, select: str = "norm") -> SweepReport:
    return mergepipe.sweep(recipe, budgets, work=recipe.parent, select=select)


def test_sweep__errors_are_those_of_merges_made_apart(recipe: Path, tmp_path: Path) -> None:
    report = sweep(recipe, "30%")
    mergepipe.merge(recipe, tmp_path / "full")
    mergepipe.merge(recipe, tmp_path / "budgeted", budget="30%", options=NORM.common(MergeOptions))
    store = LocalStore()
    full, budgeted, base = (open_local(tmp_path / name, store) for name in ("full", "budgeted", "base"))
    error = distance(store, budgeted, full, lambda _: None)
    changed = distance(store, full, base, lambda _: None)
    assert report.changed_norm == pytest.approx(changed, rel=1e-12)
    assert report.points[0].error == pytest.approx(error / changed, rel=1e-12)
    assert report.points[0].flattering_error == pytest.approx(error / report.full_norm, rel=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "dare_linear"])
def test_sweep__everything_is_the_full_merge_and_nothing_is_the_base(recipe: Path, operator: str) -> None:
    recipe.write_text(text_of(operator, **({} if operator == "task_arithmetic" else {"density": 0.5})))
    nothing, _, everything, _ = sweep(recipe, "0", "100%").points
    assert nothing.share == 0.0
    assert nothing.error == pytest.approx(1.0)
    assert (everything.share, everything.error) == (1.0, 0.0)


def test_sweep__leaves_nothing_behind(recipe: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    sweep(recipe, "50%")
    assert set(tmp_path.iterdir()) == before
    catalog = mergepipe.Catalog(home_of(None))
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


Tensors = dict[str, NDArray[np.generic]]
FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def write(directory: Path, tensors: Tensors) -> Checkpoint:
    return open_local(write_model(directory, tensors))


def tensors_of(seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    found: Tensors = {f"t{i}": rng.standard_normal((7, 33)).astype(kind) for i, kind in enumerate(FLOATS)}
    found["steps"] = rng.integers(0, 9, 5)
    return found


def reference(a: Tensors, b: Tensors | None = None) -> float:
    """The same in one numpy expression."""
    names = [name for name in a if name != "steps"]
    parts = [a[n].astype(np.float64) - (0 if b is None else b[n].astype(np.float64)) for n in names]
    return math.sqrt(sum(float((part**2).sum()) for part in parts))


@pytest.mark.parametrize("chunk_elements", [1 << 20, 10])
def test_distance__is_that_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(distances, "CHUNK_ELEMENTS", chunk_elements)
    a, b = tensors_of(1), tensors_of(2)
    alone = {"only": np.ones(3, np.float32), "other": np.ones(3, np.float32)}  # no part of a distance
    first, second = write(tmp_path / "a", a | alone), write(tmp_path / "b", b | {"other": np.ones(4, np.float32)})
    ticks: list[int] = []
    found = distance(LocalStore(), first, second, ticks.append)
    assert found == pytest.approx(reference(a, b), rel=1e-12)
    assert sum(ticks) == sum(t.nbytes for each in (a, b) for n, t in each.items() if n != "steps")
    assert distance(LocalStore(), first, first, ticks.append) == 0.0
    assert norm(LocalStore(), first, ticks.append) == pytest.approx(reference(a | alone), rel=1e-12)


GRAIN = 16_384
N_EXPERTS = 8


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and experts that change all but the first tensor, the last expert hardly; all of them were analyzed."""
    folder = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(5)
    base = {f"layers.{t}.w": rng.standard_normal(4 * GRAIN).astype(np.float32) for t in range(6)}
    write_single(folder / "base", base)
    for e in range(N_EXPERTS):
        size = 1e-6 if e == N_EXPERTS - 1 else 1e-2
        moved = {
            name: values
            if name == "layers.0.w"
            else values + size * rng.standard_normal(len(values)).astype(np.float32)
            for name, values in base.items()
        }
        write_single(folder / f"expert-{e}", moved)
    for name, experts, rest in (
        ("sum", range(N_EXPERTS), "merge_method: task_arithmetic\nparameters: {weight: 0.5}\n"),
        ("average", range(N_EXPERTS - 1), "merge_method: linear\nparameters: {weight: 1.0}\n"),
        ("ties", range(N_EXPERTS - 1), "merge_method: ties\nparameters: {weight: 1.0, density: 0.2}\n"),
    ):
        models = "".join(f"- model: expert-{e}\n" for e in experts)
        (folder / f"{name}.yml").write_text(f"{rest}base_model: base\nmodels:\n{models}")
    places = [folder / f"expert-{e}" for e in range(N_EXPERTS)]
    mergepipe.analyze(folder / "base", places, block_elements=GRAIN, home=folder / "home")
    return folder


def merge(family: Path, recipe: str, out: Path, budget: str, **plan: Any) -> Any:
    options = MergeOptions(home=family / "home", block_elements=GRAIN, **plan, threads=2)
    return mergepipe.merge(family / f"{recipe}.yml", out, budget=budget, options=options)


def test_verdict__says_of_each_expert_what_is_missing_and_first_of_whom_nothing_is_there(
    family: Path, tmp_path: Path
) -> None:
    report = merge(family, "sum", tmp_path / "out", "25%", select="norm")
    first, *others = report.verdict.experts
    assert (first.model, first.share) == ("expert-7", 0.0)  # though a sixth of its blocks equal the base
    assert all(0 < expert.share < 1 for expert in others)
    lines = [line for line in report_text(report).splitlines() if line.startswith("expert ")]
    assert lines[0].endswith("expert-7: nothing of it is read")
    assert all("of the bytes that it changes are not read" in line for line in lines[1:])
    page = explain_page(mergepipe.explain(tmp_path / "out", home=family / "home"))
    assert page.count("expert-7: nothing of it is read") >= 2  # beside the verdict, and at its bar
    whole = merge(family, "sum", tmp_path / "whole", "100%").verdict
    assert [expert.share for expert in whole.experts] == [1.0] * N_EXPERTS


def test_verdict__states_policy_share_and_where_gains_were_measured(family: Path, tmp_path: Path) -> None:
    verdict = merge(family, "sum", tmp_path / "out", "25%", select="norm").verdict
    assert (verdict.policy, verdict.is_full) == ("norm", False)
    assert "at 10 % of the bytes of raw experts" in verdict.measured
    assert 0 < verdict.planned_bytes <= verdict.full_bytes / 4
    assert "This merge was not measured" in (tmp_path / "out/README.md").read_text()
    sample = merge(family, "sum", tmp_path / "sample", "25%").verdict
    assert "/docs/benchmarks/rules.md" in sample.measured
    whole = merge(family, "sum", tmp_path / "whole", "100%").verdict
    assert whole.is_full
    assert "this is the full merge" in (tmp_path / "whole/README.md").read_text()


def test_sweep__names_experts_of_which_nothing_is_read(family: Path) -> None:
    report = mergepipe.sweep(
        family / "sum.yml", ["25%"], select="norm", block_elements=GRAIN,
        home=family / "home", threads=2
    )  # fmt: skip
    for text in (report_text(report), sweep_page(report)):
        assert "25%: nothing from expert-7 is in the merge" in text
