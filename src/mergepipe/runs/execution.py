"""Runs the engine for one merge, with what earlier snapshots know of it: blocks that are copied, sums that go on."""

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
    Kept,
    RunningTotal,
    continued,
    find_kept,
    kept_entries,
    rounded,
    running_totals,
    total_files,
    total_output,
)
from mergepipe.runs.reuse.blocks import Reuse, Snapshots, as_planned, find_reuse, lost_files
from mergepipe.runs.reuse.keys import KEYS_NAME, block_keys
from mergepipe.snapshots.overlay.writer import OverlayWriter
from mergepipe.snapshots.shards import DurableProgress, TensorDigest
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.local import LocalStore

Replaced = Mapping[str, tuple[MergeTask, BlockFunction]]
"""By tensor the task in place of the recipe's, and the function in place of the operator's."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier merges may lend: where to look, whether sums are looked for; and if sums are kept."""

    snapshots: Snapshots
    goes_on: bool
    keeps_accumulators: bool


@dataclass(frozen=True, slots=True)
class Made:
    """What a merge made beside the weights: digests, what was reused, and the small files that tell of it."""

    digests: tuple[TensorDigest, ...]
    reuse: Reuse
    small: Mapping[str, bytes]
    continued_sids: tuple[str, ...] = ()  # snapshots on whose sums this one went on


@dataclass(frozen=True, slots=True)
class Execution:
    """One merge into `directory`, or into an `overlay` there. `tick` is called about ten times a second."""

    store: LocalStore
    engine: EngineOptions
    directory: Path
    output: OutputPlan
    plan: Plan | None
    checkpoints: tuple[Checkpoint, ...]
    tick: Callable[[], None]
    overlay: OverlayWriter | None = None

    def run(
        self, work: MergeWork, files: Mapping[Path, RangeFile], earlier: Earlier, progress: DurableProgress
    ) -> Made:
        """Merge, and keep sums where that is asked for.

        Raises:
            ConflictError: `plan.reuse-gone`.
            CorruptError: `accumulators.damaged`; `reuse.damaged` is for the caller to find out, with `Reuse.check`.
            MergePipeError: as `execute_merge`.
        """
        tasks = self.output.tasks
        keys = block_keys(work, tasks, self.checkpoints)
        reuse = find_reuse(work, tasks, keys, earlier.snapshots)
        if self.plan is not None:
            reuse = as_planned(reuse, self.plan)
        totals: dict[str, RunningTotal] = {}
        if earlier.keeps_accumulators or earlier.goes_on:
            totals = running_totals(work, tasks, self.checkpoints)
        if earlier.keeps_accumulators:
            reuse = Reuse({name: known for name, known in reuse.known.items() if name not in totals})
        else:
            totals = {name: total for name, total in totals.items() if name not in reuse.known}
        kept = find_kept(totals, earlier.snapshots, self.store.ledger, self.engine.threads)
        with contextlib.ExitStack() as stack:
            opened, reuse, kept = self._opened(stack, files, earlier.snapshots, reuse, kept)
            replaced: Replaced = {t.name: continued(t, totals[t.name], kept[t.name]) for t in tasks if t.name in kept}
            small = {KEYS_NAME: keys.to_bytes()}
            if earlier.keeps_accumulators and totals:
                replaced, about = self._accumulate(work, totals, replaced, opened)
                small |= about
                opened |= stack.enter_context(open_files(self.store, {self.directory / ACCUMULATORS_NAME}))
            work = replace(work, reusable=reuse.reusable)
            digests = self._execute(work, self.output, replaced, opened, progress, self.overlay)
        return Made(digests, reuse, small, tuple({each.sid for each in kept.values()}))

    def _opened(
        self,
        stack: contextlib.ExitStack,
        files: Mapping[Path, RangeFile],
        snapshots: Snapshots,
        reuse: Reuse,
        kept: Mapping[str, Kept],
    ) -> tuple[dict[Path, RangeFile], Reuse, dict[str, Kept]]:
        """Open what earlier snapshots lend, but for what was replaced or removed since it was looked at."""
        wanted = reuse.files | {each.entry.file for each in kept.values()}
        gone = {path for path in wanted if self.store.stat(path) is None}
        opened = {**files, **stack.enter_context(open_files(self.store, wanted - gone - files.keys()))}
        lost = gone | lost_files(wanted, snapshots)
        left = reuse.without(lost)
        if self.plan is not None and lost:
            left = as_planned(left, self.plan)  # which says what is gone
        return opened, left, {name: each for name, each in kept.items() if each.entry.file not in lost}

    def _accumulate(
        self,
        work: MergeWork,
        totals: Mapping[str, RunningTotal],
        replaced: Replaced,
        files: Mapping[Path, RangeFile],
    ) -> tuple[Replaced, dict[str, bytes]]:
        """Write the sums; what is left to do with them is to round, and what tells of them goes into small files."""
        summed = [task for task in self.output.tasks if task.name in totals]
        output = total_output(summed)
        as_sums = {name: (replace(task, dtype=output.tasks[0].dtype), f) for name, (task, f) in replaced.items()}
        digests = self._execute(work, output, as_sums, files, None)
        entries = kept_entries(self.directory, output)
        return {t.name: rounded(t, entries[t.name]) for t in summed}, total_files(totals, output, digests)

    def _execute(
        self,
        work: MergeWork,
        output: OutputPlan,
        replaced: Replaced,
        files: Mapping[Path, RangeFile],
        progress: DurableProgress | None,
        overlay: OverlayWriter | None = None,
    ) -> tuple[TensorDigest, ...]:
        tasks = tuple(replaced[task.name][0] if task.name in replaced else task for task in output.tasks)
        work = replace(work, tasks=tasks, functions={name: function for name, (_, function) in replaced.items()})
        output = OutputPlan(output.shards, tasks)
        return execute_merge(
            work, output, self.directory, files, self.engine, self.store.ledger, self.tick, progress, overlay
        )
