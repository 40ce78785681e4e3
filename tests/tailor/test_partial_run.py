"""A run of partial saves, on ranks made of threads: what is saved, logged, kept and given up."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from composing import checkpoint_at
from numpy.typing import NDArray

from mergepipe.errors import ConflictError, MergePipeError, RecipeError, StorageError
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor import saving
from mergepipe.tailor.formats.partial import ShardFile
from mergepipe.tailor.inspection import composition_from_log_file
from mergepipe.tailor.saving import partial_run
from mergepipe.tailor.saving.frameworks import EngineView, LocalShard, Ranks
from mergepipe.tailor.saving.partial_run import BackgroundWriter, PartialRun, open_partial
from mergepipe.tailor.saving.save_log import LOG_NAME, SaveRecord, read_journal
from mergepipe.tailor.saving.unit_choice import ChangeTracker, LatestChanged, Schedule, Strategy
from mergepipe.tailor.selection import LM_HEAD, Unit, layer
from support.engine_views import known_view, on_ranks
from support.training_trees import KnownStates, decoder_shapes, known_states

SHAPES = decoder_shapes(n_layers=4)


def at_step(step: int) -> KnownStates:
    return known_states(SHAPES, seed=step, step=step)


def save(run: Path, step: int, ranks: Ranks, strategy: Strategy | None = None) -> SaveRecord:
    saves = PartialRun(run, strategy or Schedule("parity"), ranks)
    return saves.save(known_view(at_step(step), ranks.rank, ranks.world_size), step, saves.history(step))


def save_on(world_size: int, run: Path, *steps: int) -> list[SaveRecord]:
    records = []
    for step in steps:
        results = on_ranks(world_size, lambda ranks, step=step: save(run, step, ranks))  # type: ignore[misc]
        assert all(isinstance(result, SaveRecord) for result in results), results
        records += [result for result in results[:1] if isinstance(result, SaveRecord)]
    return records


def stored(folder: Path) -> dict[tuple[str, str], bytes]:
    states = checkpoint_at(folder).states
    return {
        key: b"".join(p.file.local_path.read_bytes()[p.offset : p.offset + p.nbytes] for p in state.pieces)
        for key, state in states.items()
    }


def known_bytes(known: KnownStates, units: Iterable[Unit]) -> dict[tuple[str, str], bytes]:
    names = {name for unit in units for name in known_view(known).units.parameters[unit]}
    return {key: array.tobytes() for key, array in known.arrays.items() if key[0] in names}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_save__first_all_units_then_those_whose_turn_it_is(tmp_path: Path, world_size: int) -> None:
    records = save_on(world_size, tmp_path, 2, 4, 6)
    assert [(r.folder, r.is_full) for r in records] == [("full-2", True), ("partial-4", False), ("partial-6", False)]
    assert set(records[0].units) == set(records[1].units) | set(records[2].units)
    assert read_journal(tmp_path).records == tuple(records)
    for record in records:
        folder = tmp_path / str(record.folder)
        assert stored(folder) == known_bytes(at_step(record.step), record.units)
        assert record.saved_bytes == sum(path.stat().st_size for path in folder.iterdir())
        assert {s.value for s in checkpoint_at(folder).steps} == {record.step}


def test_save__is_composed_from_its_own_log(tmp_path: Path) -> None:
    save_on(2, tmp_path, 2, 4, 6, 8)
    found = composition_from_log_file(LocalStore(), Location.local(tmp_path / LOG_NAME), Location.local(tmp_path), 7)
    assert {(str(unit), step) for unit, (_, step) in found.sources.items()} == {
        ("embed", 4), ("layer 0", 4), ("layer 1", 6), ("layer 2", 4), ("layer 3", 6), ("norm", 6), ("lm_head", 6),
    }  # fmt: skip
    assert found.default.local_path == tmp_path / "full-2"


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_save__a_rank_that_fails_makes_all_fail_and_nothing_visible(
    tmp_path: Path, bad_rank: int, *, in_background: bool
) -> None:
    """One in the background fails the next save on every rank, once."""
    save_on(2, tmp_path, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def act(ranks: Ranks) -> list[int]:
        with BackgroundWriter() as writer:
            saves = PartialRun(tmp_path, Schedule("parity"), ranks, writer=writer if in_background else None)
            save_4 = partial(saves.save, known_view(at_step(4), ranks.rank, 2), 4, saves.history(4))
            if in_background:
                save_4()
            with pytest.raises(StorageError, match="Input/output error"):
                saves.history(6) if in_background else save_4()
            return [record.step for record in saves.history(6)]

    write_shard = partial_run._write_shard

    def fail(view: EngineView, folder: Path, rank: int) -> ShardFile | None:
        written = write_shard(view, folder, rank)
        if rank == bad_rank:
            raise OSError(5, "Input/output error")
        return written

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(partial_run, "_write_shard", fail)
        assert on_ranks(2, act) == [[2], [2]]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [r.folder for r in save_on(2, tmp_path, 4)] == ["partial-4"]


def test_save__keeps_what_was_saved_before_training_went_back(tmp_path: Path) -> None:
    save_on(1, tmp_path, 2, 4, 6)
    first = stored(tmp_path / "partial-4")
    PartialRun(tmp_path, Schedule("parity"), Ranks()).start(2)
    again = save_on(1, tmp_path, 4)[0]
    assert (again.folder, stored(tmp_path / "partial-4")) == ("partial-4-r1", first)
    assert [r.folder for r in read_journal(tmp_path).records] == ["full-2", "partial-4-r1"]


def test_save__is_full_again_when_the_full_one_is_gone(tmp_path: Path) -> None:
    save_on(1, tmp_path, 2)
    (tmp_path / "full-2").rename(tmp_path / "elsewhere")
    assert [r.folder for r in save_on(1, tmp_path, 4, 6)] == ["full-4", "partial-6"]


def test_save__mends_a_log_that_a_crash_cut_short(tmp_path: Path) -> None:
    save_on(1, tmp_path, 2)
    with (tmp_path / LOG_NAME).open("a") as stream:
        stream.write('{"event": "save", "st')
    save_on(1, tmp_path, 4)
    assert [(r.step, r.folder) for r in read_journal(tmp_path).records] == [(2, "full-2"), (4, "partial-4")]


def test_write_partial__never_replaces(tmp_path: Path) -> None:
    def save(step: int) -> None:
        view = known_view(at_step(step)).saving((layer(0),), 2)
        open_partial(view, tmp_path / "partial-2", Ranks(), copies=False)(Ranks())

    save(2)
    before = stored(tmp_path / "partial-2")
    with pytest.raises(ConflictError):
        save(3)
    assert stored(tmp_path / "partial-2") == before
    assert [path.name for path in tmp_path.iterdir()] == ["partial-2"]


def test_note_full__takes_the_frameworks_own_checkpoint_as_the_base(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    saves = PartialRun(tmp_path, Schedule("filter", edge_layers=1, every=2), Ranks())
    assert saves.history(4) == ()
    saves.note_full(known_view(at_step(2)), 2, "checkpoint-2")
    record = saves.save(known_view(at_step(4)), 4, saves.history(4))
    assert record.folder == "partial-4"
    assert [str(unit) for unit in record.units] == ["embed", "layer 0", "layer 2", "layer 3", "lm_head"]


def moved(known: KnownStates, prefix: str, by: float) -> KnownStates:
    arrays = {k: a * np.float32(1 + by) if k[0].startswith(prefix) else a for k, a in known.arrays.items()}
    return replace(known, arrays=arrays)


@pytest.mark.parametrize("world_size", [1, 2])
def test_latest_changed__saves_what_moved_since_it_was_last_saved(tmp_path: Path, world_size: int) -> None:
    start = at_step(2)
    later = moved(moved(start, "lm_head", 0.5), "model.layers.1.", 0.25)
    last = moved(later, "model.layers.3.", 0.125)
    layer_bytes = sum(4 * a.size for (n, _), a in start.arrays.items() if ".layers.1." in n)

    def act(ranks: Ranks) -> list[tuple[Unit, ...]]:
        saves = PartialRun(tmp_path, LatestChanged(layer_bytes), ranks, ChangeTracker(sample_elements=7))
        found = []
        for step, known in ((2, start), (4, later), (6, last), (8, last), (10, last)):
            view = known_view(known, ranks.rank, world_size)
            found.append(saves.save(view, step, saves.history(step)).units)
        return found

    results = on_ranks(world_size, act)
    assert not [r for r in results if isinstance(r, Exception)], results
    assert results[0] == results[-1]
    assert isinstance(results[0], list)
    assert results[0][1:] == [(LM_HEAD,), (layer(1),), (layer(3),), ()]


def test_latest_changed__measures_the_relative_change() -> None:
    known = at_step(2)
    tracker = ChangeTracker()
    view = known_view(known)
    unknown = tracker.changes(view, Ranks())
    tracker.remember(tracker.samples(view, view.units.parameters))
    found = tracker.changes(known_view(moved(known, "lm_head", 0.5)), Ranks())
    assert set(unknown.values()) == {float("inf")}
    assert found[LM_HEAD] == pytest.approx(0.5)
    assert {value for unit, value in found.items() if unit != LM_HEAD} == {0.0}


def test_latest_changed__needs_a_tracker(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="ChangeTracker"):
        PartialRun(tmp_path, LatestChanged(10), Ranks())


def test_save__refuses_a_journal_with_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_text("nonsense\n")
    with pytest.raises(MergePipeError, match=f"{LOG_NAME}:1"):
        save(tmp_path, 2, Ranks())


@pytest.mark.transformers
@pytest.mark.parametrize("key", ["model", "optim"])
def test_save_partial__refuses_the_keys_of_the_model_and_the_optimizer(tmp_path: Path, key: str) -> None:
    with pytest.raises(RecipeError, match=key) as caught:
        saving.save_partial(tmp_path, None, None, step=1, strategy=Schedule("parity"), state={"step": 1, key: 2})
    assert caught.value.code == "option.conflict"


# --- saves written behind the training step: the values of their moment, one at a time, failures that surface


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

    def blocked(view: EngineView, folder: Path, rank: int) -> ShardFile | None:
        assert release.wait(30)
        return write_shard(view, folder, rank)

    monkeypatch.setattr(partial_run, "_write_shard", blocked)
    with BackgroundWriter() as writer, ThreadPoolExecutor(1) as pool:
        saves = PartialRun(tmp_path, Schedule("parity"), Ranks(), writer=writer)
        saves.save(known_view(at_step(4)), 4, saves.history(4))
        following = pool.submit(saves.history, 6)
        assert [r.step for r in read_journal(tmp_path).records] == [2]
        assert not (tmp_path / "partial-4").exists()
        assert not following.done()
        release.set()
        assert [r.step for r in following.result(30)] == [2, 4]


def test_latest_changed__in_the_background_counts_changes_from_the_saved_values(tmp_path: Path) -> None:
    tracker = ChangeTracker()
    with BackgroundWriter() as writer:
        saves = PartialRun(tmp_path, LatestChanged(10_000), Ranks(), tracker, writer)
        for step in (2, 4):
            saves.save(known_view(at_step(2)), step, saves.history(step))
    assert set(tracker.changes(known_view(at_step(2)), Ranks()).values()) == {0.0}
    assert save(tmp_path, 6, Ranks()).folder == "partial-6"
