"""Run the engine for one merge, copying blocks and continuing kept sums of earlier snapshots."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.open_files import PinnedFile, pin_files
from mergepipe.core.values import dataclass
from mergepipe.engine.executors.contract import Executor
from mergepipe.engine.observer import Observer
from mergepipe.engine.work import MergeWork, OutputPlan, PartResult
from mergepipe.errors import ConflictError
from mergepipe.operators.base import BlockFunction
from mergepipe.planning.plan import Plan
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.runs.reuse.accumulators import (
    ACCUMULATORS_NAME,
    KeptSum,
    RunningTotal,
    continuation_task,
    find_kept_sums,
    kept_entries,
    rounding_task,
    running_totals,
    total_files,
    total_output,
)
from mergepipe.runs.reuse.blocks import EarlierSnapshots, Reuse, changed_files, find_reuse, limit_to_plan
from mergepipe.runs.reuse.keys import KEYS_NAME, NamedKeys, SourceNames
from mergepipe.snapshots.shards import DurableProgress, TensorDigest
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

Replaced = Mapping[str, tuple[MergeTask, BlockFunction]]
"""Maps a tensor to the task and the block function that replace the recipe's."""


@dataclass(frozen=True, slots=True)
class ReuseSources:
    """The earlier snapshots to reuse, whether their kept sums are continued, and whether this merge keeps its own."""

    snapshots: EarlierSnapshots
    continues_sums: bool
    keeps_accumulators: bool


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge beside its weights: digests, reused blocks, and the small files that record them."""

    digests: tuple[TensorDigest, ...]
    reuse: Reuse
    small: Mapping[str, bytes]
    continued_sids: tuple[str, ...] = ()  # snapshots whose sums this one continued


@dataclass(frozen=True, slots=True)
class _Matched:
    """The reused blocks and sums of earlier snapshots, the running totals, and whether this merge keeps its own."""

    reuse: Reuse
    kept: Mapping[str, KeptSum]
    totals: Mapping[str, RunningTotal]
    keeps_sums: bool


def _earlier_files(reuse: Reuse, sums: Mapping[str, KeptSum]) -> set[Location]:
    """The files of earlier snapshots that a merge reads."""
    return reuse.files | {kept_sum.entry.file for kept_sum in sums.values()}


@dataclass(frozen=True, slots=True)
class Execution:
    """One merge by an executor into `directory`; `threads` check kept sums."""

    store: Store
    executor: Executor
    threads: int
    directory: Path
    plan: Plan | None
    checkpoints: tuple[Checkpoint, ...]
    observer: Observer

    def run(self, work: MergeWork, sources: ReuseSources, progress: DurableProgress) -> MergeResult:
        """Merge, and write the sums if they are kept.

        Raises:
            ConflictError: `plan.reuse-gone`.
            CorruptError: `accumulators.damaged`; `reuse.damaged` is for the caller to find out, with `Reuse.check`.
            MergePipeError: as `Executor.run`.
        """
        tasks = work.output.tasks
        names = SourceNames.of(self.store, self.checkpoints)
        keys = NamedKeys(work, tasks, names)
        reuse = find_reuse(work, tasks, keys, sources.snapshots)
        if self.plan is not None:
            reuse = limit_to_plan(reuse, self.plan)
        totals: dict[str, RunningTotal] = {}
        if sources.keeps_accumulators or sources.continues_sums:
            totals = running_totals(work, tasks, names)
        if sources.keeps_accumulators:
            reuse = Reuse({name: tensor for name, tensor in reuse.known.items() if name not in totals})
        else:
            totals = {name: total for name, total in totals.items() if name not in reuse.known}
        sums: Mapping[str, KeptSum] = find_kept_sums(
            totals, sources.snapshots, self.store.ledger, self.threads,
            lambda earlier: running_totals(work, tasks, names.as_recorded(earlier.inputs)),
        )  # fmt: skip
        while True:
            reuse, sums, pinned = self._unchanged(sources.snapshots, reuse, sums)
            matched = _Matched(reuse, sums, totals, sources.keeps_accumulators)
            try:
                return self._merge(_with_files(work, pinned), matched, keys, progress)
            except ConflictError as error:
                # An earlier snapshot can be replaced between this look and its opening, before anything is written.
                lost = {path for path in _earlier_files(reuse, sums) if str(path) in {p.where for p in error.problems}}
                if error.code != "input.changed" or not lost:
                    raise
                reuse, sums = self._without(lost, reuse, sums)

    def _merge(self, work: MergeWork, matched: _Matched, keys: NamedKeys, progress: DurableProgress) -> MergeResult:
        """Merge with what was matched in earlier snapshots, and write the sums to keep."""
        totals, sums = matched.totals, matched.kept
        replaced: Replaced = {
            t.name: continuation_task(t, totals[t.name], sums[t.name]) for t in work.output.tasks if t.name in sums
        }
        small = {KEYS_NAME: keys.own.to_bytes()}
        if matched.keeps_sums and totals:
            replaced, about = self._accumulate(work, totals, replaced)
            small |= about
            work = _with_files(work, pin_files(self.store, {Location.local(self.directory / ACCUMULATORS_NAME)}))
        work = replace(work, reusable=matched.reuse.reusable)
        result = self._execute(work, work.output, replaced, progress)
        continued = tuple({kept_sum.sid for kept_sum in sums.values()})
        return MergeResult(result.digests, matched.reuse, small, continued)

    def _unchanged(
        self, snapshots: EarlierSnapshots, reuse: Reuse, sums: Mapping[str, KeptSum]
    ) -> tuple[Reuse, Mapping[str, KeptSum], tuple[PinnedFile, ...]]:
        """Pin the files of earlier snapshots; leave out those replaced or removed since they were matched."""
        paths = _earlier_files(reuse, sums)
        gone = {path for path in paths if self.store.stat(path) is None}
        pinned = pin_files(self.store, paths - gone)
        lost = gone | changed_files(paths, snapshots)
        reuse, sums = self._without(lost, reuse, sums)
        return reuse, sums, tuple(file for file in pinned if file.location not in lost)

    def _without(
        self, lost: Collection[Location], reuse: Reuse, sums: Mapping[str, KeptSum]
    ) -> tuple[Reuse, Mapping[str, KeptSum]]:
        """Leave out what lies in some files; raises `plan.reuse-gone` where a plan relies on it."""
        remaining = reuse.without(lost)
        if self.plan is not None and lost:
            remaining = limit_to_plan(remaining, self.plan)
        return remaining, {name: kept_sum for name, kept_sum in sums.items() if kept_sum.entry.file not in lost}

    def _accumulate(
        self, work: MergeWork, totals: Mapping[str, RunningTotal], replaced: Replaced
    ) -> tuple[Replaced, dict[str, bytes]]:
        """Write the sums; return the tasks that round them to the output, and the small files that record them."""
        summed = [task for task in work.output.tasks if task.name in totals]
        output = total_output(summed)
        as_sums = {name: (replace(task, dtype=output.tasks[0].dtype), f) for name, (task, f) in replaced.items()}
        digests = self._execute(work, output, as_sums, None).digests
        entries = kept_entries(self.directory, output)
        return {t.name: rounding_task(t, entries[t.name]) for t in summed}, total_files(totals, output, digests)

    def _execute(
        self, work: MergeWork, output: OutputPlan, replaced: Replaced, progress: DurableProgress | None
    ) -> PartResult:
        tasks = tuple(replaced[task.name][0] if task.name in replaced else task for task in output.tasks)
        rules = {name: rule for name, (_, rule) in replaced.items()}
        work = replace(work, output=OutputPlan(output.shards, tasks), rules=rules)
        return self.executor.run(work, self.directory, self.observer, progress)


def _with_files(work: MergeWork, files: tuple[PinnedFile, ...]) -> MergeWork:
    """Add files that the work does not name yet."""
    present = {file.location for file in work.files}
    return replace(work, files=(*work.files, *(file for file in files if file.location not in present)))
