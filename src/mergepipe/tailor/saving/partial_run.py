"""Manage the partial saves of a run: which units are next, what each rank writes, and the log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from mergepipe.core.blocks import DTYPES
from mergepipe.errors import MergePipeError, RecipeError, StorageError
from mergepipe.snapshots.shards import ShardWriter, TensorSpec, plan_shards
from mergepipe.snapshots.staging import Staging
from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.output import write_durably
from mergepipe.storage.ranges import os_error
from mergepipe.tailor.formats.partial import MANIFEST_NAME, PARTIAL_FORMAT, ShardFile, ShardTensor
from mergepipe.tailor.saving.frameworks import EngineView, Ranks
from mergepipe.tailor.saving.save_log import SaveRecord, append_record, read_journal
from mergepipe.tailor.saving.unit_choice import ChangeTracker, LatestChanged, Samples, Strategy, choose_units
from mergepipe.tailor.selection import Unit

# --- write saves behind the training step ---
# at most one at a time; a failure is raised by the next save or at the end


class BackgroundWriter:
    """Writes one save of a run at a time in a thread. A context manager, which waits for the last one.

    Every method is called on every rank together. Memory: a copy of what is being saved of this rank's part.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mergepipe-save")
        self._saving: Future[SaveRecord] | None = None
        self._ranks: Ranks | None = None

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def start(self, ranks: Ranks, write: Callable[[Ranks], SaveRecord]) -> None:
        """Call `write` in the thread, with the ranks as they are seen from there."""
        self.wait()
        if self._ranks is None:
            self._ranks = ranks.for_another_thread()
        self._saving = self._pool.submit(write, self._ranks)

    def wait(self) -> SaveRecord | None:
        """Wait for the save that is being written; None without one."""
        saving, self._saving = self._saving, None
        return None if saving is None else saving.result()


# --- write one partial checkpoint: every rank writes its shard into staging, rank 0 publishes ---


_COUNTER_DTYPE = DTYPES["F32"]
_NO_LIMIT = 2**62

Value = TypeVar("Value")


WriteExtra: TypeAlias = Callable[[Path], Iterable[Path]]
"""Writes small files of this rank beside its shard in a folder, and returns their paths."""


def open_partial(
    view: EngineView, out: Path, ranks: Ranks, write_extra: WriteExtra = lambda _: (), *, copies: bool
) -> Callable[[Ranks], int]:
    """Begin a save of what `view` holds, to be published as `out`: write the small files, which hold the state of now,
    and with `copies` copy the rest to the host.

    Returns what writes the rest and publishes, from any thread, and returns the bytes of all files. All ranks call
    both, and see one file system. Memory: the largest local shard, and a write chunk of 8 MiB.
    """
    with ExitStack() as stack:
        staging, folder = _stage(stack, out, ranks)
        extra: list[Path] = []
        views: list[EngineView] = []

        def prepare() -> None:
            extra.extend(write_extra(folder))
            views.append(view.copied() if copies else view)

        _agree(ranks, prepare)
        (kept_view,) = views
        kept = stack.pop_all()

    def write_rest(ranks: Ranks) -> int:
        def write() -> tuple[ShardFile | None, int]:
            return _write_shard(kept_view, folder, ranks.rank), sum(map(_make_durable, extra))

        def finish(written: list[tuple[ShardFile | None, int]]) -> int:
            shards = tuple(shard for shard, _ in written if shard is not None)
            content = PARTIAL_FORMAT.to_json(replace(view.layout, shards=shards))
            write_durably(folder / MANIFEST_NAME, content, Ledger())
            return len(content) + sum(shard.size_bytes for shard in shards) + sum(nbytes for _, nbytes in written)

        with kept:
            return _publish(staging, ranks, write, finish)

    return write_rest


def write_together(out: Path, ranks: Ranks, write: Callable[[Path], None]) -> None:
    """Let every rank `write` into one staging directory, rank 0 publish it as `out`, durably.

    A rank that fails makes all fail, and nothing becomes visible.
    """
    with ExitStack() as stack:
        staging, folder = _stage(stack, out, ranks)
        _publish(staging, ranks, lambda: write(folder), lambda _: 0)


def _stage(stack: ExitStack, out: Path, ranks: Ranks) -> tuple[Staging | None, Path]:
    """Make the staging directory of `out`, which rank 0 has, and tell all ranks where it is."""
    staging = Staging(out, force=False) if ranks.rank == 0 else None
    folders = _agree(ranks, lambda: str(stack.enter_context(staging).path) if staging is not None else "")
    return staging, Path(folders[0])


def _publish(
    staging: Staging | None, ranks: Ranks, write: Callable[[], Value], finish: Callable[[list[Value]], int]
) -> int:
    """Let every rank `write`, rank 0 `finish` and publish; return what `finish` returned, on every rank."""
    written = _agree(ranks, write)

    def publish() -> int:
        if staging is None:
            return 0
        result = finish(written)
        staging.publish()
        return result

    return _agree(ranks, publish)[0]


def _agree(ranks: Ranks, act: Callable[[], Value]) -> list[Value]:
    """Call `act` and gather every rank's result; if one rank failed, raise its error on all.

    Any exception is caught: a rank that left now would let the others wait for it for ever.
    """
    outcome: Value | MergePipeError
    cause: Exception | None = None
    try:
        outcome = act()
    except MergePipeError as error:
        outcome = cause = error
    except Exception as error:
        outcome = StorageError.of("training.rank", f"rank {ranks.rank}", f"{type(error).__name__}: {error}")
        cause = error
    outcomes = ranks.gather(outcome)
    failed = next((outcome for outcome in outcomes if isinstance(outcome, MergePipeError)), None)
    if failed is not None:
        raise type(failed)(*failed.problems) from cause
    return [outcome for outcome in outcomes if not isinstance(outcome, MergePipeError)]


def _write_shard(view: EngineView, folder: Path, rank: int) -> ShardFile | None:
    """Write this rank's part as one safetensors file; None where it has none."""
    shards = {f"{s.kind}/{s.parameter}": s for s in view.shards if s.span.n_elements}
    counters = view.counters if view.writes_counters else ()
    held = {f"step/{number}": read for number, read in enumerate(counters)}
    if not shards and not held:
        return None
    specs = [TensorSpec(key, shard.dtype, (shard.span.n_elements,)) for key, shard in shards.items()]
    specs += [TensorSpec(key, _COUNTER_DTYPE, ()) for key in held]
    (planned,) = plan_shards(specs, _NO_LIMIT)
    layout = replace(planned, name=f"rank-{rank:05d}.safetensors")
    with ShardWriter(folder, [layout], Ledger()) as writer:
        for spec in layout.tensors:
            is_shard = spec.name in shards
            writer.append(
                shards[spec.name].read() if is_shard else np.array([held[spec.name]()], np.float32).view(np.uint8)
            )
        writer.finish()
    tensors = tuple(ShardTensor(s.parameter, s.kind, s.dtype, s.span.start, s.span.stop) for s in shards.values())
    return ShardFile(layout.name, layout.file_bytes, tensors, tuple(range(len(counters))))


def _make_durable(path: Path) -> int:
    try:
        descriptor = owned.open_file(path, flags=os.O_RDONLY)
        try:
            owned.sync_file(descriptor)
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, path, "making it durable") from error


# --- manage the partial saves of a run: when a full save is due, which units are next, and the log ---


FULL = "full"


@dataclass(frozen=True, slots=True)
class PartialRun:
    """One run's directory, strategy and ranks. Every method is called on every rank together.

    `tracker` is needed by `LatestChanged`; it and `writer` must live as long as the training process. With a `writer`
    a save returns when its values are copied: it is written, logged and counted as saved behind the training step.
    """

    run: Path
    strategy: Strategy
    ranks: Ranks
    tracker: ChangeTracker | None = None
    writer: BackgroundWriter | None = None

    def __post_init__(self) -> None:
        if isinstance(self.strategy, LatestChanged) and self.tracker is None:
            hint = "make one and keep it for the whole run"
            raise RecipeError.of("option.conflict", str(self.strategy), "no ChangeTracker is given", hint)

    def start(self, step: int) -> None:
        """Log that training resumes from `step`."""
        if self.ranks.rank == 0:
            append_record(self.run, SaveRecord(step))
        self.ranks.gather(None)

    def history(self, step: int) -> tuple[SaveRecord, ...]:
        """Return the saves before `step` that the run builds on: none, unless a full one of them still exists."""
        if self.writer is not None:
            self.writer.wait()
        history: tuple[SaveRecord, ...] = ()
        if self.ranks.rank == 0:
            records = tuple(r for r in read_journal(self.run).records if r.step < step)
            if any(r.is_full and (self.run / str(r.folder)).is_dir() for r in records):
                history = records
        return self.ranks.gather(history)[0]

    def save(
        self, view: EngineView, step: int, history: tuple[SaveRecord, ...], write_extra: WriteExtra = lambda _: ()
    ) -> SaveRecord:
        """Save the units that are due, all of them if `history` is empty, and log the save.

        The record of a save in the background counts the bytes of its tensors and the seconds that training waited.
        """
        started = time.perf_counter()
        unit_bytes = self._unit_bytes(view)
        units = tuple(unit_bytes) if not history else self._choose(view, history, unit_bytes)
        name = self.free_name(f"{FULL}-{step}" if not history else f"partial-{step}")
        saved = view.saving(units, step)
        write_rest = open_partial(saved, self.run / name, self.ranks, write_extra, copies=self.writer is not None)
        samples = self.tracker.samples(view, units) if self.tracker is not None else {}
        record = SaveRecord(
            step, units, name, not history, tuple(unit_bytes), FULL if not history else str(self.strategy),
            sum(unit_bytes[unit] for unit in units), sum(unit_bytes.values()), time.perf_counter() - started,
        )  # fmt: skip

        def write(ranks: Ranks) -> SaveRecord:
            written = replace(record, saved_bytes=write_rest(ranks))
            if self.writer is None:
                written = replace(written, seconds=time.perf_counter() - started)
            self._note(samples, written, ranks)
            return written

        if self.writer is None:
            return write(self.ranks)
        self.writer.start(self.ranks, write)
        return record

    def note_full(self, view: EngineView, step: int, folder: str, seconds: float = 0.0) -> SaveRecord:
        """Log a full checkpoint that the framework itself has written into the run's directory."""
        if self.writer is not None:
            self.writer.wait()
        unit_bytes = self._unit_bytes(view)
        nbytes = sum(unit_bytes.values())
        record = SaveRecord(step, tuple(unit_bytes), folder, True, tuple(unit_bytes), FULL, nbytes, nbytes, seconds)
        self._note(self.tracker.samples(view, record.units) if self.tracker is not None else {}, record, self.ranks)
        return record

    def _note(self, samples: Samples, record: SaveRecord, ranks: Ranks) -> None:
        if ranks.rank == 0:
            append_record(self.run, record)
        if self.tracker is not None:
            self.tracker.remember(samples)
        ranks.gather(None)

    def _unit_bytes(self, view: EngineView) -> dict[Unit, int]:
        every = self.ranks.gather(view.local_bytes())
        return {unit: sum(local[unit] for local in every) for unit in view.units.parameters}

    def _choose(
        self, view: EngineView, history: tuple[SaveRecord, ...], unit_bytes: dict[Unit, int]
    ) -> tuple[Unit, ...]:
        changes = {}
        if self.tracker is not None and isinstance(self.strategy, LatestChanged):
            changes = self.tracker.changes(view, self.ranks, self.strategy.measure)
        n_partial = sum(not record.is_full for record in history)
        last_saved = {unit: record.step for record in history for unit in record.units}
        return choose_units(self.strategy, tuple(unit_bytes), n_partial, changes, last_saved, unit_bytes)

    def free_name(self, name: str) -> str:
        """Return `name`, with a number appended if that step was saved before training was rolled back."""
        if self.ranks.rank:
            return self.ranks.gather(name)[0]
        free = next(n for i in range(10**6) if not (self.run / (n := name + (f"-r{i}" if i else ""))).exists())
        return self.ranks.gather(free)[0]
