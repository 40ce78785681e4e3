"""The contract by which parts of an output are kept: the same in a folder and in a bucket."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergepipe.errors import ConflictError, CorruptError
from mergepipe.snapshots.parts import JOB_NAME, Claim, Claimant, PartsJob, PartsPlace
from mergepipe.snapshots.parts_places import job_at, parts_place, plan_digests_at
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.work_log import usage_of
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import Location
from mergepipe.storage.remote.objects import BucketFolder
from support.bucket_outputs import new_prefix
from support.s3_server import S3Server

CONTENT = b"the bytes of a shard"
JOB = PartsJob("out", "1", "0" * 32, (("a.safetensors", len(CONTENT)), ("b.safetensors", 9)))
DIGESTS, OTHERS = ((TensorDigest("t", (one * 16,)),) for one in (b"x", b"y"))

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


@pytest.mark.thorough
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
