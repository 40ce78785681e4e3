"""An output made in parts is that of one machine, byte for byte, whoever makes which part, and the budget holds.

Most of it holds of outputs in a folder and in a bucket, and is tested of both. Workers that are killed are in
`tests/faults`, the records of parts in `tests/snapshots/test_parts_places.py`.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import pytest

import mergepipe
from mergepipe import Plan
from mergepipe.engine.make_part import make_part
from mergepipe.errors import (
    ConflictError,
    CorruptError,
    LimitError,
    NotFoundError,
    OutputError,
    RecipeError,
    UnsupportedError,
)
from mergepipe.jobs import parts
from mergepipe.options import OutputOptions
from mergepipe.reports import MergeReport, PartReport
from mergepipe.runs import parts as worker_module
from mergepipe.runs import progress
from mergepipe.snapshots import parts as records
from mergepipe.snapshots import work_log
from mergepipe.snapshots.object_upload import ObjectUpload
from mergepipe.snapshots.parts import JOB_NAME, Claimant
from mergepipe.snapshots.parts_places import BucketParts, FolderParts, parts_directory, parts_folder, read_job
from mergepipe.storage import owned
from mergepipe.storage.location import Location
from mergepipe.storage.owned import PARTS_MARK
from mergepipe.storage.owners import Owner
from mergepipe.storage.remote.objects import BucketFolder
from support.bucket_outputs import files_below, ignore_conditions, new_prefix, objects_below
from support.crashes import Death, count_operations, run_killed
from support.disk_families import DiskFamily, make_models, write_family
from support.model_folders import recipe_of
from support.public_names import MANIFEST_NAME
from support.s3_server import S3Server
from support.slow_cases import slow_unless

pytestmark = pytest.mark.usefixtures("exact_reads")

SHARD_BYTES = 30_000
N_SHARDS = 5
PARAMETERS: dict[str, dict[str, float]] = {
    "linear": {"weight": 0.4},
    "ties": {"weight": 0.4, "density": 0.3},
    "dare_ties": {"weight": 0.4, "density": 0.6},
    "model_stock": {},
}
Key = tuple[str, str | None, bool]
PLAIN: Key = ("linear", None, False)
BUDGETED: Key = ("ties", "40%", False)
PACKED: Key = ("dare_ties", None, True)
KEYS: list[Key] = [
    *((operator, None, is_packed) for operator in PARAMETERS for is_packed in (False, True)),
    BUDGETED, ("dare_ties", "60%", False), ("linear", "50%", True), ("dare_ties", "70%", True),
]  # fmt: skip
OPTIONS = OutputOptions(catalog=False, threads=2, shard_bytes=SHARD_BYTES)


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, and what one machine makes of it: its report and all files but the record of the run."""

    plan: Plan
    report: MergeReport
    files: dict[str, bytes]


Cases = Callable[[Key], Case]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    root = tmp_path_factory.mktemp("parts")
    family = write_family(root / "family", make_models(2))
    mergepipe.pack(family.places[0], family.places[1:], root / "packed")
    packed = DiskFamily(family.models, (family.places[0], *sorted((root / "packed").iterdir())))
    known: dict[Key, Case] = {}

    def case(key: Key) -> Case:
        if key not in known:
            known[key] = made_by_one(root, packed if key[2] else family, key)
        return known[key]

    return case


def made_by_one(root: Path, family: DiskFamily, key: Key) -> Case:
    """By a plan; the weights of a plan of everything are those of the recipe's full merge, which may read less."""
    operator, budget, _ = key
    name = "-".join(map(str, key))
    recipe, out = root / f"{name}.yml", root / name
    models = dict.fromkeys(family.places[1:], PARAMETERS[operator])
    recipe.write_text(json.dumps(recipe_of(operator, models, family.places[0])))
    plan = mergepipe.plan(
        recipe, budget, everything=budget is None, home=root / "home", allow_dropped=("*",),
        block_elements=16384
    )  # fmt: skip
    report = mergepipe.run(plan, out, options=OPTIONS)
    if budget is None:
        full = root / f"{name}-full"
        mergepipe.merge(recipe, full, catalog=False, shard_bytes=SHARD_BYTES, allow_dropped=("*",), threads=2)
        assert weights(files_below(full)) == weights(files_below(out))
    return Case(plan, report, made(files_below(out)))


def made(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name != MANIFEST_NAME}


def weights(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.endswith(".safetensors")}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output is made: a folder, or a prefix of a bucket."""

    out: Path | str
    home: Path

    def files(self) -> dict[str, bytes]:
        """All that lies there."""
        return objects_below(self.out) if isinstance(self.out, str) else files_below(self.out)

    def everything(self) -> dict[str, bytes]:
        """All that lies there and beside it."""
        return objects_below(self.out) if isinstance(self.out, str) else files_below(self.out.parent)

    def part(self, plan: Plan, part: tuple[int, int] | None) -> PartReport:
        return mergepipe.run_part(plan, self.out, part, options=replace(OPTIONS, home=self.home))

    def status(self, plan: Plan, n_parts: int | None = None) -> mergepipe.PartsStatus:
        return mergepipe.parts_status(plan, self.out, n_parts=n_parts)

    def collect(self) -> list[tuple[str, bool]]:
        """Kinds of garbage, and whether it was removed."""
        assert isinstance(self.out, Path)
        garbage = mergepipe.gc([self.out.parent], home=self.home.with_name("no-home")).garbage
        return [(item.kind, item.is_removed) for item in garbage]

    def check_made(self, case: Case) -> None:
        """The output is that of one machine, and nothing else is left anywhere."""
        files = self.files()
        assert MANIFEST_NAME in files
        assert made(files) == case.files
        assert len(self.everything()) == len(files)
        assert list(self.home.glob("uploads/.*")) == []


@pytest.fixture
def folder(tmp_path: Path) -> Place:
    return Place(tmp_path / "results" / "out", tmp_path / "home")


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(new_prefix(server, monkeypatch), tmp_path / "home")


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue(request.param)
    return place


FAST = {("bucket", BUDGETED), ("folder", PACKED)}


@pytest.mark.thorough
@pytest.mark.parametrize(("where", "key"), slow_unless(FAST.__contains__, product(("folder", "bucket"), KEYS)))
def test_run_part__parts_in_any_order_and_repeated_make_what_one_machine_makes(
    cases: Cases, request: pytest.FixtureRequest, where: str, key: Key
) -> None:
    case, random, place = cases(key), Random(key[0]), request.getfixturevalue(where)
    order = [*range(1, N_SHARDS + 3), *random.choices(range(1, N_SHARDS + 3), k=2)]  # two parts have no shard
    random.shuffle(order)
    reports = [place.part(case.plan, (number, N_SHARDS + 2)) for number in order]
    (ours,) = (report.merge for report in reports if report.merge is not None)
    place.check_made(case)
    theirs = case.report
    assert (ours.base_bytes, ours.expert_bytes) == (theirs.base_bytes, theirs.expert_bytes)
    assert ours.analysis_bytes == theirs.analysis_bytes
    assert case.plan.limit_bytes is None or ours.expert_bytes + ours.analysis_bytes <= case.plan.limit_bytes
    assert sum(report.expert_bytes for report in reports) == ours.expert_bytes + ours.analysis_bytes


@pytest.mark.thorough
def test_run_part__of_racing_workers_makes_one_output(cases: Cases, place: Place) -> None:
    case = cases(PACKED)
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda _: place.part(case.plan, (1, 1)), range(3)))
    assert sum(report.merge is not None for report in reports) == 1
    place.check_made(case)


def test_run_part__where_renames_replace_is_coordinated_by_links(
    cases: Cases, folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned, "renameat2", lambda *_: False)
    test_run_part__of_racing_workers_makes_one_output(cases, folder)


@pytest.mark.thorough
def test_run_part__finishes_when_it_is_asked_to(cases: Cases, place: Place) -> None:
    case = cases(BUDGETED)
    with pytest.raises(NotFoundError, match="no part of it is made"):
        place.part(case.plan, None)
    with pytest.raises(NotFoundError, match="no part of it was made"):
        place.status(case.plan)
    place.part(case.plan, (2, 3))
    status = place.status(case.plan, 3)
    assert (status.is_published, status.missing_parts, str(status.out)) == (False, (1, 3), str(place.out))
    assert {shard.state for shard in status.shards} == {"done", "open"}
    assert {shard.part for shard in status.shards if shard.state == "done"} == {"2/3"}
    assert 0 < status.read_bytes < status.planned_bytes
    with pytest.raises(NotFoundError, match=rf"of {N_SHARDS} shards are not made: model-0000"):
        place.part(case.plan, None)
    assert MANIFEST_NAME not in place.files()
    for number in (1, 3):
        place.part(case.plan, (number, 3))
    assert place.status(case.plan, 3).is_published
    assert place.part(case.plan, None).is_published
    place.check_made(case)


@pytest.mark.thorough
@pytest.mark.parametrize("has_job", [True, False])
def test_run_part__removes_what_a_killed_worker_left_of_a_published_output(
    cases: Cases, place: Place, monkeypatch: pytest.MonkeyPatch, has_job: bool
) -> None:
    case = cases(PLAIN)
    with monkeypatch.context() as patched:
        for kind in (FolderParts, BucketParts):  # as if the process were killed there
            patched.setattr(kind, "remove", lambda parts: None if has_job else parts.delete(JOB_NAME))
        place.part(case.plan, (1, 1))
    assert [name for name in place.everything() if PARTS_MARK in name]
    assert place.part(case.plan, (1, 1)).is_published
    assert [name for name in place.everything() if PARTS_MARK in name] == []
    place.check_made(case)


def test_run_part__refuses_what_it_cannot_do(cases: Cases, place: Place) -> None:
    plan = cases(PLAIN).plan
    with pytest.raises(RecipeError, match="0/3"):
        place.part(plan, (0, 3))
    for part in ("1", "1/2/3", "1/x", "", (1,), (1, 2, 3), 2):
        with pytest.raises(RecipeError, match=r"^part: .*write the second of 7 parts as 2/7"):
            mergepipe.run_part(plan, place.out, part)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"^part: .*give a whole number"):
        mergepipe.run_part(plan, place.out, (1, "3"))  # type: ignore[arg-type]
    assert mergepipe.run_part(plan, place.out, "1/3", options=replace(OPTIONS, home=place.home)).part == "1/3"
    with pytest.raises(ConflictError, match=f"{N_SHARDS} shards"):
        mergepipe.run_part(plan, place.out, (2, 3), options=replace(OPTIONS, shard_bytes=10 * SHARD_BYTES))


# --- workers that come too late, or disagree ---


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["before it reads", "after it made a shard"])
def test_run_part__stale_worker_after_the_commit_changes_nothing(
    cases: Cases, place: Place, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    case = cases(PACKED)
    after: list[dict[str, bytes]] = []

    def finish_by_another() -> None:
        monkeypatch.setattr(worker_module, "make_part", make_part)
        place.part(case.plan, (1, 1))
        after.append(place.everything())

    def overtaken(*arguments: object) -> object:
        if moment == "before it reads":
            finish_by_another()
        result = make_part(*arguments)  # type: ignore[arg-type]
        if moment != "before it reads":
            finish_by_another()
        return result

    monkeypatch.setattr(worker_module, "make_part", overtaken)
    report = place.part(case.plan, (1, 2))
    assert (report.is_published, report.merge) == (True, None)
    assert [place.everything()] == after
    place.check_made(case)


@pytest.mark.thorough
def test_run_part__tells_of_an_output_that_was_finished_before_its_report(
    cases: Cases, bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may publish after this run looked whether the output is there, and remove the records that it counts."""
    plan = cases(PACKED).plan
    looks_at = vars(parts)["is_snapshot_of"]
    answers: list[bool] = []

    def look(out: Path | Location, digest: str) -> bool:
        answers.append(looks_at(out, digest))
        if len(answers) == 3:  # after this run's part was made
            with monkeypatch.context() as undisturbed:
                undisturbed.setattr(parts, "is_snapshot_of", looks_at)
                bucket.part(plan, (2, 2))
        return answers[-1]

    monkeypatch.setattr(parts, "is_snapshot_of", look)
    report = bucket.part(plan, (1, 2))
    assert answers[:3] == [False] * 3
    assert (report.is_published, report.merge, report.done_shards) == (True, None, report.n_shards)
    assert report.made_shards


def test_run_part__stale_worker_of_a_removed_output_fails(
    cases: Cases, folder: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = cases(PLAIN).plan

    def removed(*arguments: object) -> object:
        result = make_part(*arguments)  # type: ignore[arg-type]
        records_of(folder, plan).rename(tmp_path / "elsewhere")
        return result

    monkeypatch.setattr(worker_module, "make_part", removed)
    with pytest.raises(ConflictError, match="finished or removed by somebody else"):
        folder.part(plan, (1, 2))
    assert folder.everything() == {}


def test_create__takes_a_record_back_that_came_after_the_end(
    cases: Cases, bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends between the worker's look and its request."""
    plan = cases(BUDGETED).plan
    bucket.part(plan, (1, 3))
    folder = parts_folder(BucketFolder(Location.of(bucket.out)), plan.digest)
    create = BucketFolder.create
    late: list[str] = []

    def ended(self: BucketFolder, name: str, content: bytes | Path, digest: str = "") -> bool:
        if name.startswith("done-"):
            folder.delete(JOB_NAME)
            late.append(name)
        return create(self, name, content, digest)

    monkeypatch.setattr(BucketFolder, "create", ended)
    before = set(bucket.files())
    with pytest.raises(ConflictError, match="finished or removed by somebody else"):
        bucket.part(plan, (2, 3))
    assert late
    assert [name for name in set(bucket.files()) - before if "/done-" in name] == []


def records_of(folder: Place, plan: Plan) -> Path:
    return parts_directory(Path(folder.out), plan.digest)


def begun(folder: Place, plan: Plan) -> FolderParts:
    """The place of parts that were begun."""
    job = read_job(records_of(folder, plan))
    assert job is not None
    return FolderParts(Path(folder.out), job)


def test_run_part__other_bytes_of_a_shard_are_refused(cases: Cases, folder: Place, bucket: Place) -> None:
    plan = cases(BUDGETED).plan
    folder.part(plan, (1, 2))
    place = begun(folder, plan)
    for path in records_of(folder, plan).glob("shard-*"):
        path.unlink()
    name = next(name for name in place.names() if name.startswith("done-"))
    place.replace(name, with_other_digests(place.read(name) or b""))
    with pytest.raises(ConflictError, match="another worker made other bytes"):
        folder.part(plan, (1, 2))
    bucket.part(plan, (1, 3))
    objects = BucketFolder(Location.of(bucket.out))
    missing = next(shard.name for shard in bucket.status(plan).shards if shard.state == "open")
    objects.create(missing, b"of somebody else")
    with pytest.raises(ConflictError, match="another worker made other bytes of it"):
        bucket.part(plan, (1, 1))
    assert objects.read(missing, 100) == b"of somebody else"


def with_other_digests(record: bytes) -> bytes:
    """The record of a shard that is done, with other digests of its first tensor."""
    content = json.loads(record)
    entry = content["digests"][0]
    entry["blocks"] = base64.b64encode(bytes(len(base64.b64decode(entry["blocks"])))).decode()
    return json.dumps(content).encode()


@pytest.mark.thorough
@pytest.mark.parametrize("key", [("dare_ties", None, False), PACKED])
def test_run_part__damage_of_any_record_is_refused(cases: Cases, tmp_path: Path, key: Key) -> None:
    """One changed byte, a digit for another digit where there is one, between a part and the end."""
    plan, random = cases(key).plan, Random(15)
    begun = Place(tmp_path / "begun" / "out", tmp_path / "home")
    begun.part(plan, (1, 2))
    names = [path.name for path in sorted(records_of(begun, plan).iterdir()) if not path.name.startswith("shard-")]
    assert {"job.json", "index-1" if key[2] else "content-ids.json"} < set(names)
    for name in names:
        for in_digits in (True, False):
            shutil.copytree(tmp_path / "begun", tmp_path / "copy")
            copy = Place(tmp_path / "copy" / "out", tmp_path / "home")
            record = records_of(copy, plan) / name
            damage(record, random, in_digits=in_digits)
            with pytest.raises(CorruptError) as refused:
                copy.part(plan, (2, 2))
            (problem,) = refused.value.problems
            assert (problem.code, problem.where) == ("work-log.damaged", str(record))
            assert copy.files() == {}
            shutil.rmtree(tmp_path / "copy")


def damage(path: Path, random: Random, *, in_digits: bool) -> None:
    """Change one byte of a file, by choice a digit for another one."""
    content = bytearray(path.read_bytes())
    digits = [at for at, byte in enumerate(content) if byte in b"0123456789"]
    at = random.choice(digits) if in_digits and digits else random.randrange(len(content))
    content[at] = content[at] ^ 1 if content[at] in b"0123456789" else content[at] ^ (1 << random.randrange(8))
    path.write_bytes(content)


def test_run_part__that_another_process_makes_is_busy_under_a_budget(cases: Cases, folder: Place) -> None:
    plan = cases(BUDGETED).plan
    folder.part(plan, (1, 4))
    open_shard = next(n for n, shard in enumerate(folder.status(plan).shards) if shard.state == "open")
    Claimant(begun(folder, plan), "1/1", plan.limit_bytes).claim(open_shard, plan.planned_bytes)
    with pytest.raises(ConflictError, match="is being made by process") as refused:
        folder.part(plan, (1, 1))
    assert {problem.code for problem in refused.value.problems} == {"parts.busy"}
    status = folder.status(plan)
    assert status.shards[open_shard].state == "reading"
    assert status.done_shards == N_SHARDS - 1  # what can be made is made


def test_run_part__again_on_another_machine_takes_the_part_of_the_lost_one(
    cases: Cases, folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is gone without a word: its part can be run again at once, and the report tells what was lost."""
    case = cases(BUDGETED)
    folder.part(case.plan, (1, 2))
    shard = next(n for n, shard in enumerate(folder.status(case.plan).shards) if shard.state == "open")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(records, "this_process", lambda: Owner(1, "1", "another boot", "another machine"))
        claim = Claimant(begun(folder, case.plan), "2/2", case.plan.limit_bytes).claim(shard, 1000)
    assert claim is not None
    with pytest.raises(ConflictError, match="is being made by process 1 on another machine"):
        folder.part(case.plan, (1, 1))
    merge = folder.part(case.plan, (2, 2)).merge
    assert merge is not None
    assert merge.earlier_expert_bytes == 1000
    assert merge.expert_bytes + merge.analysis_bytes == 1000 + case.report.expert_bytes + case.report.analysis_bytes
    folder.check_made(case)


def test_run_part__failed_finish_gives_the_shards_back(
    cases: Cases, folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases(BUDGETED)

    def fail(*_: object, **__: object) -> None:
        raise ConflictError.of("test.failure", folder.out, "fails")

    with monkeypatch.context() as patch:
        patch.setattr("mergepipe.snapshots.staging.Staging.publish", fail)
        with pytest.raises(ConflictError, match="fails"):
            folder.part(case.plan, (1, 1))
    status = folder.status(case.plan)
    assert (status.done_shards, status.is_published) == (N_SHARDS, False)
    assert folder.part(case.plan, None).expert_bytes == 0
    folder.check_made(case)


@pytest.mark.thorough
def test_run_part__killed_within_a_file_goes_on_behind_its_last_unit(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command always ends, under a budget too; what was lost is counted, and nothing else."""
    monkeypatch.setattr(work_log, "UNIT_BYTES", 1)
    monkeypatch.setattr(progress, "READ_AHEAD_BYTES", 0)
    plan, options = cases(BUDGETED).plan, replace(OPTIONS, shard_bytes=None)
    mergepipe.run(plan, tmp_path / "whole", options=options)

    def run(place: Place) -> PartReport:
        return mergepipe.run_part(plan, place.out, (1, 1), options=options)

    places = (Place(tmp_path / str(number) / "out", tmp_path / "home") for number in range(9))
    names = count_operations(partial(run, next(places)))
    unit = len(names) - 1 - names[::-1].index("ftruncate") + 3  # the record of the last one
    whole_bytes = run(next(places)).expert_bytes
    done = names.index("renameat2", unit)  # the record that the shard is done
    for at, is_lost in ((unit - 9, True), (unit + 1, False), (unit + 7, False), (done, False)):
        place = next(places)
        assert run_killed(partial(run, place), at, Death.BEFORE)
        report = run(place)
        assert len(place.everything()) == len(place.files())
        assert made(place.files()) == made(files_below(tmp_path / "whole"))
        assert report.expert_bytes == (whole_bytes if is_lost else 0)
        assert report.merge is not None
        total_bytes = report.merge.expert_bytes + report.merge.analysis_bytes
        assert total_bytes == report.merge.earlier_expert_bytes + report.expert_bytes
        assert 0 < report.merge.earlier_expert_bytes <= whole_bytes


def test_run_part__that_is_strict_does_not_go_beyond_the_budget(cases: Cases, folder: Place) -> None:
    plan, options = cases(BUDGETED).plan, replace(OPTIONS, shard_bytes=None)

    def run(place: Place) -> PartReport:
        return mergepipe.run_part(plan, place.out, (1, 1), strict=True, options=options)

    assert isinstance(folder.out, Path)
    names = count_operations(partial(run, Place(folder.out.parent / "counted" / "out", folder.home)))
    assert run_killed(partial(run, folder), len(names) - 1 - names[::-1].index("ftruncate"), Death.BEFORE)
    with pytest.raises(LimitError, match="all runs would read") as caught:
        run(folder)
    assert caught.value.code == "resume.budget"
    assert mergepipe.run_part(plan, folder.out, (1, 1), options=options).is_published


# --- other outputs at the same place ---


def test_run_part__with_force_replaces_a_snapshot_in_a_folder(cases: Cases, folder: Place, bucket: Place) -> None:
    case, forced = cases(PLAIN), replace(OPTIONS, force=True)
    mergepipe.run(cases(BUDGETED).plan, folder.out, options=OPTIONS)
    before = folder.files()
    with pytest.raises(OutputError, match="already exists"):
        folder.part(case.plan, (1, 2))
    for number in (1, 2):
        assert folder.files() == before
        mergepipe.run_part(case.plan, folder.out, (number, 2), options=forced)
    folder.check_made(case)
    with pytest.raises(RecipeError, match="a snapshot in a bucket is never replaced"):
        mergepipe.run_part(case.plan, bucket.out, (1, 2), options=forced)


def test_run_part__and_a_merge_refuse_the_place_of_each_other(cases: Cases, bucket: Place, tmp_path: Path) -> None:
    plan = cases(BUDGETED).plan
    bucket.part(plan, (1, 3))
    before = bucket.files()
    with pytest.raises(OutputError, match="do not belong to this output"):
        mergepipe.run(cases(PLAIN).plan, bucket.out, options=replace(OPTIONS, home=tmp_path / "home"))
    assert bucket.files() == before
    other = Place(f"{bucket.out}-other", tmp_path / "home")
    with pytest.raises(ConflictError, match="is being made"), ObjectUpload(BucketFolder(Location.of(other.out))):
        other.part(plan, (1, 3))
    assert other.files() == {}


def test_run_part__never_writes_among_objects_of_others(cases: Cases, bucket: Place) -> None:
    plan = cases(PLAIN).plan
    BucketFolder(Location.of(bucket.out)).create("notes.txt", b"mine")
    with pytest.raises(OutputError, match="do not belong to this output"):
        bucket.part(plan, (1, 2))
    assert bucket.files() == {"notes.txt": b"mine"}
    published = Place(f"{bucket.out}-published", bucket.home)
    mergepipe.run(cases(BUDGETED).plan, published.out, options=replace(OPTIONS, home=bucket.home))
    before = published.files()
    with pytest.raises(OutputError, match="never replaced"):
        published.part(plan, (1, 2))
    assert published.files() == before


def test_run_part__into_a_store_that_ignores_conditions_is_refused(
    cases: Cases, bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_conditions(monkeypatch)
    with pytest.raises(UnsupportedError, match="ignores conditional puts"):
        bucket.part(cases(PLAIN).plan, (1, 2))
    assert bucket.files() == {}


# --- what is left behind ---


def let_all_be_older(place: Place) -> None:
    """Of some days more than parts are kept for."""
    assert isinstance(place.out, Path)
    for path in [*place.out.parent.rglob("*"), *place.out.parent.iterdir()]:
        os.utime(path, (time.time() - timedelta(days=8).total_seconds(),) * 2)


def test_gc__removes_parts_that_are_abandoned(cases: Cases, folder: Place) -> None:
    folder.part(cases(PLAIN).plan, (1, 2))
    assert folder.collect() == []  # other parts may come
    let_all_be_older(folder)
    assert folder.collect() == [("parts", True)]
    assert folder.everything() == {}


def test_gc__removes_parts_of_an_output_that_is_published(cases: Cases, folder: Place) -> None:
    case = cases(PLAIN)
    folder.part(case.plan, (1, 2))
    mergepipe.run(case.plan, folder.out, options=OPTIONS)
    assert folder.collect() == [("parts", True)]
    folder.check_made(case)
