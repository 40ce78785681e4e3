"""Manage the partial saves of a run: when a full save is due, which units are next, and the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mergepipe.errors import RecipeError
from mergepipe.tailor.composition.request.save_log import partial_name
from mergepipe.tailor.saving.background import BackgroundWriter
from mergepipe.tailor.saving.changes import ChangeTracker, Samples
from mergepipe.tailor.saving.engine_view import EngineView, Ranks
from mergepipe.tailor.saving.partial_writer import PartialJob, open_partial
from mergepipe.tailor.saving.save_journal import note_save, note_start, read_journal
from mergepipe.tailor.saving.save_log import SaveRecord
from mergepipe.tailor.saving.unit_choice import LatestChanged, Situation, Strategy, choose_units
from mergepipe.tailor.units import Unit

FULL = "full"


def no_extra_files(_: Path) -> Iterable[Path]:
    """Write nothing beside the shard."""
    return ()


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
            raise RecipeError.of(
                "train.tracker", "latest-changed", "no ChangeTracker is given", "make one and keep it for the whole run"
            )

    def start(self, step: int) -> None:
        """Log that training resumes from `step`."""
        if self.ranks.rank == 0:
            note_start(self.run, step)
        self.ranks.gather(None)

    def history(self, step: int) -> tuple[SaveRecord, ...]:
        """Return the saves before `step` that the run builds on: none, unless a full one of them still exists.

        Raises:
            MergePipeError: the save that was being written failed.
        """
        if self.writer is not None:
            self.writer.wait()
        history: tuple[SaveRecord, ...] = ()
        if self.ranks.rank == 0:
            records = tuple(r for r in read_journal(self.run).records if r.step < step)
            if any(r.is_full and (self.run / str(r.folder)).is_dir() for r in records):
                history = records
        return self.ranks.gather(history)[0]

    def save(
        self,
        view: EngineView,
        step: int,
        history: tuple[SaveRecord, ...],
        write_extra: Callable[[Path], Iterable[Path]] = no_extra_files,
    ) -> SaveRecord:
        """Save the units that are due, all of them if `history` is empty, and log the save.

        The record of a save in the background counts the bytes of its tensors and the seconds that training waited.

        Raises:
            LimitError: the strategy's budget is smaller than a unit.
            MergePipeError: a rank could not write; the run's earlier saves are as they were.
        """
        started = time.perf_counter()
        unit_bytes = self._unit_bytes(view)
        units = tuple(unit_bytes) if not history else self._choose(view, history, unit_bytes)
        name = self.free_name(f"{FULL}-{step}" if not history else partial_name(step))
        job = PartialJob(view, units, step, self.run / name, write_extra)
        opened = open_partial(job, self.ranks, copies=self.writer is not None)
        samples = self.tracker.samples(view, units) if self.tracker is not None else {}
        record = SaveRecord(
            step, units, name, not history, tuple(unit_bytes), FULL if not history else str(self.strategy),
            sum(unit_bytes[unit] for unit in units), sum(unit_bytes.values()), time.perf_counter() - started,
        )  # fmt: skip

        def write(ranks: Ranks) -> SaveRecord:
            written = replace(record, saved_bytes=opened.write(ranks))
            if self.writer is None:
                written = replace(written, seconds=time.perf_counter() - started)
            self._note(samples, written, ranks)
            return written

        if self.writer is None:
            return write(self.ranks)
        self.writer.start(self.ranks, write)
        return record

    def note_full(self, view: EngineView, step: int, folder: str, seconds: float = 0.0) -> SaveRecord:
        """Log a full checkpoint that the framework itself has written into the run's directory.

        Raises:
            MergePipeError: the save that was being written failed.
        """
        if self.writer is not None:
            self.writer.wait()
        unit_bytes = self._unit_bytes(view)
        nbytes = sum(unit_bytes.values())
        record = SaveRecord(step, tuple(unit_bytes), folder, True, tuple(unit_bytes), FULL, nbytes, nbytes, seconds)
        self._note(self.tracker.samples(view, record.units) if self.tracker is not None else {}, record, self.ranks)
        return record

    def _note(self, samples: Samples, record: SaveRecord, ranks: Ranks) -> None:
        if ranks.rank == 0:
            note_save(self.run, record)
        if self.tracker is not None:
            self.tracker.remember(samples)
        ranks.gather(None)

    def _unit_bytes(self, view: EngineView) -> dict[Unit, int]:
        every = self.ranks.gather(view.local_bytes())
        return {unit: sum(local[unit] for local in every) for unit in view.units.parameters}

    def _choose(
        self, view: EngineView, history: tuple[SaveRecord, ...], unit_bytes: dict[Unit, int]
    ) -> tuple[Unit, ...]:
        changes = self.tracker.changes(view, self.ranks) if self.tracker is not None else {}
        situation = Situation(
            units=tuple(unit_bytes),
            n_partial=sum(not record.is_full for record in history),
            changes=MappingProxyType(changes),
            last_saved=MappingProxyType({unit: r.step for r in history for unit in r.units}),
            unit_bytes=MappingProxyType(unit_bytes),
        )
        return choose_units(self.strategy, situation)

    def free_name(self, name: str) -> str:
        """Return `name`, with a number appended if that step was saved before training was rolled back."""
        if self.ranks.rank:
            return self.ranks.gather(name)[0]
        free = next(n for i in range(10**6) if not (self.run / (n := name + (f"-r{i}" if i else ""))).exists())
        return self.ranks.gather(free)[0]
