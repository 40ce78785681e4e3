"""A merge is a value that any process can make in parts: the same files, whoever makes which, and sums that add up."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import mergepipe
from mergepipe.checkpoints.gathered_rows import RowMap
from mergepipe.core.blocks import DTYPES
from mergepipe.engine.make_part import make_part
from mergepipe.engine.work import MergeWork, Observer, OutputPlan, Part, PartResult, joined, plan_output, split, whole
from mergepipe.errors import ConflictError
from mergepipe.operators.elementwise import ElementwiseRule, Shares
from mergepipe.options import PlanOptions, RunOptions
from mergepipe.planning.plan import Plan
from mergepipe.runs.inputs import open_inputs, with_parameters
from mergepipe.runs.work import CatalogLink, merge_work
from mergepipe.snapshots.shards import ShardProgress, TensorSpec, plan_shards
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.disk_families import DiskFamily, make_models, write_family
from support.parts import OPTIONS, make_pickled

U8 = DTYPES["U8"]
SHARD_BYTES = 30_000
BLOCK_ELEMENTS = 16384
EACH: dict[str, dict[str, float]] = {
    "linear": {"weight": 0.4},
    "ties": {"weight": 0.4, "density": 0.3},
    "dare_ties": {"weight": 0.4, "density": 0.6},
    "model_stock": {},
}
BUDGETED = ("ties", "dare_ties")
SAMPLED = ("ties sample", "model_stock sample")
CASES = [*((name, False) for name in EACH), *((name, True) for name in (*BUDGETED, *SAMPLED))]


@dataclass(frozen=True, slots=True)
class Case:
    """The work of a merge, its plan if it has one, and the whole result with its files."""

    work: MergeWork
    plan: Plan | None
    result: PartResult
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def family(root: Path) -> DiskFamily:
    family = write_family(root / "family", make_models(3))
    home = RunOptions(home=root / "home", threads=2)
    mergepipe.analyze(family.places[0], family.places[1:], block_elements=BLOCK_ELEMENTS, options=home)
    return family


def write_recipe(root: Path, family: DiskFamily, operator: str, experts: Sequence[Path]) -> Path:
    models = [{"model": str(expert), "parameters": EACH[operator]} for expert in experts]
    recipe = root / f"{operator}.yml"
    recipe.write_text(yaml.safe_dump({"merge_method": operator, "base_model": str(family.places[0]), "models": models}))
    return recipe


def work_of(recipe: Path, plan: Plan | None = None) -> MergeWork:
    store = LocalStore()
    inputs = open_inputs(Location.local(recipe), store, ("*",))
    inputs = inputs if plan is None else with_parameters(inputs, plan)
    output = plan_output(inputs.resolution.tasks, SHARD_BYTES)
    return merge_work(inputs, output, plan, 5, store, CatalogLink(None))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def cases(root: Path, family: DiskFamily) -> dict[tuple[str, bool], Case]:
    def case(name: str, *, budgeted: bool) -> Case:
        operator, _, policy = name.partition(" ")
        recipe, plan = write_recipe(root, family, operator, family.places[1:]), None
        if budgeted:
            options = PlanOptions(select=policy or "norm", block_elements=BLOCK_ELEMENTS)
            plan = mergepipe.plan(recipe, "40%", home=root / "home", allow_dropped=("*",), options=options)
        return made_whole(work_of(recipe, plan), root / f"whole-{name}-{budgeted}", plan)

    return {(name, budgeted): case(name, budgeted=budgeted) for name, budgeted in CASES}


def made_whole(work: MergeWork, folder: Path, plan: Plan | None = None) -> Case:
    folder.mkdir()
    result = make_part(work, whole(work.output), folder, LocalStore(), OPTIONS)
    return Case(work, plan, result, files_in(folder))


def test_make_part__in_another_process_makes_the_same_files(
    cases: dict[tuple[str, bool], Case], tmp_path: Path
) -> None:
    case = cases["dare_ties", True]
    pickled = [pickle.dumps((case.work, part)) for part in reversed(split(case.work.output, 3))]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        results = [pool.apply(make_pickled, (part, tmp_path)) for part in pickled]
    assert files_in(tmp_path) == case.files
    assert joined(results).digests == case.result.digests


@pytest.mark.parametrize("key", CASES)
def test_merge_work__unpickles_to_an_equal_value(cases: dict[tuple[str, bool], Case], key: tuple[str, bool]) -> None:
    work = cases[key].work
    other = pickle.loads(pickle.dumps(work))
    assert other == work
    assert other != replace(work, seed=6)


def test_merge_work__of_packed_experts_carries_their_index(root: Path, family: DiskFamily, tmp_path: Path) -> None:
    mergepipe.pack(family.places[0], [family.places[1]], root / "packed", threads=2)
    (packed,) = (root / "packed").iterdir()
    recipe = write_recipe(tmp_path, family, "ties", (packed, family.places[2]))
    work = work_of(recipe)
    case = made_whole(work, tmp_path / "whole")
    pickled = [pickle.dumps((work, part)) for part in split(work.output, 3)]
    assert pickle.loads(pickled[0])[0] == work
    (tmp_path / "parts").mkdir()
    results = [make_pickled(part, tmp_path / "parts") for part in pickled]
    assert files_in(tmp_path / "parts") == case.files
    assert joined(results).usage.by_purpose == case.result.usage.by_purpose


def test_make_part__refuses_another_version_of_an_input(tmp_path: Path) -> None:
    family = write_family(tmp_path / "own", make_models(2))
    work = work_of(write_recipe(tmp_path, family, "linear", family.places[1:]))
    path = work.files[-1].location.local_path
    path.write_bytes(path.read_bytes())
    (tmp_path / "out").mkdir()
    with pytest.raises(ConflictError) as caught:
        make_pickled(pickle.dumps((work, whole(work.output))), tmp_path / "out")
    assert (caught.value.code, files_in(tmp_path / "out")) == ("input.changed", {})


def test_make_part__reports_the_shards_it_writes(
    cases: dict[tuple[str, bool], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergepipe.engine.pipeline.TICK_SECONDS", 0.0)  # a report at every event
    work, reports = cases["linear", False].work, list[ShardProgress | None]()
    part = split(work.output, 2)[1]
    make_part(work, part, tmp_path, LocalStore(), OPTIONS, Observer(reports.append))
    sizes = {work.output.shards[shard].name: work.output.shards[shard].file_bytes for shard in part.shards}
    shown = [report for report in reports if report is not None]
    assert {report.name for report in shown} <= sizes.keys()
    assert shown
    assert all(0 < report.written_bytes <= report.file_bytes == sizes[report.name] for report in shown)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.integers(1, 7))
def test_split__deals_every_shard_once_and_evenly(sizes: list[int], n_parts: int) -> None:
    output = OutputPlan(plan_shards([TensorSpec(str(i), U8, (n,)) for i, n in enumerate(sizes)], 1), ())
    parts = split(output, n_parts)
    assert len(parts) == n_parts
    assert sorted(shard for part in parts for shard in part.shards) == list(range(len(output.shards)))
    loads = [sum(output.shards[shard].file_bytes for shard in part.shards) for part in parts]
    assert max(loads) - min(loads) <= max(shard.file_bytes for shard in output.shards)


def test_part_result__of_overlapping_parts_do_not_add_up() -> None:
    one, both = PartResult({1: ()}), PartResult({0: (), 1: ()})
    with pytest.raises(ValueError, match="disjoint"):
        _ = one + both
    assert joined([PartResult({2: ()}), one]).part == Part((1, 2))


ROWS = np.arange(3, dtype=np.int64)
VALUES = [
    (RowMap(np.zeros(3, np.int32), ROWS), RowMap(np.zeros(3, np.int32), ROWS[::-1].copy())),
    (Shares(np.array([0.5, 2.0]), 1.0), Shares(np.array([0.5, 3.0]), 1.0)),
    (
        ElementwiseRule(np.array([1, 2], np.float32), limits_E=np.array([3, 4], np.uint64)),
        ElementwiseRule(np.array([1, 2], np.float32)),
    ),
]


@pytest.mark.parametrize(("value", "another"), VALUES, ids=lambda value: type(value).__name__)
def test_value_of_arrays__unpickles_to_an_equal_one(value: object, another: object) -> None:
    copy = pickle.loads(pickle.dumps(value))
    assert copy == value
    assert hash(copy) == hash(value)
    assert copy != another
