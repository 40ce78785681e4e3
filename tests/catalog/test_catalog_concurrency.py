"""Several processes and threads on one catalog: every row arrives."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from catalog_cases import (
    NOON,
    WEIGHTS_NAME,
    fingerprint_of,
    make_checkpoint,
    make_manifest,
    make_statistics,
    same_bits,
)

from mergepipe.catalog.catalog import Catalog
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.storage.location import Location

_SPAWN = multiprocessing.get_context("spawn")
_TENSORS = 25
_WORKERS = 4


def fill(place: Path, worker: int) -> int:
    """Register a common base and an own expert, put statistics of both, record a snapshot."""
    with Catalog.open(place / "home") as catalog:
        base = catalog.register_model(make_existing(place / "base"))
        common = catalog.register_model(make_existing(place / "common"))
        own = catalog.register_model(make_existing(place / f"expert-{worker}"))
        for seed in range(_TENSORS):
            catalog.put_many(own, base, {f"t{seed}": make_statistics(seed)})
            catalog.put_many(common, base, {f"t{seed}": make_statistics(seed)})
            catalog.record_snapshot(make_manifest(f"{worker}-{seed}"), place / f"out-{worker}-{seed}", created=NOON)
    return os.getpid()


def make_existing(directory: Path) -> Checkpoint:
    """The checkpoint over files that are there already: the same in all processes."""
    file = directory / WEIGHTS_NAME
    return Checkpoint(Location.local(directory), Location.local(directory), {}, (fingerprint_of(file),), ())


def expect_everything(place: Path, workers: int) -> None:
    with Catalog.open(place / "home") as catalog:
        assert len(catalog.models()) == workers + 2
        base = catalog.register_model(make_existing(place / "base"))
        for name in ("common", *(f"expert-{worker}" for worker in range(workers))):
            expert = catalog.model_for(make_existing(place / name))
            assert expert is not None
            found = catalog.statistics(expert, base)
            assert len(found) == _TENSORS
            assert all(same_bits(found[f"t{seed}"], make_statistics(seed)) for seed in range(_TENSORS))
        assert len(catalog.snapshots()) == workers * _TENSORS
        catalog.check_integrity()


def prepare(place: Path) -> None:
    for name in ("base", "common", *(f"expert-{worker}" for worker in range(_WORKERS))):
        make_checkpoint(place / name)


def test_catalog__processes_that_start_from_nothing_lose_no_row(tmp_path: Path) -> None:
    prepare(tmp_path)
    with ProcessPoolExecutor(_WORKERS, mp_context=_SPAWN) as pool:
        pids = list(pool.map(fill, [tmp_path] * _WORKERS, range(_WORKERS)))
    assert os.getpid() not in pids
    expect_everything(tmp_path, _WORKERS)


def test_catalog__threads_with_one_catalog_each_lose_no_row(tmp_path: Path) -> None:
    prepare(tmp_path)
    with ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(fill, [tmp_path] * _WORKERS, range(_WORKERS)))
    expect_everything(tmp_path, _WORKERS)


def test_catalog__threads_share_one_catalog(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        base, expert = (catalog.register_model(make_checkpoint(tmp_path / name)) for name in ("base", "expert"))

        def put(seed: int) -> bool:
            done = catalog.put_many(expert, base, {f"t{seed}": make_statistics(seed)})
            return done == 1 and f"t{seed}" in catalog.statistics(expert, base)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(put, range(80)))
        assert len(catalog.statistics(expert, base)) == 80


def put_until_killed(place: Path) -> None:
    with Catalog.open(place / "home") as catalog:
        base, expert = catalog.models()
        for seed in range(1_000_000):
            catalog.put_many(expert, base, {f"{half}{seed}": make_statistics(seed) for half in "ab"})


def test_catalog__a_killed_process_leaves_whole_batches(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        base, expert = (catalog.register_model(make_checkpoint(tmp_path / name)) for name in ("base", "expert"))
        process = _SPAWN.Process(target=put_until_killed, args=(tmp_path,))
        process.start()
        while len(catalog.tensors_on_record(expert, base)) < 40:
            process.join(0.01)
            assert process.is_alive()
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    with Catalog.open(tmp_path / "home") as catalog:
        found = catalog.statistics(expert, base)
        assert {name[1:] for name in found if name[0] == "a"} == {name[1:] for name in found if name[0] == "b"}
        assert len(found) >= 40
        catalog.check_integrity()


def test_catalog__is_not_used_across_a_fork(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        child = os.fork()
        if child == 0:
            try:
                catalog.models()
            except RuntimeError:
                os._exit(17)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        assert catalog.models() == ()
