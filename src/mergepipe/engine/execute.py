"""Run the engine: merge into a directory of shards, or analyse without writing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import stream_key
from mergepipe.checkpoints.contract import NeedsBase
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, GRAIN_ELEMENTS, BlockGrid
from mergepipe.engine.access import PlannedAccess
from mergepipe.engine.known_quantities import answer
from mergepipe.engine.passes import Job, Tap, TensorWork
from mergepipe.engine.pipeline import Pipeline
from mergepipe.engine.probing import ProbeSummary, sample_runs
from mergepipe.engine.reductions import Reduction, make_reduction
from mergepipe.engine.segment_layout import Piece
from mergepipe.engine.segments import (
    CutOf,
    JobShape,
    Levels,
    Reusable,
    Run,
    RunsOf,
    choose_buffer_sizes,
    cut_everywhere,
    fits_memory,
    full_access,
    plan_jobs,
    uncut_blocks,
    with_reuse,
)
from mergepipe.engine.stages import Needs, StagedReduction
from mergepipe.engine.summaries import TensorSummary
from mergepipe.operators.base import NOTHING_REDUCED, BlockFunction, Operator, OperatorInput, Reduced
from mergepipe.operators.statistics import COMMON_DENSITIES, TensorStatistics
from mergepipe.planning.candidates.sufficient_levels import sufficient_levels
from mergepipe.recipes.resolve.tasks import Action, MergeTask
from mergepipe.snapshots.overlay.writer import OverlayWriter
from mergepipe.snapshots.shards import DurableProgress, ShardLayout, ShardWriter, TensorDigest, TensorSpec, plan_shards
from mergepipe.storage.buffers import BufferPool
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.output import CHUNK_BYTES

OnStatistics = Callable[[MergeTask, int, TensorStatistics], None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that never change the result: compute threads, and the cap on buffers in bytes."""

    threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MergeWork:
    """A merge to run: tasks, operator, and the content ids (by model, or none) that key its randomness.

    With `access` only what it plans is read, cut on its grid so that reads cost what was planned.
    `on_statistics` takes the statistics of the experts' tensors named in `statistics_of`, which are read in full; it
    is called on the calling thread with the task, the expert and the statistics. `known_of`
    tells what is known exactly of a task's experts already: what it answers is not gathered again. `reusable` are
    results that stand in earlier snapshots, by tensor; one that must be reduced first is reused whole or not at all.
    `functions` are applied to the tensors they name instead of the operator's, without any reduction. A `tap` looks at
    what is read on the way.
    """

    tasks: tuple[MergeTask, ...]
    operator: Operator
    seed: int
    content_ids: Mapping[int, str]
    access: PlannedAccess | None = None
    renormalize: bool = False
    on_statistics: OnStatistics | None = None
    statistics_of: frozenset[str] = frozenset()
    known_of: Callable[[MergeTask], Sequence[TensorStatistics | None]] | None = None
    reusable: Mapping[str, Reusable] = field(default_factory=dict)
    functions: Mapping[str, BlockFunction] = field(default_factory=dict)
    tap: Tap | None = None


@dataclass(frozen=True, slots=True)
class AnalysisWork:
    """An analysis to run: tasks with their experts, the grid, and the densities whose cuts are computed.

    With a `probe_fraction` above zero only that share of every `probe_stride`-th block is read, and each task has one
    expert; else a `tap` may look on.
    """

    tasks: tuple[MergeTask, ...]
    block_elements: int
    densities: tuple[float, ...]
    on_statistics: OnStatistics
    probe_fraction: float = 0.0
    probe_stride: int = 1
    tap: Tap | None = None


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The shards to write, and the tasks in the order of their bytes in the shards."""

    shards: tuple[ShardLayout, ...]
    tasks: tuple[MergeTask, ...]

    @property
    def total_bytes(self) -> int:
        return sum(shard.file_bytes for shard in self.shards)


def plan_output(tasks: Sequence[MergeTask], shard_bytes: int) -> OutputPlan:
    """Lay out the output's shards."""
    by_name = {task.name: task for task in tasks}
    shards = plan_shards([TensorSpec(task.name, task.dtype, task.shape) for task in tasks], shard_bytes)
    return OutputPlan(shards, tuple(by_name[spec.name] for shard in shards for spec in shard.tensors))


def execute_merge(
    work: MergeWork,
    output: OutputPlan,
    directory: Path,
    files: Mapping[Location, RangeFile],
    options: EngineOptions,
    ledger: Ledger,
    on_tick: Callable[[], None],
    progress: DurableProgress | None = None,
    overlay: OverlayWriter | None = None,
) -> tuple[TensorDigest, ...]:
    """Merge into the shards of `output` in `directory`, and return the digest of every tensor in output order.

    What `progress` says is done already is neither read nor written. An `overlay` is written instead of the shards.

    Memory: `options.memory_bytes` of buffers, and the counters of reductions (see `engine.reductions`).

    Raises:
        LimitError: the memory cap is too small for one step.
        StorageError, CorruptError: see `Pipeline.run`.
    """
    pool_bytes = options.memory_bytes - CHUNK_BYTES
    if work.statistics_of:
        trimmed = {task.name for task in output.tasks if _levels(work, task)}  # more would be read for statistics
        work = replace(work, statistics_of=work.statistics_of - trimmed)
    if work.statistics_of and not fits_memory(output.tasks, pool_bytes, _cut_of(work)):
        work = replace(work, statistics_of=frozenset())  # whole blocks of all models are more than the cap allows
    if work.reusable:
        reusable = {task.name: work.reusable[task.name] for task in output.tasks if can_reuse(work, task)}
        work = replace(work, reusable=reusable)
    if work.reusable or work.functions:
        work = replace(work, statistics_of=work.statistics_of - work.reusable.keys() - work.functions.keys())
    cut_of = uncut_blocks(_cut_of(work), output.tasks, pool_bytes)
    runs_of = _runs_of(work)
    sizes = choose_buffer_sizes(output.tasks, pool_bytes, cut_of, CHUNK_BYTES)
    pool = BufferPool(sizes.total_bytes, pool_bytes)
    tasks = output.tasks[len(progress.done) if progress else 0 :]
    shapes = plan_jobs(tasks, sizes, runs_of, cut_of)
    with overlay or ShardWriter(directory, output.shards, ledger, progress) as writer:
        sink = _WriterSink(writer, tasks) if isinstance(writer, ShardWriter) else _OverlaySink(writer, tasks)
        pipeline = Pipeline(tasks, files, pool, sizes.raw_bytes, sink, options.threads, on_tick)
        pipeline.run(_merge_jobs(work, tasks, shapes, pool.limit))
        writer.finish()
        return tuple(writer.digests)


def execute_analysis(
    work: AnalysisWork, files: Mapping[Location, RangeFile], options: EngineOptions, on_tick: Callable[[], None]
) -> None:
    """Read every task's tensors once and report the statistics of each expert.

    A tensor whose copies do not fit into the memory cap may be read twice. Memory: as `execute_merge`.

    Raises:
        LimitError, StorageError, CorruptError: as `execute_merge`.
    """
    cut_of = _tapped(cut_everywhere(work.block_elements), work.tap)
    cut_of = uncut_blocks(cut_of, work.tasks, options.memory_bytes)
    sizes = choose_buffer_sizes(work.tasks, options.memory_bytes, cut_of)
    pool = BufferPool(sizes.total_bytes, options.memory_bytes)

    def runs_of(index: int, task: MergeTask) -> Iterable[Run]:
        if not work.probe_fraction:
            return full_access(index, task)
        grid = BlockGrid(task.base.n_elements, work.block_elements)
        return sample_runs(index, task, grid, work.probe_fraction, work.probe_stride)

    shapes = plan_jobs(work.tasks, sizes, runs_of, cut_of)
    pipeline = Pipeline(work.tasks, files, pool, sizes.raw_bytes, _NoSink(), options.threads, on_tick)
    pipeline.run(_analysis_jobs(work, shapes, pool.limit))


def _merge_jobs(
    work: MergeWork, tasks: Sequence[MergeTask], shapes: Iterator[JobShape], held_limit: int
) -> Iterator[Job]:
    for shape in shapes:
        works = [_merge_work(work, tasks[i]) for i in shape.task_indices]
        yield Job(shape, works, held_limit, reads_once=work.access is not None, tap=work.tap)


def _cut_of(work: MergeWork) -> CutOf:
    """Return where tensors may be cut. A rule that needs whole rows is cut between rows only."""
    if work.access is not None:
        grid = work.access.block_elements
    else:
        grid = DEFAULT_BLOCK_ELEMENTS if work.statistics_of else GRAIN_ELEMENTS

    def cut_of(task: MergeTask) -> int:
        if task.action is Action.COPY or not task.experts:
            return grid
        granularity = work.operator.granularity(operator_input(work, task))
        if granularity == 1 or work.access is None:
            return granularity if granularity > 1 else grid
        if any(isinstance(source, NeedsBase) for source in task.experts):
            return math.lcm(granularity, grid)  # encoded blocks are charged once
        return granularity * -(-grid // granularity)  # no more cuts than blocks, and a plan has charged a page for each

    return _tapped(cut_of, work.tap)


def _tapped(cut_of: CutOf, tap: Tap | None) -> CutOf:
    """Restrict the cuts to those that the tap allows."""
    if tap is None:
        return cut_of
    return lambda task: math.lcm(cut_of(task), tap.cut_elements) if task.name in tap.tensors else cut_of(task)


def _runs_of(work: MergeWork) -> RunsOf:
    """Return the runs to read: the planned ones, or of every expert the lowest level that the rule needs."""

    def sufficient(index: int, task: MergeTask) -> Iterable[Run]:
        return full_access(index, task, levels=() if task.name in work.statistics_of else _levels(work, task))

    runs_of = sufficient if work.access is None else work.access.runs_of
    return with_reuse(runs_of, work.reusable) if work.reusable else runs_of


def _levels(work: MergeWork, task: MergeTask) -> Levels:
    return sufficient_levels(work.operator, operator_input(work, task), task) if task.experts else ()


def _merge_work(work: MergeWork, task: MergeTask) -> TensorWork:
    known_result = work.reusable.get(task.name)
    is_known = known_result is not None and known_result.is_whole
    if task.action is Action.COPY or not task.base.n_elements or is_known:
        return TensorWork(task, None, _no_function)
    if task.name in work.functions:
        return TensorWork(task, None, lambda _: work.functions[task.name])
    given, operator = operator_input(work, task), work.operator
    if not task.experts:
        return TensorWork(task, None, lambda _: operator.block_function(given, NOTHING_REDUCED))
    needs = _needs(work, task, given)
    known, request = needs.next(NOTHING_REDUCED)
    on_statistics = work.on_statistics if work.access is None and task.name in work.statistics_of else None
    if on_statistics is None and request is None:
        return TensorWork(task, None, lambda _: operator.block_function(given, known))
    first: Reduction
    on_reduced = _nothing_to_report
    if on_statistics is not None:
        grid = BlockGrid(given.n_elements, DEFAULT_BLOCK_ELEMENTS)
        first = summary = TensorSummary(grid, len(task.experts), request, COMMON_DENSITIES)
        on_reduced = _reporter(task, summary, on_statistics)
    elif request is not None:
        first = make_reduction(request, given.n_elements, len(task.experts))
    staged = StagedReduction(needs, first, len(task.experts), known)
    return TensorWork(task, staged, lambda reduced: operator.block_function(given, reduced), on_reduced)


def can_reuse(work: MergeWork, task: MergeTask) -> bool:
    """Whether known results can be reused: a whole tensor, or some blocks if blocks are independent."""
    known = work.reusable.get(task.name)
    if known is None or known.is_whole or task.name in work.functions:
        return known is not None
    given = operator_input(work, task)
    if work.operator.granularity(given) > 1:
        return False
    needs = _needs(replace(work, statistics_of=frozenset()), task, given)  # known results come before statistics
    return needs.next(NOTHING_REDUCED)[1] is None


def _nothing_to_report() -> None:
    """The tensor's statistics are not wanted."""


def _needs(work: MergeWork, task: MergeTask, given: OperatorInput) -> Needs:
    """Return the operator's needs of a tensor, less what the plan or the statistics know."""
    access, known_of = work.access, work.known_of
    if access is not None:
        return Needs(
            work.operator,
            given,
            left=lambda wanted: access.request(task.name, wanted),
            complete=lambda reduced: access.completed(task.name, reduced),
        )
    if known_of is not None and task.name not in work.statistics_of:
        return Needs(work.operator, given, answer=lambda wanted: answer(wanted, known_of(task)))
    return Needs(work.operator, given)


def _analysis_jobs(work: AnalysisWork, shapes: Iterator[JobShape], held_limit: int) -> Iterator[Job]:
    for shape in shapes:
        works = []
        for task in (work.tasks[i] for i in shape.task_indices):
            grid = BlockGrid(task.base.n_elements, work.block_elements)
            summary: TensorSummary | ProbeSummary
            if work.probe_fraction:
                summary = ProbeSummary(grid, task.experts[0], work.probe_stride)
            else:
                summary = TensorSummary(grid, len(task.experts), None, work.densities)
            works.append(TensorWork(task, summary, _no_function, _reporter(task, summary, work.on_statistics)))
        yield Job(shape, works, held_limit, writes=False, tap=work.tap)


def _reporter(
    task: MergeTask, summary: TensorSummary | ProbeSummary, on_statistics: OnStatistics
) -> Callable[[], None]:
    def report() -> None:
        for e in range(len(task.experts)):
            on_statistics(task, e, summary.statistics(e))

    return report


def _no_function(_: Reduced = NOTHING_REDUCED) -> None:
    return None


def operator_input(work: MergeWork, task: MergeTask) -> OperatorInput:
    return OperatorInput(
        globals=task.parameters.globals,
        anchor=task.parameters.anchor,
        experts=task.parameters.experts,
        n_elements=task.base.n_elements,
        stream_keys=_stream_keys(work, task),
        renormalize=work.renormalize,
        shape=task.shape,
    )


def _stream_keys(work: MergeWork, task: MergeTask) -> tuple[int, ...]:
    """Derive one stream key per expert, for random operators; each tensor of a model has its own."""
    if not work.operator.is_random:
        return ()
    sources = zip(task.expert_models, task.experts, strict=True)
    return tuple(stream_key(work.seed, work.content_ids[model], source.name) for model, source in sources)


class _WriterSink:
    """Passes the results in a buffer to the writer, tensor by tensor."""

    def __init__(self, writer: ShardWriter, tasks: Sequence[MergeTask]) -> None:
        self._writer = writer
        self._tasks = tasks

    def write_segment(self, pieces: Sequence[Piece], buffer: NDArray[np.uint8]) -> None:
        for piece in pieces:
            nbytes = piece.run.span.n_elements * self._tasks[piece.run.task_index].dtype.itemsize
            if nbytes:
                self._writer.append(buffer[piece.out_offset : piece.out_offset + nbytes])


class _OverlaySink:
    """Passes results to the overlay together with the base's stored bytes, which are in the same buffer."""

    def __init__(self, overlay: OverlayWriter, tasks: Sequence[MergeTask]) -> None:
        self._overlay = overlay
        self._tasks = tasks

    def write_segment(self, pieces: Sequence[Piece], buffer: NDArray[np.uint8]) -> None:
        for piece in pieces:
            task = self._tasks[piece.run.task_index]
            nbytes = piece.run.span.n_elements * task.dtype.itemsize
            has_base = piece.run.reused is None and self._overlay.refers_to(task.name)
            base = buffer[piece.base_offset : piece.base_offset + nbytes] if has_base else None
            self._overlay.append(buffer[piece.out_offset : piece.out_offset + nbytes], base)


class _NoSink:
    """The sink of an analysis, which writes nothing."""

    def write_segment(self, pieces: Sequence[Piece], buffer: NDArray[np.uint8]) -> None:
        raise AssertionError("an analysis has no output")
