"""Merges whose output goes to a bucket: the same bytes as a local merge, visible whole or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import obstore
import pytest

import mergepipe
from mergepipe.errors import ConflictError, MergePipeError, OutputError, StorageError, UnsupportedError
from mergepipe.options import MergeOptions, OutputOptions
from mergepipe.reports import MergeReport
from mergepipe.snapshots.object_upload import MARKER_NAME, ObjectUpload
from mergepipe.storage.remote.objects import BucketFolder
from support.bucket_outputs import (
    Requests,
    bucket_folder,
    check_published,
    ignore_conditions,
    new_prefix,
    objects_below,
    watch_buckets,
)
from support.families import FamilyShape, write_family
from support.model_folders import recipe_of
from support.public_names import MANIFEST_NAME
from support.refusals import refuses
from support.s3_server import S3Server

SHAPE = FamilyShape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=300, tied=True)
OTHER_METHODS = ("linear", "task_arithmetic", "ties", "dare_linear", "della", "breadcrumbs", "model_stock")
SHARD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Bench:
    """A family, a bucket, and what its merges give on this machine."""

    folder: Path

    def recipe(self, method: str = "ties") -> Path:
        one, two = (self.folder / f"expert-{n}" for n in (1, 2))
        models = {one: {"weight": 0.6, "density": 0.4}, two: {"weight": 0.5, "density": 0.3}}
        path = self.folder / f"{method}.yml"
        path.write_text(json.dumps(recipe_of(method, models, self.folder / "base", dtype="bfloat16")))
        return path

    def merge(self, out: str | Path, method: str = "ties", budget: str | None = None) -> MergeReport:
        """Merge, under a budget or on this machine with a catalog of its own: what it learns changes plans."""
        home = self.folder / ("home" if isinstance(out, str) and budget is None else f"home-{Path(out).name}")
        select = "norm" if method == "della" else None  # it needs whole rows
        options = MergeOptions(home=home, threads=2, shard_bytes=SHARD_BYTES, select=select)
        return mergepipe.merge(self.recipe(method), out, budget=budget, options=options)

    def local(self, method: str = "ties", budget: str | None = None) -> Path:
        """The same merge on this machine, made once."""
        out = self.folder / f"local-{method}-{budget}"
        if not out.exists():
            self.merge(out, method, budget)
        return out

    def staged(self) -> list[Path]:
        """What is left on this machine of outputs for buckets."""
        return [path for path in self.folder.glob("home*/uploads/**/*") if path.is_file()]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("family")
    write_family(folder, SHAPE, 2)
    return Bench(folder)


@pytest.fixture
def out(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that nothing lies under."""
    return new_prefix(server, monkeypatch)


# --- whole outputs ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "budget"),
    [
        ("ties", None),
        ("dare_ties", "60%"),  # it holds the samples that key randomness too
        *(pytest.param(method, "60%", marks=pytest.mark.slow) for method in OTHER_METHODS),
    ],
)
def test_merge__into_a_bucket_is_the_local_merge(bench: Bench, out: str, method: str, budget: str | None) -> None:
    local = bench.local(method, budget)
    report = bench.merge(out, method, budget)
    check_published(objects_below(out), local)
    assert str(report.out) == out
    assert report.budget_bytes is None or report.expert_bytes + report.analysis_bytes <= report.budget_bytes
    assert bench.staged() == []


def test_merge__puts_objects_in_an_order_that_shows_nothing_early(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = watch_buckets(monkeypatch)
    bench.merge(out)
    created = [name for name in requests.made("create") if not name.startswith(".mergepipe")]
    shards = [name for name in created if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert created[: len(shards)] == sorted(shards)
    assert created[-3:] == ["config.json", "model.safetensors.index.json", MANIFEST_NAME]


def test_verify__reads_a_snapshot_in_a_bucket(bench: Bench, out: str) -> None:
    bench.merge(out)
    options = OutputOptions(home=bench.folder / "home", threads=2)
    report = mergepipe.verify(out, options=options)
    assert (report.is_sound, report.notices) == (True, ())
    folder = bucket_folder(out)
    name = next(name for name in folder.list_all() if name.endswith(".safetensors"))
    content = bytearray(folder.read(name, 1 << 30) or b"")
    content[-1] ^= 1
    folder.overwrite(name, bytes(content))
    damaged = mergepipe.verify(out, options=options)
    assert [(damage.kind, damage.file) for damage in damaged.damages] == [("block", name)]


# --- outputs that were interrupted ---


def kill_at(requests: Requests, number: int, *, after: bool) -> None:
    requests.changes.clear()
    requests.fails_at, requests.after, requests.is_dead = number, after, False


def revive(requests: Requests) -> None:
    requests.changes.clear()
    requests.fails_at, requests.is_dead = None, False


def test_merge__that_failed_uploads_only_what_is_missing(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = watch_buckets(monkeypatch)
    full = bench.merge(f"{out}-whole")
    shards = [n for n, (_, key) in enumerate(requests.changes) if key.endswith("f.safetensors") or "-of-" in key]
    kill_at(requests, shards[2], after=False)
    requests.error = lambda: StorageError.of("storage.unavailable", out, "the store is away", "run again")
    with pytest.raises(StorageError, match="away"):
        bench.merge(out)
    assert MANIFEST_NAME not in objects_below(out)
    there = [name for name in objects_below(out) if name.endswith(".safetensors")]
    assert len(there) == 2
    revive(requests)
    resumed = bench.merge(out)
    assert not set(there) & set(requests.made("create") + requests.made("overwrite"))
    assert any("resumed" in notice for notice in resumed.notices)
    assert resumed.expert_bytes == full.expert_bytes
    check_published(objects_below(out), bench.local())


def test_merge__whose_uploaded_shard_was_deleted_makes_it_again(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = watch_buckets(monkeypatch)
    requests.error = lambda: StorageError.of("storage.unavailable", out, "the store is away", "run again")
    kill_at(requests, 7, after=False)
    with pytest.raises(StorageError):
        bench.merge(out)
    revive(requests)
    folder = bucket_folder(out)
    folder.delete(next(name for name in folder.list_all() if name.endswith(".safetensors")))
    bench.merge(out)
    check_published(objects_below(out), bench.local())


# --- several writers ---


def test_merge__of_two_into_one_prefix_publishes_one_whole(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands claim it at once."""
    local = {method: bench.local(method) for method in ("ties", "linear")}
    both, create = threading.Barrier(2), BucketFolder.create

    def create_at_once(folder: BucketFolder, name: str, content: bytes | Path, digest: str = "") -> bool:
        if name == MARKER_NAME:
            both.wait(60)
        return create(folder, name, content, digest)

    monkeypatch.setattr(BucketFolder, "create", create_at_once)
    homes = {method: MergeOptions(home=bench.folder / f"home-{method}", shard_bytes=SHARD_BYTES)
             for method in local}  # fmt: skip
    with ThreadPoolExecutor(2) as threads:
        merges = {m: threads.submit(mergepipe.merge, bench.recipe(m), out, options=homes[m]) for m in local}
    errors = {method: error for method, merge in merges.items() if (error := merge.exception()) is not None}
    (loser,) = errors.values()
    assert isinstance(loser, MergePipeError)
    assert loser.code in ("output.busy", "output.exists")
    (winner,) = local.keys() - errors
    check_published(objects_below(out), local[winner])


def conflict_once(_: BucketFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 409 to a conditional put beside another request for the key: it says that nothing was written."""
    put, conflicts = obstore.put, [OSError("Generic S3 error: status code: 409 Conflict")]

    def put_beside(store: object, key: str, *arguments: object, **options: object) -> object:
        if key.endswith(MANIFEST_NAME) and conflicts:
            raise conflicts.pop()
        return put(store, key, *arguments, **options)

    monkeypatch.setattr(obstore, "put", put_beside)


def take_over(folder: BucketFolder, _: pytest.MonkeyPatch) -> None:
    folder.delete("config.json")
    folder.delete(MARKER_NAME)
    with ObjectUpload(folder) as second:
        second.send("config.json", b"{}", "digest")
        second.commit(b"theirs", {"config.json": 2})


RACES: dict[str, tuple[Callable[[BucketFolder, pytest.MonkeyPatch], object], str, bytes]] = {
    "a conflict of no other": (conflict_once, "", b"ours"),
    "the answer was lost": (lambda folder, _: folder.create(MANIFEST_NAME, b"ours"), "", b"ours"),
    "the prefix was taken over": (take_over, "output.changed", b"theirs"),
    "another was first": (lambda folder, _: folder.create(MANIFEST_NAME, b"theirs"), "output.changed", b"theirs"),
    "an object is missing": (lambda folder, _: folder.delete("config.json"), "output.incomplete", b""),
}


@pytest.mark.thorough
@pytest.mark.parametrize("race", RACES)
def test_upload__publishes_its_record_or_nothing(out: str, race: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile, code, record = RACES[race]
    folder = bucket_folder(out)
    with ObjectUpload(folder) as upload:
        upload.send("config.json", b"{}", "digest")
        meanwhile(folder, monkeypatch)
        with refuses((ConflictError, StorageError), code) if code else nullcontext():
            upload.commit(b"ours", {"config.json": 2})
    assert objects_below(out).get(MANIFEST_NAME, b"") == record
    assert code or objects_below(out).keys() == {MANIFEST_NAME, "config.json"}


def test_merge__into_a_store_that_ignores_conditions_is_refused(
    bench: Bench, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_conditions(monkeypatch)
    with refuses(UnsupportedError, "output.unsupported"):
        bench.merge(out)
    assert objects_below(out) == {}


# --- refusals ---


def test_merge__never_writes_among_objects_of_others(bench: Bench, out: str) -> None:
    folder = bucket_folder(out)
    folder.create("notes.txt", b"mine")
    with refuses(OutputError, "output.not-ours"):
        bench.merge(out)
    assert objects_below(out) == {"notes.txt": b"mine"}
    folder.create(MANIFEST_NAME, json.dumps({}).encode())
    with refuses(OutputError, "output.exists"):
        bench.merge(out)
