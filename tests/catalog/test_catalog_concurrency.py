"""Several processes and threads on one catalog: every row arrives."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from catalog_cases import NOON, WEIGHTS_NAME, fingerprint_of, make_checkpoint, make_manifest

from mergepipe.catalog.catalog import Catalog
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.storage.location import Location

_SPAWN = multiprocessing.get_context("spawn")
_SNAPSHOTS = 25
_WORKERS = 4


def fill(place: Path, worker: int) -> int:
    """Record digests of a common base and of an own expert, and snapshots."""
    with Catalog.open(place / "home") as catalog:
        for seed in range(_SNAPSHOTS):
            for name in ("base", f"expert-{worker}"):
                catalog.record_digests(with_digests(make_existing(place / name), {WEIGHTS_NAME: "ab" * 32}))
            catalog.record_snapshot(make_manifest(f"{worker}-{seed}"), place / f"out-{worker}-{seed}", created=NOON)
    return os.getpid()


def make_existing(directory: Path) -> Checkpoint:
    """The checkpoint over files that are there already: the same in all processes."""
    file = directory / WEIGHTS_NAME
    return Checkpoint(Location.local(directory), Location.local(directory), {}, (fingerprint_of(file),), ())


def expect_everything(place: Path, workers: int) -> None:
    with Catalog.open(place / "home") as catalog:
        for name in ("base", *(f"expert-{worker}" for worker in range(workers))):
            assert catalog.with_known_digests(make_existing(place / name)).files[0].sha256 == "ab" * 32
        assert len(catalog.snapshots()) == workers * _SNAPSHOTS
        catalog.check_integrity()


def prepare(place: Path) -> None:
    for name in ("base", *(f"expert-{worker}" for worker in range(_WORKERS))):
        make_checkpoint(place / name)


def test_catalog__processes_that_start_from_nothing_lose_no_row(tmp_path: Path) -> None:
    prepare(tmp_path)
    with ProcessPoolExecutor(_WORKERS, mp_context=_SPAWN) as pool:
        pids = list(pool.map(fill, [tmp_path] * _WORKERS, range(_WORKERS)))
    assert os.getpid() not in pids
    expect_everything(tmp_path, _WORKERS)


def test_catalog__threads_share_one_catalog(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:

        def record(seed: int) -> bool:
            row = catalog.record_snapshot(make_manifest(f"{seed}"), tmp_path / f"out-{seed}", created=NOON)
            return catalog.snapshot(tmp_path / f"out-{seed}") == row

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(record, range(80)))
        assert len(catalog.snapshots()) == 80


def record_until_killed(place: Path) -> None:
    with Catalog.open(place / "home") as catalog:
        for seed in range(1_000_000):
            catalog.record_snapshot(
                make_manifest(f"{seed}", (place / "base", place / "expert")), place / f"out-{seed}", created=NOON
            )


def test_catalog__a_killed_process_leaves_whole_snapshots(tmp_path: Path) -> None:
    for name in ("base", "expert"):
        make_checkpoint(tmp_path / name)
    with Catalog.open(tmp_path / "home") as catalog:
        process = _SPAWN.Process(target=record_until_killed, args=(tmp_path,))
        process.start()
        while len(catalog.snapshots()) < 40:
            process.join(0.01)
            assert process.is_alive()
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    with Catalog.open(tmp_path / "home") as catalog:
        assert {len(row.inputs) for row in catalog.snapshots()} == {2}
        catalog.check_integrity()


def test_catalog__is_not_used_across_a_fork(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        child = os.fork()
        if child == 0:
            try:
                catalog.snapshots()
            except RuntimeError:
                os._exit(17)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        assert catalog.snapshots() == ()
