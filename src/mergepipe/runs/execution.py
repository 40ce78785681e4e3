"""Run the engine for one merge, copying blocks and continuing kept sums of earlier snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.open_files import open_files
from mergepipe.engine.execute import EngineOptions, MergeWork, OutputPlan, execute_merge
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
from mergepipe.snapshots.overlay.writer import OverlayWriter
from mergepipe.snapshots.shards import DurableProgress, TensorDigest
from mergepipe.storage.contract import RangeFile, Store
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
class Execution:
    """One merge into `directory`, or into an `overlay` there. `tick` is called about ten times a second."""

    store: Store
    engine: EngineOptions
    directory: Path
    output: OutputPlan
    plan: Plan | None
    checkpoints: tuple[Checkpoint, ...]
    tick: Callable[[], None]
    overlay: OverlayWriter | None = None

    def run(
        self, work: MergeWork, files: Mapping[Location, RangeFile], sources: ReuseSources, progress: DurableProgress
    ) -> MergeResult:
        """Merge, and write the sums if they are kept.

        Raises:
            ConflictError: `plan.reuse-gone`.
            CorruptError: `accumulators.damaged`; `reuse.damaged` is for the caller to find out, with `Reuse.check`.
            MergePipeError: as `execute_merge`.
        """
        tasks = self.output.tasks
        names = SourceNames.of(self.store, self.checkpoints)
        keys = NamedKeys(work, tasks, names)
        reuse = find_reuse(work, tasks, keys, sources.snapshots)
        if self.plan is not None:
            reuse = limit_to_plan(reuse, self.plan)
        totals: dict[str, RunningTotal] = {}
        if sources.keeps_accumulators or sources.continues_sums:
            totals = running_totals(work, tasks, names)
        if sources.keeps_accumulators:
            reuse = Reuse({name: known for name, known in reuse.known.items() if name not in totals})
        else:
            totals = {name: total for name, total in totals.items() if name not in reuse.known}
        kept = find_kept_sums(
            totals, sources.snapshots, self.store.ledger, self.engine.threads,
            lambda earlier: running_totals(work, tasks, names.as_recorded(earlier.inputs)),
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            opened, reuse, kept = self._opened(stack, files, sources.snapshots, reuse, kept)
            replaced: Replaced = {
                t.name: continuation_task(t, totals[t.name], kept[t.name]) for t in tasks if t.name in kept
            }
            small = {KEYS_NAME: keys.own.to_bytes()}
            if sources.keeps_accumulators and totals:
                replaced, about = self._accumulate(work, totals, replaced, opened)
                small |= about
                opened |= stack.enter_context(
                    open_files(self.store, {Location.local(self.directory / ACCUMULATORS_NAME)})
                )
            work = replace(work, reusable=reuse.reusable)
            digests = self._execute(work, self.output, replaced, opened, progress, self.overlay)
        return MergeResult(digests, reuse, small, tuple({each.sid for each in kept.values()}))

    def _opened(
        self,
        stack: contextlib.ExitStack,
        files: Mapping[Location, RangeFile],
        snapshots: EarlierSnapshots,
        reuse: Reuse,
        kept: Mapping[str, KeptSum],
    ) -> tuple[dict[Location, RangeFile], Reuse, dict[str, KeptSum]]:
        """Open the files of earlier snapshots, except those that were replaced or removed since they were matched."""
        wanted = reuse.files | {each.entry.file for each in kept.values()}
        gone = {path for path in wanted if self.store.stat(path) is None}
        opened = {**files, **stack.enter_context(open_files(self.store, wanted - gone - files.keys()))}
        lost = gone | changed_files(wanted, snapshots)
        left = reuse.without(lost)
        if self.plan is not None and lost:
            left = limit_to_plan(left, self.plan)  # which raises for missing blocks
        return opened, left, {name: each for name, each in kept.items() if each.entry.file not in lost}

    def _accumulate(
        self,
        work: MergeWork,
        totals: Mapping[str, RunningTotal],
        replaced: Replaced,
        files: Mapping[Location, RangeFile],
    ) -> tuple[Replaced, dict[str, bytes]]:
        """Write the sums; return the tasks that round them to the output, and the small files that record them."""
        summed = [task for task in self.output.tasks if task.name in totals]
        output = total_output(summed)
        as_sums = {name: (replace(task, dtype=output.tasks[0].dtype), f) for name, (task, f) in replaced.items()}
        digests = self._execute(work, output, as_sums, files, None)
        entries = kept_entries(self.directory, output)
        return {t.name: rounding_task(t, entries[t.name]) for t in summed}, total_files(totals, output, digests)

    def _execute(
        self,
        work: MergeWork,
        output: OutputPlan,
        replaced: Replaced,
        files: Mapping[Location, RangeFile],
        progress: DurableProgress | None,
        overlay: OverlayWriter | None = None,
    ) -> tuple[TensorDigest, ...]:
        tasks = tuple(replaced[task.name][0] if task.name in replaced else task for task in output.tasks)
        work = replace(work, tasks=tasks, functions={name: function for name, (_, function) in replaced.items()})
        output = OutputPlan(output.shards, tasks)
        return execute_merge(
            work, output, self.directory, files, self.engine, self.store.ledger, self.tick, progress, overlay
        )
