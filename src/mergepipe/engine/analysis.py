"""Analyse without writing: read tensors once, and report the statistics of their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BlockGrid
from mergepipe.engine.jobs import Job, TensorWork
from mergepipe.engine.pipeline import Pipeline, ReadSettings, are_dear
from mergepipe.engine.segments import (
    HoldLimits,
    JobShape,
    Piece,
    choose_buffer_sizes,
    cut_everywhere,
    full_access,
    plan_jobs,
    uncut_blocks,
)
from mergepipe.engine.tensor_summary import TensorSummary
from mergepipe.engine.tensor_work import no_function
from mergepipe.engine.work import AnalysisWork, EngineOptions, Observer, OnStatistics
from mergepipe.recipes.tasks import MergeTask
from mergepipe.storage.contract import RangeFile, Store, abort_requests
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import BufferPool


def run_analysis(
    work: AnalysisWork, files: Mapping[Location, RangeFile], store: Store, options: EngineOptions, observer: Observer
) -> None:
    """Read every task's tensors once from open files of `store`, and report the statistics of each expert.

    A tensor whose copies do not fit into the memory cap may be read twice. Memory: as `make_part`.
    """
    cut_of = cut_everywhere(work.block_elements)
    cut_of = uncut_blocks(cut_of, work.tasks, options.memory_bytes)
    sizes = choose_buffer_sizes(work.tasks, options.memory_bytes, cut_of)
    pool = BufferPool(sizes.total_bytes, options.memory_bytes)

    pipeline = Pipeline(
        work.tasks, files, pool, sizes.raw_bytes, _NoSink(), options.threads, lambda: observer.on_progress(None),
        ReadSettings.of(files, store, pool.limit), lambda: abort_requests(store),
    )  # fmt: skip
    looked_at_twice = [task for task in work.tasks if not _has_few_fine_deltas(task)]
    is_sparing = not are_dear(files, store)
    limits = HoldLimits.sparing(pool.limit, sizes, looked_at_twice) if is_sparing else HoldLimits.of(pool.limit)
    pipeline.run(_jobs(work, plan_jobs(work.tasks, sizes, full_access, cut_of), limits, observer))


def _has_few_fine_deltas(task: MergeTask) -> bool:
    """Whether one look at a tensor is expected to suffice (see `FineMagnitudes`): all models have one 16-bit format."""
    return task.base.dtype.itemsize <= 2 and all(source.dtype == task.base.dtype for source in task.experts)


def _jobs(work: AnalysisWork, shapes: Iterator[JobShape], limits: HoldLimits, observer: Observer) -> Iterator[Job]:
    for shape in shapes:
        works = []
        for task in (work.tasks[i] for i in shape.task_indices):
            grid = BlockGrid(task.base.n_elements, work.block_elements)
            summary = TensorSummary(grid, len(task.experts), work.densities)
            works.append(TensorWork(task, summary, no_function, _reporter(task, summary, observer.on_statistics)))
        yield Job(shape, works, limits, writes=False, tap=observer.tap)


def _reporter(task: MergeTask, summary: TensorSummary, on_statistics: OnStatistics) -> Callable[[], None]:
    """Return a function that passes on the statistics of every expert of a task."""

    def report() -> None:
        for e in range(len(task.experts)):
            on_statistics(task, e, summary.statistics(e))

    return report


class _NoSink:
    """The sink of an analysis, which writes nothing."""

    def write_segment(self, pieces: Sequence[Piece], buffer: NDArray[np.uint8]) -> None:
        raise AssertionError("an analysis has no output")
