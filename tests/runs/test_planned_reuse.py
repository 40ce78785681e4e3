"""Plans that reuse: what stands in an earlier snapshot is not charged, what that frees is spent, and it is exact."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe import api as keeping
from mergepipe import api as session
from mergepipe.cli.render.plans import plan_table
from mergepipe.errors import ConflictError
from mergepipe.jobs.plan import make_plan
from mergepipe.options import RunOptions
from mergepipe.planning.plan import Plan
from mergepipe.planning.plan_json import parse_plan
from support.flat_options import call_flat
from support.reuse_cases import RECIPES, Bench, Recipe, in_layer, make_bench, with_weight

NAMES = ("linear", "task_arithmetic", "ties", "ties_rescaled", "dare_linear", "slerp")


def plan(bench: Bench, recipe: Recipe, budget: str, **options: Any) -> Plan:
    return call_flat(
        session.plan, bench.write(recipe), budget, **{"home": bench.home, "seed": 3, "continue_": True, **options}
    )


def run(bench: Bench, decided: Plan, name: str, home: Path | None = None) -> int:
    """Expert bytes read to run a plan."""
    report = session.run(decided, bench.folder / name, options=RunOptions(home=home or bench.home, threads=2))
    assert report.expert_bytes + report.analysis_bytes <= decided.planned_bytes <= decided.budget_bytes
    return report.expert_bytes


def run_from_scratch(bench: Bench, decided: Plan, name: str) -> None:
    session.run(decided.without_reuse(), bench.folder / name, options=RunOptions(catalog=False, threads=2))


@pytest.fixture(name="bench", params=NAMES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Bench, Recipe]:
    bench = make_bench(tmp_path)
    experts = [bench.folder / f"expert{i}" for i in (1, 2, 3)]
    session.analyze(bench.folder / "base", experts, densities=(0.3, 0.5), options=RunOptions(home=bench.home))
    return bench, RECIPES[request.param]


def test_plan__of_what_was_merged_in_full_costs_nothing(bench: tuple[Bench, Recipe]) -> None:
    folder, recipe = bench
    folder.merge(recipe, "first")
    decided = plan(folder, recipe, "0")
    assert (decided.planned_bytes, decided.saved_bytes) == (0, decided.full_cost_bytes)
    assert run(folder, decided, "again") == 0
    assert folder.digest("again") == folder.digest("first")
    assert keeping.verify(folder.folder / "again").is_sound


@pytest.mark.parametrize("change", ["budget", "weight", "added"])
def test_plan__that_reuses_gives_what_it_gives_from_scratch(bench: tuple[Bench, Recipe], change: str) -> None:
    folder, recipe = bench
    folder.merge(recipe, "first", budget="50%")
    changed = recipe
    if change == "weight" and recipe.takes_weights:
        changed = with_weight(recipe, in_layer(0.45, 0.6))
    if change == "added" and recipe.operator != "slerp":
        changed = replace(recipe, experts=(*recipe.experts, 3), weights=recipe.weights)
    budget = "60%"
    decided, without = plan(folder, changed, budget), plan(folder, changed, budget, continue_=False)
    assert decided.budget_bytes == without.budget_bytes
    assert without.reuse == ()
    assert decided.planned_bytes + decided.saved_bytes >= without.planned_bytes
    run(folder, decided, "again")
    run_from_scratch(folder, decided, "scratch")
    assert folder.digest("again") == folder.digest("scratch")
    assert parse_plan(decided.to_json()) == decided


def test_plan__spends_what_reuse_frees(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    session.analyze(
        bench.folder / "base", [bench.folder / f"expert{i}" for i in (1, 2)], options=RunOptions(home=bench.home)
    )
    recipe = replace(RECIPES["task_arithmetic"], experts=(1,))
    bench.merge(recipe, "first", budget="60%")
    again = plan(bench, recipe, "60%")
    assert again.planned_bytes + again.saved_bytes == again.full_cost_bytes
    assert run(bench, again, "again") > 0
    bench.scratch(recipe, "scratch", catalog=False)
    assert bench.digest("again") == bench.digest("scratch")
    assert "are not charged" in plan_table(again, None)


def test_plan__without_anything_to_reuse_is_what_it_was(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    session.analyze(
        bench.folder / "base", [bench.folder / f"expert{i}" for i in (1, 2)], options=RunOptions(home=bench.home)
    )
    bench.merge(RECIPES["slerp"], "first")
    decided = plan(bench, RECIPES["linear"], "40%")
    assert decided == plan(bench, RECIPES["linear"], "40%", continue_=False)
    assert b"reuse" not in decided.to_json()


@pytest.mark.parametrize("loss", ["gone", "other"])
def test_run__a_snapshot_that_a_plan_takes_from_and_that_is_not_there_is_named(tmp_path: Path, loss: str) -> None:
    bench = make_bench(tmp_path)
    bench.merge(RECIPES["linear"], "first")
    decided = plan(bench, RECIPES["linear"], "0")
    shutil.rmtree(bench.folder / "first")
    if loss == "other":
        bench.merge(RECIPES["task_arithmetic"], "first")
    with pytest.raises(ConflictError) as caught:
        session.run(decided, bench.folder / "again", options=RunOptions(home=bench.home))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("plan.reuse-gone", str(bench.folder / "first"))
    assert "plan again" in problem.hint
    assert not (bench.folder / "again").exists()


def test_merge__under_a_budget_plans_again_when_what_it_reuses_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path)
    bench.merge(RECIPES["linear"], "first", budget="60%")

    def made_too_early(*given: Any, **more: Any) -> Plan:
        decided = make_plan(*given, **more)
        shutil.rmtree(bench.folder / "first", ignore_errors=True)
        return decided

    monkeypatch.setattr("mergepipe.jobs.run.make_plan", made_too_early)
    report = bench.merge(RECIPES["linear"], "second", budget="60%", continue_=True)
    assert report.reused_bytes == 0
    assert report.budget_bytes is not None
    assert 0 < report.expert_bytes + report.analysis_bytes <= report.budget_bytes
    assert keeping.verify(bench.folder / "second", deep_fraction=1.0).is_sound


def test_replay__of_a_snapshot_that_reused_needs_the_inputs_only(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.merge(RECIPES["linear"], "first")
    run(bench, plan(bench, RECIPES["linear"], "0"), "again")
    shutil.rmtree(bench.folder / "first")
    keeping.replay(bench.folder / "again", bench.folder / "replayed")
    assert bench.digest("replayed") == bench.digest("again")
    assert keeping.verify(bench.folder / "again", deep_fraction=1.0).is_sound


budgets = st.integers(4, 100).map(lambda share: f"{share if share > 4 else 0}%")  # 4 % is no page of each tensor
GRIDS = (16_384, 32_768, 65_536)
SMALL_SHAPES = {
    "embed.weight": (65, 1100),  # five blocks of the first grid, three of the second, two of the third, the last broken
    "layers.0.weight": (130, 300),
    "layers.1.weight": (13, 300),
    "norm.weight": (77,),
}


@pytest.fixture(name="analysed", scope="module")
def analyse_each_grid(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Bench]:
    """Families by seed and grid, each analysed on this grid."""
    benches = {}
    for salt, grid in product(range(2), GRIDS):
        bench = make_bench(tmp_path_factory.mktemp("analysed"), salt, SMALL_SHAPES, 2)
        experts = [bench.folder / f"expert{i}" for i in (1, 2)]
        call_flat(
            session.analyze, bench.folder / "base", experts, home=bench.home, densities=(0.3, 0.5), block_elements=grid
        )
        benches[salt, grid] = bench
    return benches


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(NAMES), budgets, budgets, st.sampled_from(GRIDS), st.integers(0, 1))
def test_plan__reuses_over_any_two_budgets_and_grids(
    analysed: dict[tuple[int, int], Bench], name: str, first: str, second: str, block_elements: int, salt: int
) -> None:
    recipe, bench = RECIPES[name], analysed[salt, block_elements]
    with tempfile.TemporaryDirectory(dir=bench.folder) as place:
        work = Path(place).name  # with a catalog of its own, that of the analysis
        home = shutil.copytree(bench.home, bench.folder / work / "home")
        grid: dict[str, Any] = {"block_elements": block_elements}
        bench.merge(recipe, f"{work}/first", budget=first, home=home, **grid)
        decided = plan(bench, recipe, second, home=home, **grid)
        run(bench, decided, f"{work}/again", home)
        run_from_scratch(bench, decided, f"{work}/scratch")
        assert bench.digest(f"{work}/again") == bench.digest(f"{work}/scratch")
    blocks = {name: -(-math.prod(shape) // block_elements) for name, shape in SMALL_SHAPES.items()}
    assert all(stop <= blocks[tensor.name] for tensor in decided.tensors for _, stop, _ in tensor.reused)
