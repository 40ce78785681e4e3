"""Run the engine for one merge, copying blocks of earlier snapshots."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.open_files import PinnedFile, pin_files
from mergepipe.engine.executors.contract import Executor
from mergepipe.engine.observer import Observer
from mergepipe.engine.work import MergeWork
from mergepipe.errors import ConflictError
from mergepipe.planning.plan import Plan
from mergepipe.runs.reuse.blocks import EarlierSnapshots, Reuse, changed_files, find_reuse, limit_to_plan
from mergepipe.runs.reuse.keys import KEYS_NAME, NamedKeys, SourceNames
from mergepipe.snapshots.shards import DurableProgress, TensorDigest
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge beside its weights: digests, reused blocks, and the small files that record them."""

    digests: tuple[TensorDigest, ...]
    reuse: Reuse
    small: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Execution:
    """One merge by an executor into `directory`."""

    store: Store
    executor: Executor
    directory: Path
    plan: Plan | None
    checkpoints: tuple[Checkpoint, ...]
    observer: Observer

    def run(self, work: MergeWork, snapshots: EarlierSnapshots, progress: DurableProgress) -> MergeResult:
        """Merge, copying what comes out the same from earlier `snapshots`.

        Raises:
            ConflictError: `plan.reuse-gone`.
            CorruptError: `reuse.damaged` is for the caller to find out, with `Reuse.check`.
            MergePipeError: as `Executor.run`.
        """
        tasks = work.output.tasks
        keys = NamedKeys(work, tasks, SourceNames.of(self.store, self.checkpoints))
        reuse = find_reuse(work, tasks, keys, snapshots)
        if self.plan is not None:
            reuse = limit_to_plan(reuse, self.plan)
        while True:
            reuse, pinned = self._unchanged(snapshots, reuse)
            reusing = replace(_with_files(work, pinned), reusable=reuse.reusable)
            try:
                result = self.executor.run(reusing, self.directory, self.observer, progress)
                return MergeResult(result.digests, reuse, {KEYS_NAME: keys.own.to_bytes()})
            except ConflictError as error:
                # An earlier snapshot can be replaced between this look and its opening, before anything is written.
                lost = {path for path in reuse.files if str(path) in {p.where for p in error.problems}}
                if error.code != "input.changed" or not lost:
                    raise
                reuse = self._without(lost, reuse)

    def _unchanged(self, snapshots: EarlierSnapshots, reuse: Reuse) -> tuple[Reuse, tuple[PinnedFile, ...]]:
        """Pin the files of earlier snapshots; leave out those replaced or removed since they were matched."""
        gone = {path for path in reuse.files if self.store.stat(path) is None}
        pinned = pin_files(self.store, reuse.files - gone)
        lost = gone | changed_files(reuse.files, snapshots)
        return self._without(lost, reuse), tuple(file for file in pinned if file.location not in lost)

    def _without(self, lost: Collection[Location], reuse: Reuse) -> Reuse:
        """Leave out what lies in some files; raises `plan.reuse-gone` where a plan relies on it."""
        remaining = reuse.without(lost)
        return limit_to_plan(remaining, self.plan) if self.plan is not None and lost else remaining


def _with_files(work: MergeWork, files: tuple[PinnedFile, ...]) -> MergeWork:
    """Add files that the work does not name yet."""
    present = {file.location for file in work.files}
    return replace(work, files=(*work.files, *(file for file in files if file.location not in present)))
