"""The engine's front doors: merge into a directory of shards, or analyse without writing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.blocks import DEFAULT_BLOCK_ELEMENTS, GRAIN_ELEMENTS, BlockGrid
from mergepipe.budget import Ledger
from mergepipe.engine.access import PlannedAccess
from mergepipe.engine.identity import stream_key
from mergepipe.engine.jobs import Job, TensorWork
from mergepipe.engine.knowledge import StatisticsByTensor, answer
from mergepipe.engine.pipeline import Pipeline
from mergepipe.engine.probing import ProbeSummary, sample_runs
from mergepipe.engine.reductions import Reduction, make_reduction
from mergepipe.engine.segments import (
    JobShape,
    Piece,
    Run,
    RunsOf,
    choose_buffer_sizes,
    fits_memory,
    full_access,
    plan_jobs,
)
from mergepipe.engine.summaries import TensorSummary
from mergepipe.operators.base import NOTHING_REDUCED, BlockFunction, Operator, OperatorInput, Reduced
from mergepipe.recipe.resolve import Action, MergeTask
from mergepipe.statistics import COMMON_DENSITIES, TensorStatistics
from mergepipe.storage.base import RangeFile
from mergepipe.storage.buffers import BufferPool
from mergepipe.storage.output import CHUNK_BYTES
from mergepipe.writer import ShardLayout, ShardWriter, TensorDigest, TensorSpec, plan_shards

OnStatistics = Callable[[MergeTask, int, TensorStatistics], None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run, none of which changes a byte of the result: compute threads, and the cap on buffers in bytes."""

    threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MergeWork:
    """What to run: tasks, the operator, and what its randomness is keyed by (one content id per expert, or none).

    With `access` only what it plans is read, cut on its grid so that reads cost what was planned.
    `on_statistics` takes the statistics of the experts' tensors named in `statistics_of`, which are read in full; it
    is called on the calling thread with the task, the expert and the statistics. `statistics_E` holds what is known of
    each expert already, exactly: what it answers is not gathered again.
    """

    tasks: tuple[MergeTask, ...]
    operator: Operator
    seed: int
    content_ids: tuple[str, ...]
    access: PlannedAccess | None = None
    renormalize: bool = False
    on_statistics: OnStatistics | None = None
    statistics_of: frozenset[str] = frozenset()
    statistics_E: tuple[StatisticsByTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class AnalysisWork:
    """What to analyse: tasks with their experts, the grid, and the densities whose cuts are wanted.

    With a `probe_fraction` above zero only that share of every block is read, and each task has one expert.
    """

    tasks: tuple[MergeTask, ...]
    block_elements: int
    densities: tuple[float, ...]
    on_statistics: OnStatistics
    probe_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The shards to write, and the tasks in the order in which their bytes stand in them."""

    shards: tuple[ShardLayout, ...]
    tasks: tuple[MergeTask, ...]

    @property
    def total_bytes(self) -> int:
        return sum(shard.file_bytes for shard in self.shards)


def plan_output(tasks: Sequence[MergeTask], shard_bytes: int) -> OutputPlan:
    """Lay out the output's files."""
    by_name = {task.name: task for task in tasks}
    shards = plan_shards([TensorSpec(task.name, task.dtype, task.shape) for task in tasks], shard_bytes)
    return OutputPlan(shards, tuple(by_name[spec.name] for shard in shards for spec in shard.tensors))


def execute_merge(
    work: MergeWork,
    output: OutputPlan,
    directory: Path,
    files: Mapping[Path, RangeFile],
    options: EngineOptions,
    ledger: Ledger,
    on_tick: Callable[[], None],
) -> tuple[TensorDigest, ...]:
    """Merge into the shards of `output` in `directory`, and return the digest of every tensor in output order.

    Memory: `options.memory_bytes` of buffers, and the counters of reductions (see `engine.reductions`).

    Raises:
        LimitError: the memory cap is too small for one step.
        StorageError, CorruptError: see `Pipeline.run`.
    """
    pool_bytes = options.memory_bytes - CHUNK_BYTES
    if work.statistics_of and not fits_memory(output.tasks, pool_bytes, DEFAULT_BLOCK_ELEMENTS):
        work = replace(work, statistics_of=frozenset())  # whole blocks of all models are more than the cap allows
    cut, runs_of = _cutting(work)
    sizes = choose_buffer_sizes(output.tasks, pool_bytes, cut, CHUNK_BYTES)
    pool = BufferPool(sizes.total_bytes, pool_bytes)
    shapes = plan_jobs(output.tasks, sizes, runs_of, cut)
    with ShardWriter(directory, output.shards, ledger) as writer:
        sink = _WriterSink(writer, output.tasks)
        pipeline = Pipeline(output.tasks, files, pool, sizes.raw_bytes, sink, options.threads, on_tick)
        pipeline.run(_merge_jobs(work, output.tasks, shapes, pool.limit))
        writer.finish()
        return tuple(writer.digests)


def execute_analysis(
    work: AnalysisWork, files: Mapping[Path, RangeFile], options: EngineOptions, on_tick: Callable[[], None]
) -> None:
    """Read every task's tensors once and report the statistics of each expert.

    A tensor whose copies do not fit into the memory cap may be read twice. Memory: as `execute_merge`.

    Raises:
        LimitError, StorageError, CorruptError: as `execute_merge`.
    """
    sizes = choose_buffer_sizes(work.tasks, options.memory_bytes, work.block_elements)
    pool = BufferPool(sizes.total_bytes, options.memory_bytes)

    def runs_of(index: int, task: MergeTask) -> Iterable[Run]:
        if not work.probe_fraction:
            return full_access(index, task)
        return sample_runs(index, task, BlockGrid(task.base.n_elements, work.block_elements), work.probe_fraction)

    shapes = plan_jobs(work.tasks, sizes, runs_of, work.block_elements)
    pipeline = Pipeline(work.tasks, files, pool, sizes.raw_bytes, _NoSink(), options.threads, on_tick)
    pipeline.run(_analysis_jobs(work, shapes, pool.limit))


def _merge_jobs(
    work: MergeWork, tasks: Sequence[MergeTask], shapes: Iterator[JobShape], held_limit: int
) -> Iterator[Job]:
    for shape in shapes:
        works = [_merge_work(work, tasks[i]) for i in shape.task_indices]
        yield Job(shape, works, held_limit, reads_once=work.access is not None)


def _cutting(work: MergeWork) -> tuple[int, RunsOf]:
    """The grid on which tensors are cut, and the runs to read."""
    if work.access is not None:
        return work.access.block_elements, work.access.runs_of
    return (DEFAULT_BLOCK_ELEMENTS if work.statistics_of else GRAIN_ELEMENTS), full_access


def _merge_work(work: MergeWork, task: MergeTask) -> TensorWork:
    if task.action is Action.COPY or not task.base.n_elements:
        return TensorWork(task, None, _no_function)
    given = _operator_input(work, task)
    access = work.access

    def make_function(reduced: Reduced) -> BlockFunction:
        return work.operator.block_function(given, access.completed(task.name, reduced) if access else reduced)

    if not task.experts:
        return TensorWork(task, None, make_function)
    request = work.operator.reduction(given)
    if access is not None:
        request = access.request(task.name, request)
    elif request is not None and work.statistics_E and task.name not in work.statistics_of:
        known = answer(task.name, request, work.statistics_E)
        if known is not None:
            return TensorWork(task, None, lambda _: work.operator.block_function(given, known))
    if work.on_statistics is None or access is not None or task.name not in work.statistics_of:
        reduction: Reduction | None = make_reduction(request, given.n_elements, len(task.experts)) if request else None
        return TensorWork(task, reduction, make_function)
    grid = BlockGrid(given.n_elements, DEFAULT_BLOCK_ELEMENTS)
    summary = TensorSummary(grid, len(task.experts), request, COMMON_DENSITIES)
    return TensorWork(task, summary, make_function, _reporter(task, summary, work.on_statistics))


def _analysis_jobs(work: AnalysisWork, shapes: Iterator[JobShape], held_limit: int) -> Iterator[Job]:
    for shape in shapes:
        works = []
        for task in (work.tasks[i] for i in shape.task_indices):
            grid = BlockGrid(task.base.n_elements, work.block_elements)
            summary: TensorSummary | ProbeSummary
            if work.probe_fraction:
                summary = ProbeSummary(grid, task.experts[0])
            else:
                summary = TensorSummary(grid, len(task.experts), None, work.densities)
            works.append(TensorWork(task, summary, _no_function, _reporter(task, summary, work.on_statistics)))
        yield Job(shape, works, held_limit, writes=False)


def _reporter(
    task: MergeTask, summary: TensorSummary | ProbeSummary, on_statistics: OnStatistics
) -> Callable[[], None]:
    def report() -> None:
        for e in range(len(task.experts)):
            on_statistics(task, e, summary.statistics(e))

    return report


def _no_function(_: Reduced = NOTHING_REDUCED) -> None:
    return None


def _operator_input(work: MergeWork, task: MergeTask) -> OperatorInput:
    return OperatorInput(
        globals=task.parameters.globals,
        anchor=task.parameters.anchor,
        experts=task.parameters.experts,
        n_elements=task.base.n_elements,
        stream_keys=tuple(stream_key(work.seed, each, task.name) for each in work.content_ids),
        renormalize=work.renormalize,
    )


class _WriterSink:
    """Hands the results in a buffer to the writer, tensor by tensor."""

    def __init__(self, writer: ShardWriter, tasks: Sequence[MergeTask]) -> None:
        self._writer = writer
        self._tasks = tasks

    def write_segment(self, pieces: Sequence[Piece], buffer: NDArray[np.uint8]) -> None:
        for piece in pieces:
            nbytes = piece.run.span.n_elements * self._tasks[piece.run.task_index].dtype.itemsize
            if nbytes:
                self._writer.append(buffer[piece.out_offset : piece.out_offset + nbytes])


class _NoSink:
    """An analysis writes nothing."""

    def write_segment(self, pieces: Sequence[Piece], buffer: NDArray[np.uint8]) -> None:
        raise AssertionError("an analysis has no output")
