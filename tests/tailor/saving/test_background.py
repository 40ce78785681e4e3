"""Saves written behind the training step: the values of their moment, one at a time, failures that surface."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from test_partial_run import at_step, known_bytes, save, save_on, stored

from mergepipe.errors import StorageError
from mergepipe.tailor.formats.partial import ShardFile
from mergepipe.tailor.saving import partial_run
from mergepipe.tailor.saving.frameworks import EngineView, LocalShard, Ranks, SingleRank
from mergepipe.tailor.saving.partial_run import BackgroundWriter, PartialJob, PartialRun
from mergepipe.tailor.saving.unit_choice import ChangeTracker, LatestChanged, SaveRecord, Schedule, read_journal
from support.engine_views import known_view, on_ranks


def live_view(step: list[int], rank: int = 0, world_size: int = 1) -> EngineView:
    """An engine that trains on: whenever it is read, it holds the values of the step in the list."""

    def live(number: int, shard: LocalShard) -> LocalShard:
        def read() -> NDArray[np.uint8]:
            return known_view(at_step(step[0]), rank, world_size).shards[number].read()

        return replace(shard, read=read)

    view = known_view(at_step(step[0]), rank, world_size)
    return replace(view, shards=tuple(live(number, shard) for number, shard in enumerate(view.shards)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_save__in_the_background_holds_the_values_of_its_step(tmp_path: Path, world_size: int) -> None:
    save_on(world_size, tmp_path, 2)

    def act(ranks: Ranks) -> list[SaveRecord]:
        records = []
        with BackgroundWriter() as writer:
            saves = PartialRun(tmp_path, Schedule("parity"), ranks, writer=writer)
            for step in (4, 6):
                now = [step]
                history = saves.history(step)
                records.append(saves.save(live_view(now, ranks.rank, world_size), step, history))
                now[0] = 99
        return records

    results = on_ranks(world_size, act)
    assert not [r for r in results if isinstance(r, Exception)], results
    logged = read_journal(tmp_path).records
    assert [(r.step, r.folder) for r in logged] == [(2, "full-2"), (4, "partial-4"), (6, "partial-6")]
    for record in logged[1:]:
        assert stored(tmp_path / str(record.folder)) == known_bytes(at_step(record.step), record.units)
        files = (tmp_path / str(record.folder)).iterdir()
        assert record.saved_bytes == sum(path.stat().st_size for path in files)


def test_save__in_the_background_returns_at_once_and_the_next_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_on(1, tmp_path, 2)
    release, write_shard = threading.Event(), partial_run._write_shard

    def blocked(job: PartialJob, folder: Path, rank: int) -> ShardFile | None:
        assert release.wait(30)
        return write_shard(job, folder, rank)

    monkeypatch.setattr(partial_run, "_write_shard", blocked)
    with BackgroundWriter() as writer, ThreadPoolExecutor(1) as pool:
        saves = PartialRun(tmp_path, Schedule("parity"), SingleRank(), writer=writer)
        saves.save(known_view(at_step(4)), 4, saves.history(4))
        following = pool.submit(saves.history, 6)
        assert [r.step for r in read_journal(tmp_path).records] == [2]
        assert not (tmp_path / "partial-4").exists()
        assert not following.done()
        release.set()
        assert [r.step for r in following.result(30)] == [2, 4]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_save__that_fails_in_the_background_is_raised_by_the_next_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rank: int
) -> None:
    save_on(2, tmp_path, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_shard = partial_run._write_shard

    def full(job: PartialJob, folder: Path, rank: int) -> ShardFile | None:
        if rank == bad_rank:
            raise OSError(28, "No space left on device")
        return write_shard(job, folder, rank)

    def act(ranks: Ranks) -> list[SaveRecord]:
        with BackgroundWriter() as writer:
            saves = PartialRun(tmp_path, Schedule("parity"), ranks, writer=writer)
            saves.save(known_view(at_step(4), ranks.rank, 2), 4, saves.history(4))
            with pytest.raises(StorageError, match="No space left on device"):
                saves.history(6)
            return list(saves.history(6))

    with monkeypatch.context() as patched:
        patched.setattr(partial_run, "_write_shard", full)
        results = on_ranks(2, act)
    assert [[r.step for r in kept] for kept in results if isinstance(kept, list)] == [[2], [2]]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [r.folder for r in save_on(2, tmp_path, 4)] == ["partial-4"]


def test_latest_changed__in_the_background_counts_changes_from_the_saved_values(tmp_path: Path) -> None:
    tracker = ChangeTracker()
    with BackgroundWriter() as writer:
        saves = PartialRun(tmp_path, LatestChanged(10_000), SingleRank(), tracker, writer)
        for step in (2, 4):
            saves.save(known_view(at_step(2)), step, saves.history(step))
    assert set(tracker.changes(known_view(at_step(2)), SingleRank()).values()) == {0.0}
    assert save(tmp_path, 6, SingleRank()).folder == "partial-6"
