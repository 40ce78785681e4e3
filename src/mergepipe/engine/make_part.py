"""Make a part of a merge: write its shards into a staging directory; or pass on all of its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import LeveledTensor
from mergepipe.checkpoints.open_files import open_pinned
from mergepipe.core.blocks import GRAIN_ELEMENTS
from mergepipe.core.rounding import NOTHING_MEASURED, Survival, TensorRounding
from mergepipe.engine.jobs import Job
from mergepipe.engine.observer import SILENT, Observer
from mergepipe.engine.output_parts import Part, PartResult
from mergepipe.engine.pipeline import Pipeline, Sink
from mergepipe.engine.segments import (
    BufferSizes,
    CutOf,
    HoldLimits,
    Piece,
    Run,
    RunsOf,
    Segments,
    choose_buffer_sizes,
    full_access,
    plan_jobs,
    tasks_of,
    uncut_blocks,
)
from mergepipe.engine.tensor_work import tensor_work
from mergepipe.engine.work import EngineOptions, MergeWork, OutputPlan
from mergepipe.planning.problem import sufficient_levels
from mergepipe.recipes.tasks import Action, MergeTask
from mergepipe.snapshots.shards import DurableProgress, ShardWriter
from mergepipe.storage.contract import Store
from mergepipe.storage.output import CHUNK_BYTES


def make_part(
    work: MergeWork,
    part: Part,
    directory: Path,
    store: Store,
    options: EngineOptions,
    observer: Observer = SILENT,
    progress: DurableProgress | None = None,
) -> PartResult:
    """Write the shards of `part` into `directory`, reading the work's files through `store`.

    What `progress` says is durable already is neither read nor written.

    Memory: `options.memory_bytes` of buffers, and the counters of reductions (see `block_reductions`). Disk, under a
    plan: in `directory`, what is read of experts of a tensor that buffers do not hold and that is looked at twice.
    """
    layout = _layout(work, options.memory_bytes - CHUNK_BYTES)
    by_shard = work.output.tasks_by_shard()
    part_output = OutputPlan(
        tuple(work.output.shards[shard] for shard in part.shards),
        tuple(task for shard in part.shards for task in by_shard[shard]),
    )
    n_done = len(progress.done) if progress else 0
    tasks = part_output.tasks[n_done:]
    starts = {first - n_done for first in accumulate(len(by_shard[shard]) for shard in part.shards)}
    before = store.ledger.usage()
    roundings: dict[str, TensorRounding] = {}

    def survival_of(name: str) -> Survival:
        return roundings.pop(name).survival() if name in roundings else NOTHING_MEASURED

    with (
        open_pinned(store, work.files) as files,
        ShardWriter(directory, part_output.shards, store.ledger, progress, survival_of) as writer,
    ):
        pipeline = Pipeline(
            tasks, observer.watch(files), store, layout.sizes, layout.pool_bytes, partial(_append, writer, tasks),
            options.threads, observer.on_progress, directory,
        )  # fmt: skip
        _run(work, tasks, starts, layout, pipeline, roundings)
        writer.finish()
    digests = iter(writer.digests)
    return PartResult(
        {shard: tuple(next(digests) for _ in by_shard[shard]) for shard in part.shards}, store.ledger.usage() - before
    )


def pass_tensors(work: MergeWork, sink: Sink, scratch: Path, store: Store, options: EngineOptions) -> None:
    """Make all tensors of a merge, and pass them to `sink` in output order, from a thread of the engine's.

    Memory and disk: as `make_part`, what it spills goes to `scratch`. An error of the sink ends it.
    """
    layout, tasks = _layout(work, options.memory_bytes), work.output.tasks
    with open_pinned(store, work.files) as files:
        pipeline = Pipeline(
            tasks, files, store, layout.sizes, layout.pool_bytes, sink, options.threads, scratch_folder=scratch
        )
        _run(work, tasks, frozenset(), layout, pipeline, {})


def _run(
    work: MergeWork,
    tasks: Sequence[MergeTask],
    starts: AbstractSet[int],
    layout: _Layout,
    pipeline: Pipeline,
    roundings: dict[str, TensorRounding],
) -> None:
    """Run the pipeline over `tasks`; no job goes on from one of the `starts` to another.

    How each tensor is rounded is added to `roundings` when its job begins.
    """
    shapes = plan_jobs(tasks, layout.sizes, layout.runs_of, layout.cut_of, starts)
    limits = pipeline.hold_limits(work.output.tasks if work.access is None else None)
    pipeline.run(_jobs(work, tasks, shapes, limits, roundings))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The reads and tiles of a work within an amount of memory; the same for each of its parts."""

    pool_bytes: int
    sizes: BufferSizes
    runs_of: RunsOf
    cut_of: CutOf


def _layout(work: MergeWork, pool_bytes: int) -> _Layout:
    """Choose buffers and cuts by all tasks of a work."""
    tasks = work.output.tasks
    cut_of = uncut_blocks(_cut_of(work), tasks, pool_bytes)
    sizes = choose_buffer_sizes(tasks, pool_bytes, cut_of, CHUNK_BYTES, in_part=work.access is not None)
    return _Layout(pool_bytes, sizes, _runs_of(work), cut_of)


def _jobs(
    work: MergeWork,
    tasks: Sequence[MergeTask],
    cut: Iterator[Segments],
    limits: HoldLimits,
    roundings: dict[str, TensorRounding],
) -> Iterator[Job]:
    for segments in cut:
        works = {i: tensor_work(work, tasks[i]) for i in tasks_of(segments)}
        roundings.update((tasks[i].name, of_tensor.rounding) for i, of_tensor in works.items())
        yield Job(segments, works, limits, reads_once=work.access is not None)


def _cut_of(work: MergeWork) -> CutOf:
    """Return where tensors may be cut. A rule that needs whole rows is cut between rows only."""
    grid = GRAIN_ELEMENTS if work.access is None else work.access.block_elements

    def cut_of(task: MergeTask) -> int:
        if task.action is Action.COPY or not task.experts:
            return grid
        granularity = work.operator.granularity(task.operator_input())
        if granularity == 1 or work.access is None:
            return granularity if granularity > 1 else grid
        if any(isinstance(source, LeveledTensor) for source in task.experts):
            return math.lcm(granularity, grid)  # encoded blocks are charged once
        return granularity * -(-grid // granularity)  # no more cuts than blocks, and a plan has charged a page for each

    return cut_of


def _runs_of(work: MergeWork) -> RunsOf:
    """Return the runs to read: the planned ones, or of every expert the lowest level that the rule needs."""

    def sufficient(index: int, task: MergeTask) -> Iterable[Run]:
        if not task.experts:
            return full_access(index, task)
        return full_access(index, task, levels=sufficient_levels(work.operator, task.operator_input(), task))

    return sufficient if work.access is None else work.access.runs_of


def _append(
    writer: ShardWriter, tasks: Sequence[MergeTask], pieces: Iterable[Piece], buffer: NDArray[np.uint8]
) -> None:
    """Append results to what is written: what lies in one stretch of the buffer, and belongs to one tensor, at once."""
    stretches: list[list[int]] = []  # the index of a task, where its bytes begin and end
    for piece in pieces:
        index, start = piece.run.task_index, piece.out_offset
        nbytes = piece.run.span.n_elements * tasks[index].dtype.itemsize
        if stretches and stretches[-1][::2] == [index, start]:
            stretches[-1][2] += nbytes
        elif nbytes:
            stretches.append([index, start, start + nbytes])
    for _, start, stop in stretches:
        writer.append(buffer[start:stop])
