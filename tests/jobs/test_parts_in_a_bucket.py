"""Parts of a plan whose output lies in a bucket: the objects of one machine's merge, whoever makes which part.

At the end the contract by which parts are kept, in a folder and in a bucket: its tests run over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mergepipe
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
from mergepipe.options import MergeOptions, OutputOptions, PlanOptions
from mergepipe.planning.plan import Plan, parse_plan
from mergepipe.reports import Garbage, PartReport
from mergepipe.runs import parts as worker_module
from mergepipe.snapshots import parts as records
from mergepipe.snapshots import parts_places
from mergepipe.snapshots.manifest import MANIFEST_NAME, parse_manifest
from mergepipe.snapshots.object_upload import JobUpload, ObjectUpload
from mergepipe.snapshots.parts import (
    JOB_NAME,
    Claim,
    Claimant,
    MadeShard,
    PartsJob,
    PartsPlace,
)
from mergepipe.snapshots.parts_places import job_at, parts_folder, parts_place, plan_digests_at
from mergepipe.snapshots.work_log import usage_of, uses_of
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import Location
from mergepipe.storage.owner import Owner
from mergepipe.storage.remote.bucket_folder import BucketFolder
from mergepipe.storage.remote.objects import BucketWriter
from support.bucket_outputs import (
    Killed,
    Requests,
    bucket_server,
    files_below,
    new_prefix,
    objects_below,
    watch_buckets,
)
from support.families import FamilyShape, write_family
from support.s3_server import S3Server
from support.slow_cases import slow_unless

pytestmark = pytest.mark.usefixtures("exact_reads")

SHAPE = FamilyShape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=300, tied=True)
RECIPE = """merge_method: {method}
base_model: {root}/base
models:
  - {{model: {root}/{prefix}expert-1, parameters: {{weight: 0.6, density: 0.4}}}}
  - {{model: {root}/{prefix}expert-2, parameters: {{weight: 0.5, density: 0.3}}}}
dtype: bfloat16
"""
SHARD_BYTES = 64 << 10
METHODS = ("linear", "task_arithmetic", "ties", "dare_ties", "della", "breadcrumbs", "model_stock", "sce")
FAST = [("ties", "40%", False), ("dare_ties", None, True)]
ALL = [(method, budget, is_packed) for method in METHODS for budget in (None, "60%") for is_packed in (False, True)]
Key = tuple[str, str | None, bool]


@dataclass(frozen=True, slots=True)
class Bench:
    """A family, its packed experts, and what one machine makes of plans for them."""

    folder: Path

    @property
    def options(self) -> OutputOptions:
        return OutputOptions(home=self.folder / "home", catalog=False, threads=2)

    def plan(self, key: Key) -> Plan:
        method, budget, is_packed = key
        path = self.folder / f"{method}-{is_packed}.yml"
        path.write_text(RECIPE.format(root=self.folder, method=method, prefix="packed/" if is_packed else ""))
        return mergepipe.plan(
            path, budget, everything=budget is None, home=self.folder / "plans",
            options=PlanOptions(block_elements=16384, select="norm" if method == "della" else None),
        )  # fmt: skip

    def local(self, key: Key) -> tuple[Plan, Path]:
        """A plan, and the output of one machine, made once."""
        out = self.folder / f"local-{'-'.join(map(str, key))}"
        stored = out.with_suffix(".json")
        if not out.exists():
            plan = self.plan(key)
            stored.write_bytes(plan.to_json())
            mergepipe.run(plan, out, options=replace(self.options, shard_bytes=SHARD_BYTES))
        return parse_plan(stored.read_bytes()), out

    def part(self, plan: Plan, out: str, part: tuple[int, int] | None) -> PartReport:
        return mergepipe.run_part(plan, out, part, options=replace(self.options, shard_bytes=SHARD_BYTES))

    def staged(self) -> list[Path]:
        """What is left on this machine of outputs for buckets."""
        return list((self.folder / "home").glob("uploads/.*"))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with bucket_server() as server:
        yield server


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("family")
    write_family(folder, SHAPE, 2)
    mergepipe.pack(folder / "base", [folder / "expert-1", folder / "expert-2"], folder / "packed")
    return Bench(folder)


@pytest.fixture
def out(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that nothing lies under."""
    return new_prefix(server, monkeypatch)


def assert_same(out: str, local: Path) -> None:
    """All that lies there is the snapshot of one machine, to the byte but for the facts of the run."""
    remote, wanted = objects_below(out), files_below(local)
    assert remote.keys() == wanted.keys()
    assert [name for name in wanted if remote[name] != wanted[name] and name != MANIFEST_NAME] == []
    ours, theirs = (parse_manifest(files[MANIFEST_NAME]) for files in (remote, wanted))
    assert (ours.sid, ours.files, ours.tensors) == (theirs.sid, theirs.files, theirs.tensors)
    assert ours.realized.expert == theirs.realized.expert


def check_in_parts(bench: Bench, out: str, key: Key, n_parts: int, random: Random) -> None:
    """Make all parts in some order, two of them twice; what is there then is the output of one machine."""
    plan, local = bench.local(key)
    order = [*range(1, n_parts + 1), *random.choices(range(1, n_parts + 1), k=2)]
    random.shuffle(order)
    reports = [bench.part(plan, out, (number, n_parts)) for number in order]
    assert sum(report.merge is not None for report in reports) == 1
    assert_same(out, local)
    assert bench.staged() == []


@pytest.mark.parametrize("key", FAST)
def test_run_part__into_a_bucket_makes_what_one_machine_makes(bench: Bench, out: str, key: Key) -> None:
    check_in_parts(bench, out, key, 3, Random(3))


@pytest.mark.slow
@pytest.mark.parametrize("key", ALL)
def test_run_part__into_a_bucket_by_every_method(bench: Bench, out: str, key: Key) -> None:
    for n_parts in range(1, 8):
        check_in_parts(bench, f"{out}-{n_parts}", key, n_parts, Random(n_parts))


def test_run_part__of_racing_workers_makes_one_output(bench: Bench, out: str) -> None:
    plan, local = bench.local(FAST[1])
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda _: bench.part(plan, out, (1, 1)), range(3)))
    assert sum(report.merge is not None for report in reports) == 1
    assert remote_weights(out) == {name: c for name, c in files_below(local).items() if name.endswith(".safetensors")}
    assert parts_of(out) == []
    assert bench.staged() == []


def test_run_part__tells_of_an_output_that_was_finished_before_its_report(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may publish after this run looked whether the output is there, and remove the records that it counts."""
    plan, _ = bench.local(FAST[1])
    looks_at = parts._PartRun.is_published
    answers: list[bool] = []

    def look(run: parts._PartRun) -> bool:
        answers.append(looks_at(run))
        if len(answers) == 3:  # after this run's part was made
            with monkeypatch.context() as undisturbed:
                undisturbed.setattr(parts._PartRun, "is_published", looks_at)
                bench.part(plan, out, (2, 2))
        return answers[-1]

    monkeypatch.setattr(parts._PartRun, "is_published", look)
    report = bench.part(plan, out, (1, 2))
    assert answers[:3] == [False] * 3
    assert (report.is_published, report.merge, report.done_shards) == (True, None, report.n_shards)
    assert report.made_shards


def remote_weights(out: str) -> dict[str, bytes]:
    return {name: content for name, content in objects_below(out).items() if name.endswith(".safetensors")}


def parts_of(out: str) -> list[str]:
    """The records of parts that lie at a place."""
    return [name for name in BucketFolder(Location.parse(out)).list_all() if "mergepipe-parts" in name]


def test_run_part__finishes_when_it_is_asked_to(bench: Bench, out: str) -> None:
    plan, local = bench.local(FAST[0])
    with pytest.raises(NotFoundError, match="no part of it is made"):
        bench.part(plan, out, None)
    bench.part(plan, out, (1, 2))
    status = mergepipe.parts_status(plan, out, n_parts=2)
    assert (status.is_published, status.missing_parts, str(status.out)) == (False, (2,), out)
    with pytest.raises(NotFoundError, match="shards are not made"):
        bench.part(plan, out, None)
    assert MANIFEST_NAME not in objects_below(out)
    bench.part(plan, out, (2, 2))
    assert mergepipe.parts_status(plan, out, n_parts=2).is_published
    assert bench.part(plan, out, None).is_published
    assert_same(out, local)


# --- workers that come too late, or die ---


@pytest.mark.parametrize("moment", ["before it reads", "after it made a shard"])
def test_run_part__stale_worker_after_the_commit_changes_nothing(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    plan, _ = bench.local(FAST[1])
    after: list[dict[str, bytes]] = []

    def finish_by_another() -> None:
        monkeypatch.setattr(worker_module, "make_part", make_part)
        bench.part(plan, out, (1, 1))
        after.append(objects_below(out))

    def overtaken(*arguments: object) -> object:
        if moment == "before it reads":
            finish_by_another()
        result = make_part(*arguments)  # type: ignore[arg-type]
        if moment != "before it reads":
            finish_by_another()
        return result

    monkeypatch.setattr(worker_module, "make_part", overtaken)
    report = bench.part(plan, out, (1, 2))
    assert (report.is_published, report.merge) == (True, None)
    assert [objects_below(out)] == after
    assert bench.staged() == []


def test_create__takes_a_record_back_that_came_after_the_end(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends between the worker's look and its request."""
    plan, _ = bench.local(FAST[0])
    bench.part(plan, out, (1, 3))
    place = parts_folder(BucketFolder(Location.parse(out)), plan.digest)
    create = BucketWriter.create
    late: list[str] = []

    def ended(self: BucketWriter, key: str, content: bytes | Path, digest: str) -> None:
        if "/done-" in key:
            place.delete(JOB_NAME)
            late.append(key)
        create(self, key, content, digest)

    monkeypatch.setattr(BucketWriter, "create", ended)
    before = set(objects_below(out))
    with pytest.raises(ConflictError, match="finished or removed by somebody else"):
        bench.part(plan, out, (2, 3))
    added = {name.rpartition("/")[2] for name in set(objects_below(out)) - before}
    assert late
    assert [name for name in added if name.startswith("done-")] == []


def kill_at(requests: Requests, number: int | None, *, after: bool = False) -> None:
    requests.changes.clear()
    requests.fails_at, requests.after, requests.is_dead = number, after, False


def check_killed_at(bench: Bench, out: str, requests: Requests, number: int, *, after: bool) -> None:
    """Kill the only worker at one of its requests; another completes the output, or `gc` clears what is left."""
    plan, local = bench.local(("dare_ties", None, True))
    kill_at(requests, number, after=after)
    with pytest.raises(Killed):
        bench.part(plan, out, (1, 1))
    kill_at(requests, None)
    was_published = MANIFEST_NAME in objects_below(out)
    report = bench.part(plan, out, (1, 1))
    assert report.is_published
    assert (report.merge is None) == was_published
    mergepipe.gc([out], home=bench.folder / "no-home")
    remote, wanted = objects_below(out), files_below(local)
    assert remote.keys() == wanted.keys()
    assert remote_weights(out) == {name: c for name, c in wanted.items() if name.endswith(".safetensors")}
    mergepipe.verify(out, options=bench.options)


@pytest.mark.parametrize(
    ("name", "after"),
    slow_unless(
        lambda case: case[1],
        [("00002-of", True), ("done-00001", False), ("config.json", False), (MANIFEST_NAME, True)],
    ),
)
def test_run_part__killed_worker_leaves_all_or_nothing(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    requests = watch_buckets(monkeypatch)
    bench.part(bench.local(("dare_ties", None, True))[0], f"{out}-whole", (1, 1))
    number = next(n for n, (kind, key) in enumerate(requests.changes) if kind == "create" and name in key)
    check_killed_at(bench, out, requests, number, after=after)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_run_part__killed_at_any_request_leaves_all_or_nothing(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr(worker_module, "FACTS_SECONDS", 0.5)  # the killed worker seems to live on: it is this process
    requests = watch_buckets(monkeypatch)
    bench.part(bench.local(("dare_ties", None, True))[0], f"{out}-whole", (1, 1))
    n_requests = len(requests.changes)
    assert n_requests > 30
    for number in range(n_requests):
        check_killed_at(bench, f"{out}-{number}", requests, number, after=after)


def test_run_part__other_bytes_of_a_shard_are_refused(bench: Bench, out: str) -> None:
    plan, _ = bench.local(FAST[0])
    bench.part(plan, out, (1, 3))
    folder = BucketFolder(Location.parse(out))
    missing = next(s.name for s in mergepipe.parts_status(plan, out).shards if s.state == "open")
    folder.create(missing, b"of somebody else")
    with pytest.raises(ConflictError, match="another worker made other bytes of it"):
        bench.part(plan, out, (1, 1))
    assert folder.read(missing, 100) == b"of somebody else"


# --- other outputs at the same place ---


def test_run_part__and_a_merge_refuse_the_place_of_each_other(bench: Bench, out: str) -> None:
    plan, _ = bench.local(FAST[0])
    recipe = bench.folder / "ties-False.yml"
    bench.part(plan, out, (1, 3))
    before = objects_below(out)
    with pytest.raises(OutputError, match="no unfinished output"):
        mergepipe.merge(recipe, out, options=MergeOptions(home=bench.folder / "home", catalog=False))
    assert objects_below(out) == before
    other = BucketFolder(Location.parse(f"{out}-other"))
    with pytest.raises(ConflictError, match="makes an output"), ObjectUpload(other):
        bench.part(plan, f"{out}-other", (1, 3))
    assert objects_below(f"{out}-other") == {}


def test_run_part__never_writes_among_objects_of_others(bench: Bench, out: str) -> None:
    plan, local = bench.plan(("linear", None, False)), bench.local(FAST[0])[1]
    content = (local / MANIFEST_NAME).read_bytes()
    for name, message in (("notes.txt", "not of this job"), (MANIFEST_NAME, "never replaced")):
        place = f"{out}-{name}"
        BucketFolder(Location.parse(place)).create(name, content)
        with pytest.raises(OutputError, match=message):
            bench.part(plan, place, (1, 2))
        assert list(objects_below(place)) == [name]
    with pytest.raises(RecipeError, match="a snapshot in a bucket is never replaced"):
        mergepipe.run_part(plan, out, (1, 2), options=replace(bench.options, force=True))


def test_run_part__into_a_store_that_ignores_conditions_is_refused(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BucketWriter, "create", BucketWriter.overwrite)
    with pytest.raises(UnsupportedError, match="ignores conditional puts"):
        bench.part(bench.local(FAST[0])[0], out, (1, 2))
    assert objects_below(out) == {}


# --- what is left behind ---


def later(monkeypatch: pytest.MonkeyPatch, age: timedelta) -> None:
    """Let all objects be older."""
    monkeypatch.setattr(parts_places, "age_seconds", lambda *_: age.total_seconds())


def test_gc__removes_parts_that_are_abandoned(bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, local = bench.local(FAST[0])
    bench.part(plan, out, (1, 2))
    other = f"{out}-other/below"
    mergepipe.run(plan, other, options=replace(bench.options, shard_bytes=SHARD_BYTES))

    def collect() -> tuple[Garbage, ...]:
        return mergepipe.gc([out, f"{out}-other"], home=bench.folder / "none").garbage

    assert collect() == ()
    later(monkeypatch, timedelta(days=8))
    (garbage,) = collect()
    assert (garbage.kind, garbage.what, garbage.is_removed) == ("parts", out, True)
    assert objects_below(out) == {}
    assert_same(other, local)


def test_gc__leaves_the_parts_of_an_output_that_is_being_finished(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = bench.local(FAST[0])
    bench.part(plan, out, (1, 2))
    later(monkeypatch, timedelta(days=8))
    shards = remote_weights(out)
    with JobUpload(BucketFolder(Location.parse(out))):
        assert mergepipe.gc([out], home=bench.folder / "none").garbage == ()
        assert remote_weights(out) == shards
        with pytest.raises(NotFoundError, match="no part of it is made"):
            bench.part(plan, out, None)


def test_gc__removes_records_of_a_published_output_only(bench: Bench, out: str) -> None:
    plan, local = bench.local(FAST[0])
    bench.part(plan, out, (1, 1))
    folder = BucketFolder(Location.parse(out))
    parts_folder(folder, plan.digest).create("done-00001.json", b"a worker was killed as it wrote this")
    garbage = mergepipe.gc(["s3://bucket"], home=bench.folder / "none", dry_run=True).garbage
    assert [entry.is_removed for entry in garbage if entry.what == out] == [False]
    mergepipe.gc([out], home=bench.folder / "none")
    assert_same(out, local)


# --- the contract of a place: the same in a folder and in a bucket ---

CONTENT = b"the bytes of a shard"
JOB = PartsJob("out", "1", "0" * 32, (("a.safetensors", len(CONTENT)), ("b.safetensors", 9)))
DIGESTS, OTHERS = (MadeShard(0, (), (("t", (one * 16,)),)).digests for one in (b"x", b"y"))
ELSEWHERE = Owner(1, "1", "another boot", "another machine")

NewPlace = Callable[[PartsJob], PartsPlace]


@pytest.fixture(params=["folder", "bucket"])
def new_place(
    request: pytest.FixtureRequest, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> NewPlace:
    """Makes an empty place of a job, wherever."""
    numbers = iter(range(1 << 20))

    def make(job: PartsJob) -> PartsPlace:
        out: Path | Location = tmp_path / str(next(numbers)) / "out"
        if request.param == "bucket":
            out = Location.parse(new_prefix(server, monkeypatch))
        place = parts_place(out, job, tmp_path / "work")
        place.open()
        return place

    return make


@pytest.fixture
def place(new_place: NewPlace) -> PartsPlace:
    return new_place(JOB)


def spent(nbytes: int) -> Usage:
    """Usage of so many expert bytes."""
    return usage_of((("expert", Purpose.EXPERT, nbytes),))


def claimed(place: PartsPlace, shard: int = 0, share_bytes: int = 10) -> Claim:
    claim = Claimant(place, "1/2").claim(shard, share_bytes)
    assert claim is not None
    return claim


def made_file(folder: Path) -> Path:
    file = folder / "made"
    file.write_bytes(CONTENT)
    return file


def test_place__is_found_by_the_digest_of_its_plan(place: PartsPlace) -> None:
    assert plan_digests_at(place.out) == (JOB.plan_digest,)
    assert job_at(place.out, JOB.plan_digest) == JOB
    assert job_at(place.out, "1" * 32) is None


def test_open__of_another_job_is_refused(place: PartsPlace, tmp_path: Path) -> None:
    other = parts_place(place.out, PartsJob("out", "2", JOB.plan_digest, JOB.shards), tmp_path / "work")
    with pytest.raises(ConflictError, match="made as version 1, this is 2"):
        other.open()
    place.open()


def test_create__of_racing_writers_one_is_first(place: PartsPlace) -> None:
    with ThreadPoolExecutor(8) as pool:
        firsts = list(pool.map(lambda n: place.create("record", str(n).encode()), range(16)))
    assert sum(firsts) == 1
    assert place.read("record") == str(firsts.index(True)).encode()
    place.replace("record", b"later")
    assert place.read("record") == b"later"
    assert place.read("nothing") is None
    assert place.names() == (JOB_NAME, "record")


def test_read__of_a_record_under_another_name_is_refused(place: PartsPlace) -> None:
    place.create("one", b"content")
    place.write_new("two", place.read_raw("one", 100) or b"")
    with pytest.raises(CorruptError, match="its checksum does not fit"):
        place.read("two")


def test_add__keeps_a_shard_once(place: PartsPlace, tmp_path: Path) -> None:
    first, second = claimed(place), claimed(place)
    assert place.done(0) is None
    place.add(first, made_file(tmp_path), DIGESTS, spent(7))
    place.add(second, made_file(tmp_path), DIGESTS, spent(9))
    assert place.done(0) == DIGESTS
    assert place.recorded_shards() == {0}
    assert [claim.expert_bytes for claim in place.claims_of(0)] == [7, 9]
    with pytest.raises(ConflictError, match="another worker made other bytes of 't'"):
        place.add(claimed(place), made_file(tmp_path), OTHERS, spent(1))
    assert place.done(0) == DIGESTS


def test_remove__ends_the_work_of_all(place: PartsPlace, tmp_path: Path) -> None:
    claim = claimed(place)
    place.remove()
    assert not place.exists
    for late in (
        lambda: place.create("late", b""),
        lambda: place.replace(claim.name, b""),
        lambda: place.add(claim, made_file(tmp_path), DIGESTS, spent(1)),
    ):
        with pytest.raises(ConflictError, match="finished or removed by somebody else"), place.used():
            late()
    assert not place.exists
    if isinstance(place.out, Location):
        assert BucketFolder(place.out).list_all() == {}


# --- claims: who reads for which shard, and how much it was ---


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=5),
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=4), min_size=2, max_size=3),
)
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_account__tells_what_racing_workers_read(
    new_place: NewPlace, shares: list[int], orders: list[list[tuple[int, bool]]]
) -> None:
    """Each worker reads shards in an order of its own, all of its share or until it is killed."""
    place = new_place(PartsJob("out", "1", "0" * 32, tuple((f"s{n}", 1) for n in range(len(shares)))))

    def work(order: list[tuple[int, bool]]) -> int:
        read_bytes = 0
        for number, is_killed in order:
            shard = number % len(shares)
            claim = claimed(place, shard, shares[shard])
            read_bytes += shares[shard]
            if not is_killed:
                place.spend(claim, spent(shares[shard]))
        return read_bytes

    with ThreadPoolExecutor(len(orders)) as pool:
        read_bytes = sum(pool.map(work, orders))
    account = place.account()
    assert account.expert_bytes == read_bytes
    for shard in range(len(shares)):
        assert [claim.attempt for claim in account.of(shard)] == list(range(len(account.of(shard))))


def test_claim__of_racing_workers_under_a_budget_one_reads(place: PartsPlace) -> None:
    claimant = Claimant(place, "1/1", limit_bytes=100)
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: claimant.claim(0, 10), range(16)))
    assert sum(claim is not None for claim in claims) == 1


def test_claim__of_another_machine_is_taken_by_who_runs_the_same_part(
    place: PartsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(records, "this_process", lambda: ELSEWHERE)
        assert Claimant(place, "2/2", limit_bytes=100).claim(0, 10) is not None
    assert Claimant(place, "1/2", limit_bytes=100).claim(0, 10) is None
    again = Claimant(place, "2/2", limit_bytes=100).claim(0, 10)
    assert again is not None
    assert again.attempt == 1
    assert (place.account().expert_bytes, place.account().repeated_bytes) == (20, 10)


def test_claim__that_continues_another_counts_it_once(place: PartsPlace, tmp_path: Path) -> None:
    """The killed attempt had read 4 of its 10 bytes by the log of its work, and 3 of those were lost."""
    claimed(place, share_bytes=10)
    claim = Claimant(place, "1/2").claim(0, 9, continues=0, earlier_bytes=4)
    assert claim is not None
    account = place.account()
    assert (account.expert_bytes, account.unfinished_bytes, account.repeated_bytes) == (13, 13, 4)
    assert account.total_bytes(30) == 33
    place.add(claim, made_file(tmp_path), DIGESTS, spent(12))
    account = place.account()
    assert (account.expert_bytes, account.unfinished_bytes, account.repeated_bytes) == (12, 0, 4)
    assert (account.total_bytes(30), account.n_attempts) == (32, 2)


def test_claim__of_a_strict_worker_never_goes_beyond_the_budget(
    place: PartsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(records, "this_process", lambda: ELSEWHERE)
        Claimant(place, "1/2", limit_bytes=35).claim(0, 10)
    strict = Claimant(place, "1/2", limit_bytes=35, planned_bytes=30, is_strict=True)
    with pytest.raises(LimitError, match="40 bytes would be read over all runs, 35 is the budget"):
        strict.claim(0, 10)
    assert len(place.claims_of(0)) == 1
    assert strict.claim(1, 20) is not None
    assert strict.claim(0, 6, continues=0, earlier_bytes=9) is not None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(Purpose), st.integers(1, 1 << 40)), max_size=9))
def test_usage_of__is_undone_by_uses_of(uses: list[tuple[str, Purpose, int]]) -> None:
    usage = Usage()
    for use in uses:
        usage += usage_of((use,))
    assert usage_of(uses_of(usage)) == usage
