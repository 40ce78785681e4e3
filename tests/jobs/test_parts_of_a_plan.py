"""An output made in parts is that of one machine, byte for byte, whoever makes which part, and the budget holds."""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import mergepipe
from mergepipe.engine.make_part import make_part
from mergepipe.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    OutputError,
    RecipeError,
)
from mergepipe.jobs import parts as parts_job
from mergepipe.jobs.gc import ABANDONED_SECONDS
from mergepipe.options import MergeOptions, OutputOptions, PlanOptions
from mergepipe.planning.plan import Plan
from mergepipe.reports import MergeReport, PartReport
from mergepipe.runs import parts as worker_module
from mergepipe.runs import progress
from mergepipe.snapshots import parts as records
from mergepipe.snapshots import work_log as work_log
from mergepipe.snapshots.parts import Claimant
from mergepipe.snapshots.parts_places import FolderParts, parts_directory, read_job
from mergepipe.storage import owned
from mergepipe.storage.owner import Owner
from support.crashes import Death, count_operations, run_killed
from support.disk_families import DiskFamily, make_models, tree_digest, write_family

pytestmark = pytest.mark.usefixtures("exact_reads")

SHARD_BYTES = 30_000
BLOCK_ELEMENTS = 16384
PARAMETERS: dict[str, dict[str, float]] = {
    "linear": {"weight": 0.4},
    "ties": {"weight": 0.4, "density": 0.3},
    "dare_ties": {"weight": 0.4, "density": 0.6},
    "model_stock": {},
}
FULL = [(operator, None, is_packed) for operator in PARAMETERS for is_packed in (False, True)]
BUDGETED = [("ties", "40%", False), ("dare_ties", "60%", False), ("linear", "50%", True), ("dare_ties", "70%", True)]
OPTIONS = OutputOptions(catalog=False, threads=2)


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, and what one machine makes of it, or of its recipe."""

    plan: Plan
    report: MergeReport
    files: dict[str, bytes]


Cases = Callable[[tuple[str, str | None, bool]], Case]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def family(root: Path) -> DiskFamily:
    return write_family(root / "family", make_models(2))


@pytest.fixture(scope="module")
def packed(root: Path, family: DiskFamily) -> tuple[Path, ...]:
    mergepipe.pack(family.places[0], family.places[1:], root / "packed")
    return tuple(sorted((root / "packed").iterdir()))


@pytest.fixture(scope="module")
def cases(root: Path, family: DiskFamily, packed: tuple[Path, ...]) -> Cases:
    known: dict[tuple[str, str | None, bool], Case] = {}

    def case(key: tuple[str, str | None, bool]) -> Case:
        if key not in known:
            operator, budget, is_packed = key
            name = f"{operator}-{budget}-{is_packed}"
            recipe = write_recipe(root / f"{name}.yml", family, operator, packed if is_packed else family.places[1:])
            known[key] = made_by_one(root / name, recipe, plan_of(recipe, budget, root / "home"), budget)
        return known[key]

    return case


def write_recipe(path: Path, family: DiskFamily, operator: str, experts: tuple[Path, ...]) -> Path:
    models = [{"model": str(expert), "parameters": PARAMETERS[operator]} for expert in experts]
    path.write_text(yaml.safe_dump({"merge_method": operator, "base_model": str(family.places[0]), "models": models}))
    return path


def plan_of(recipe: Path, budget: str | None, home: Path) -> Plan:
    return mergepipe.plan(
        recipe, budget, everything=budget is None, home=home, allow_dropped=("*",),
        options=PlanOptions(block_elements=BLOCK_ELEMENTS),
    )  # fmt: skip


def made_by_one(out: Path, recipe: Path, plan: Plan, budget: str | None) -> Case:
    """By a plan; the files of a plan of everything are those of the recipe's full merge, which may read less."""
    report = mergepipe.run(plan, out, options=replace(OPTIONS, shard_bytes=SHARD_BYTES))
    if budget is None:
        out = out.with_name(f"{out.name}-full")
        options = MergeOptions(catalog=False, shard_bytes=SHARD_BYTES, allow_dropped=("*",), threads=2)
        mergepipe.merge(recipe, out, options=options)
    return Case(plan, report, files_of(out))


def files_of(out: Path) -> dict[str, bytes]:
    """All that says what the tensors are: weights, their index and their digests."""
    names = ("*.safetensors", "model.safetensors.index.json", "mergepipe.blocks")
    return {path.name: path.read_bytes() for name in names for path in out.glob(name)}


def run_part(plan: Plan, out: Path, number: int, n_parts: int) -> PartReport:
    return mergepipe.run_part(plan, out, (number, n_parts), options=replace(OPTIONS, shard_bytes=SHARD_BYTES))


def nothing_else(out: Path) -> bool:
    """Whether no hidden directory is left beside an output."""
    return not [path for path in out.parent.iterdir() if path.name.startswith(".")]


@given(st.sampled_from([*FULL, *BUDGETED]), st.integers(1, 7), st.randoms(use_true_random=False))
@settings(max_examples=4)
def test_run_part__parts_in_any_order_and_repeated_make_what_one_machine_makes(
    cases: Cases,
    tmp_path_factory: pytest.TempPathFactory,
    key: tuple[str, str | None, bool],
    n_parts: int,
    random: Random,
) -> None:
    case, out = cases(key), tmp_path_factory.mktemp("run") / "out"
    order = [*range(1, n_parts + 1), *random.choices(range(1, n_parts + 1), k=2)]
    random.shuffle(order)
    reports = [run_part(case.plan, out, number, n_parts) for number in order]
    (finished,) = (report.merge for report in reports if report.merge is not None)
    assert files_of(out) == case.files
    assert nothing_else(out)
    ours, theirs = finished, case.report
    assert (ours.base_bytes, ours.expert_bytes) == (theirs.base_bytes, theirs.expert_bytes)
    assert ours.analysis_bytes == theirs.analysis_bytes
    assert case.plan.limit_bytes is None or ours.expert_bytes + ours.analysis_bytes <= case.plan.limit_bytes
    assert sum(report.expert_bytes for report in reports) == ours.expert_bytes + ours.analysis_bytes


@pytest.mark.slow
@pytest.mark.parametrize("key", [*FULL, *BUDGETED])
def test_run_part__every_case_in_four_parts(cases: Cases, tmp_path: Path, key: tuple[str, str | None, bool]) -> None:
    for number in (3, 1, 4, 2):
        run_part(cases(key).plan, tmp_path / "out", number, 4)
    assert files_of(tmp_path / "out") == cases(key).files


def test_run_part__racing_workers_make_one_output(cases: Cases, tmp_path: Path) -> None:
    case, out = cases(("dare_ties", None, True)), tmp_path / "out"
    with ThreadPoolExecutor(3) as pool:
        reports = [future.result() for future in [pool.submit(run_part, case.plan, out, 1, 1) for _ in range(3)]]
    assert sum(report.merge is not None for report in reports) == 1
    assert files_of(out) == case.files
    mergepipe.verify(out)


def test_run_part__of_another_shard_size_is_refused(cases: Cases, tmp_path: Path) -> None:
    plan, out = cases(("linear", None, False)).plan, tmp_path / "out"
    run_part(plan, out, 1, 3)
    with pytest.raises(ConflictError, match="5 shards"):
        mergepipe.run_part(plan, out, (2, 3), options=replace(OPTIONS, shard_bytes=10 * SHARD_BYTES))


def test_run_part__refuses_what_it_cannot_do(cases: Cases, tmp_path: Path) -> None:
    plan, out = cases(("linear", None, False)).plan, tmp_path / "out"
    with pytest.raises(RecipeError, match="0/3"):
        run_part(plan, out, 0, 3)
    with pytest.raises(NotFoundError, match="no part of it is made"):
        mergepipe.run_part(plan, out, options=replace(OPTIONS, shard_bytes=SHARD_BYTES))
    with pytest.raises(NotFoundError, match="no part of it was made"):
        mergepipe.parts_status(plan, out)
    run_part(plan, out, 1, 3)
    with pytest.raises(NotFoundError, match=r"of 5 shards are not made: model-0000"):
        mergepipe.run_part(plan, out, options=replace(OPTIONS, shard_bytes=SHARD_BYTES))


# --- workers that are interrupted, and those that come back ---


@pytest.mark.parametrize("moment", ["before it writes", "after it wrote"])
def test_run_part__stale_worker_after_the_commit_changes_nothing(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    case, out = cases(("linear", None, False)), tmp_path / "out"
    digests = []

    def finished_by_another() -> None:
        monkeypatch.setattr(worker_module, "make_part", make_part)
        run_part(case.plan, out, 1, 1)
        digests.append(tree_digest(tmp_path))

    def overtaken(*arguments: object) -> object:
        if moment == "before it writes":
            finished_by_another()
        result = make_part(*arguments)  # type: ignore[arg-type]
        if moment == "after it wrote":
            finished_by_another()
        return result

    monkeypatch.setattr(worker_module, "make_part", overtaken)
    report = run_part(case.plan, out, 1, 2)
    assert report.is_published
    assert report.merge is None
    assert digests == [tree_digest(tmp_path)]
    assert nothing_else(out)


def test_run_part__stale_worker_of_a_removed_output_fails(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, out = cases(("linear", None, False)), tmp_path / "results" / "out"

    def removed(*arguments: object) -> object:
        result = make_part(*arguments)  # type: ignore[arg-type]
        place = parts_directory(out, case.plan.digest)
        place.rename(tmp_path / "elsewhere")
        return result

    monkeypatch.setattr(worker_module, "make_part", removed)
    with pytest.raises(ConflictError, match="finished or removed by somebody else"):
        run_part(case.plan, out, 1, 2)
    assert not any(out.parent.iterdir())


def test_run_part__other_bytes_of_a_shard_are_refused(cases: Cases, tmp_path: Path) -> None:
    case, out = cases(("linear", None, False)), tmp_path / "out"
    run_part(case.plan, out, 1, 2)
    place = job_place(out, case.plan)
    for path in parts_directory(out, case.plan.digest).glob("shard-*"):
        path.unlink()
    name = next(name for name in place.names() if name.startswith("done-"))
    place.replace(name, with_other_digests(place.read(name) or b""))
    with pytest.raises(ConflictError, match="another worker made other bytes"):
        run_part(case.plan, out, 1, 2)


@pytest.mark.parametrize("key", [("dare_ties", None, False), ("dare_ties", "70%", True)])
def test_run_part__damage_of_any_record_is_refused(
    cases: Cases, tmp_path: Path, key: tuple[str, str | None, bool]
) -> None:
    """One changed byte, a digit for another digit where there is one, between a part and the end."""
    case, made, random = cases(key), tmp_path / "made", Random(15)
    run_part(case.plan, made / "out", 1, 2)
    names = [path.name for path in sorted(parts_directory(made / "out", case.plan.digest).iterdir())]
    records = [name for name in names if not name.startswith("shard-")]
    assert {"job.json", "index-1" if key[2] else "content-ids.json"} < set(records)
    for name in records:
        for attempt in range(4):
            copy = tmp_path / f"{name}-{attempt}"
            shutil.copytree(made, copy)
            out = copy / "out"
            place = parts_directory(out, case.plan.digest)
            damage(place / name, random, in_digits=attempt < 2)
            with pytest.raises(CorruptError) as refused:
                run_part(case.plan, out, 2, 2)
            (problem,) = refused.value.problems
            assert (problem.code, problem.where) == ("work-log.damaged", str(place / name))
            assert not out.exists()
            shutil.rmtree(copy)


def damage(path: Path, random: Random, *, in_digits: bool) -> None:
    """Change one byte of a file, by choice a digit for another one."""
    content = bytearray(path.read_bytes())
    digits = [at for at, byte in enumerate(content) if byte in b"0123456789"]
    at = random.choice(digits) if in_digits and digits else random.randrange(len(content))
    content[at] = content[at] ^ 1 if content[at] in b"0123456789" else content[at] ^ (1 << random.randrange(8))
    path.write_bytes(content)


def with_other_digests(record: bytes) -> bytes:
    """The record of a shard that is done, with other digests of its first tensor."""
    content = json.loads(record)
    entry = content["tensors"][0]
    entry[1] = base64.b64encode(bytes(len(base64.b64decode(entry[1])))).decode()
    return json.dumps(content).encode()


def check_survives(case: Case, out: Path, at: int, death: Death) -> None:
    """Kill a worker at a storage operation; then a second worker completes the output, and tells what was read."""
    was_killed = run_killed(lambda: run_part(case.plan, out, 1, 1), at, death)
    has_output = out.exists()
    again = run_part(case.plan, out, 1, 1)
    assert was_killed
    assert again.is_published
    assert (again.merge is None) == has_output
    assert files_of(out) == case.files
    if has_output:  # killed between the commit and the end: what is left beside it is garbage, if it is not just made
        for path in out.parent.glob(f".{out.name}.*"):
            os.utime(path, (time.time() - 60,) * 2)
        mergepipe.gc([out.parent], home=out.parent.parent / "no-home")
    left = [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.")]
    assert left == []
    if again.merge is not None:
        read_bytes = again.merge.expert_bytes + again.merge.analysis_bytes
        assert (
            again.merge.earlier_expert_bytes <= read_bytes <= again.merge.earlier_expert_bytes + case.plan.planned_bytes
        )
        assert again.expert_bytes <= case.plan.planned_bytes


@pytest.mark.parametrize("key", [("dare_ties", None, True), ("dare_ties", "60%", False)])
def test_run_part__killed_worker_costs_its_shard(
    cases: Cases, tmp_path: Path, key: tuple[str, str | None, bool]
) -> None:
    case = cases(key)
    n_operations = len(count_operations(lambda: run_part(case.plan, tmp_path / "counted", 1, 1)))
    for at in (n_operations // 3, n_operations * 9 // 10):
        check_survives(case, tmp_path / f"out-{at}", at, Death.BEFORE)


@pytest.mark.slow
@pytest.mark.parametrize("death", list(Death))
@pytest.mark.parametrize("key", [("dare_ties", None, True), ("dare_ties", "60%", False)])
def test_run_part__survives_death_at_every_operation(
    cases: Cases, tmp_path: Path, key: tuple[str, str | None, bool], death: Death
) -> None:
    case = cases(key)
    names = count_operations(lambda: run_part(case.plan, tmp_path / "counted", 1, 1))
    for at, name in enumerate(names):
        if death is Death.BEFORE or name in ("write", "pwrite"):
            check_survives(case, tmp_path / f"out-{at}", at, death)


def test_run_part__killed_within_a_file_goes_on_behind_its_last_unit(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command always ends, under a budget too; what was lost is counted, and nothing else."""
    monkeypatch.setattr(work_log, "UNIT_BYTES", 1)
    monkeypatch.setattr(progress, "READ_AHEAD_BYTES", 0)
    plan = cases(("ties", "40%", False)).plan
    mergepipe.run(plan, tmp_path / "whole", options=OPTIONS)

    def run(out: Path) -> PartReport:
        return mergepipe.run_part(plan, out, (1, 1), options=OPTIONS)

    names = count_operations(lambda: run(tmp_path / "counted"))
    unit = len(names) - 1 - names[::-1].index("ftruncate") + 3  # the record of the last one
    whole_bytes = run(tmp_path / "undisturbed").expert_bytes
    made = names.index("renameat2", unit)  # the record that the shard is done
    for at, is_lost in ((unit - 9, True), (unit + 1, False), (unit + 7, False), (made, False)):
        out = tmp_path / f"out-{at}"
        assert run_killed(partial(run, out), at, Death.BEFORE)
        report = run(out)
        assert files_of(out) == files_of(tmp_path / "whole")
        assert nothing_else(out)
        assert report.expert_bytes == (whole_bytes if is_lost else 0)
        assert report.merge is not None
        total_bytes = report.merge.expert_bytes + report.merge.analysis_bytes
        assert total_bytes == report.merge.earlier_expert_bytes + report.expert_bytes
        assert 0 < report.merge.earlier_expert_bytes <= whole_bytes


def test_run_part__failed_finish_gives_the_shards_back(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, out = cases(("ties", "40%", False)), tmp_path / "out"

    def fail(*_: object, **__: object) -> None:
        raise ConflictError.of("test.failure", out, "fails")

    with monkeypatch.context() as patch:
        patch.setattr("mergepipe.snapshots.staging.Staging.publish", fail)
        with pytest.raises(ConflictError, match="fails"):
            run_part(case.plan, out, 1, 1)
    status = mergepipe.parts_status(case.plan, out)
    assert (status.done_shards, status.is_published) == (5, False)
    report = mergepipe.run_part(case.plan, out, options=replace(OPTIONS, shard_bytes=SHARD_BYTES))
    assert report.expert_bytes == 0
    assert files_of(out) == case.files


def test_parts_status__tells_what_is_missing(cases: Cases, tmp_path: Path) -> None:
    plan, out = cases(("ties", None, False)).plan, tmp_path / "out"
    run_part(plan, out, 2, 3)
    status = mergepipe.parts_status(plan, out, n_parts=3)
    assert status.missing_parts == (1, 3)
    assert {shard.state for shard in status.shards} == {"done", "open"}
    assert {shard.part for shard in status.shards if shard.state == "done"} == {"2/3"}
    assert 0 < status.read_bytes < status.planned_bytes
    for number in (1, 3):
        run_part(plan, out, number, 3)
    assert mergepipe.parts_status(plan, out, n_parts=3).is_published


def test_parse_part__reads_a_part_of_many() -> None:
    assert parts_job.parse_part("2/7") == (2, 7)
    for text in ("", "2", "8/7", "0/7", "a/b", "1/", "-1/2"):
        with pytest.raises(RecipeError):
            parts_job.parse_part(text)


def test_gc__removes_parts_of_an_output_that_is_published(cases: Cases, tmp_path: Path) -> None:
    case, out = cases(("linear", None, False)), tmp_path / "out"
    run_part(case.plan, out, 1, 2)
    place = parts_directory(out, case.plan.digest)
    assert mergepipe.gc([tmp_path], home=tmp_path / "home").garbage == ()  # other parts may come
    mergepipe.run(case.plan, out, options=replace(OPTIONS, shard_bytes=SHARD_BYTES))
    (garbage,) = mergepipe.gc([tmp_path], home=tmp_path / "home").garbage
    assert (garbage.kind, garbage.is_removed) == ("parts", True)
    assert not place.exists()


def test_run_part__where_renames_replace_is_coordinated_by_links(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned, "renameat2", lambda *_: False)
    case, out = cases(("dare_ties", None, True)), tmp_path / "out"
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: run_part(case.plan, out, 1, 1), range(3)))
    assert files_of(out) == case.files
    assert nothing_else(out)


def test_run_part__with_force_replaces_a_snapshot(cases: Cases, tmp_path: Path) -> None:
    case, out = cases(("linear", None, False)), tmp_path / "out"
    mergepipe.run(cases(("ties", None, False)).plan, out, options=replace(OPTIONS, shard_bytes=SHARD_BYTES))
    before = files_of(out)
    with pytest.raises(OutputError, match="already exists"):
        run_part(case.plan, out, 1, 2)
    for number in (1, 2):
        assert files_of(out) == before
        mergepipe.run_part(case.plan, out, (number, 2), options=replace(OPTIONS, shard_bytes=SHARD_BYTES, force=True))
    assert files_of(out) == case.files
    assert nothing_else(out)


def test_run_part__that_another_process_makes_is_busy_under_a_budget(cases: Cases, tmp_path: Path) -> None:
    plan, out = cases(("ties", "40%", False)).plan, tmp_path / "out"
    run_part(plan, out, 1, 4)
    status = mergepipe.parts_status(plan, out)
    open_shard = next(n for n, shard in enumerate(status.shards) if shard.state == "open")
    place = job_place(out, plan)
    Claimant(place, "1/1", plan.limit_bytes).claim(open_shard, plan.planned_bytes)
    with pytest.raises(ConflictError, match="is being made by process") as refused:
        run_part(plan, out, 1, 1)
    assert {problem.code for problem in refused.value.problems} == {"parts.busy"}
    assert mergepipe.parts_status(plan, out).shards[open_shard].state == "reading"
    assert mergepipe.parts_status(plan, out).done_shards == 4  # what can be made is made


def job_place(out: Path, plan: Plan) -> FolderParts:
    """The place of parts that were begun."""
    job = read_job(parts_directory(out, plan.digest))
    assert job is not None
    return FolderParts(out, job)


def test_gc__removes_parts_that_are_abandoned(cases: Cases, tmp_path: Path) -> None:
    case, out = cases(("linear", None, False)), tmp_path / "out"
    run_part(case.plan, out, 1, 2)
    place = parts_directory(out, case.plan.digest)
    a_week_ago = time.time() - ABANDONED_SECONDS - 10
    for path in (*place.iterdir(), place):
        os.utime(path, (a_week_ago, a_week_ago))
    (garbage,) = mergepipe.gc([tmp_path], home=tmp_path / "home").garbage
    assert (garbage.kind, garbage.is_removed) == ("parts", True)
    assert nothing_else(out)


def test_run_part__again_on_another_machine_takes_the_part_of_the_lost_one(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is gone without a word: its part can be run again at once, and the report tells what was lost."""
    case, out = cases(("ties", "40%", False)), tmp_path / "out"
    run_part(case.plan, out, 1, 2)
    place = job_place(out, case.plan)
    shard = next(n for n, s in enumerate(mergepipe.parts_status(case.plan, out).shards) if s.state == "open")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(records, "this_process", lambda: Owner(1, "1", "another boot", "another machine"))
        claim = Claimant(place, "2/2", case.plan.limit_bytes).claim(shard, 1000)
    assert claim is not None
    with pytest.raises(ConflictError, match="is being made by process 1 on another machine"):
        run_part(case.plan, out, 1, 1)
    merge = run_part(case.plan, out, 2, 2).merge
    assert merge is not None
    assert merge.earlier_expert_bytes == 1000
    assert merge.expert_bytes + merge.analysis_bytes == 1000 + case.report.expert_bytes + case.report.analysis_bytes
    assert files_of(out) == case.files
