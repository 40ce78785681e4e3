"""Runs a resolved merge over open files into a directory: the engine's front door."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.budget import Ledger
from mergepipe.engine.identity import stream_key
from mergepipe.engine.jobs import Job, TensorState
from mergepipe.engine.pipeline import Pipeline
from mergepipe.engine.segments import JobShape, Piece, choose_buffer_sizes, plan_jobs
from mergepipe.operators.base import Operator, OperatorInput
from mergepipe.recipe.resolve import MergeTask
from mergepipe.storage.base import RangeFile
from mergepipe.storage.buffers import BufferPool
from mergepipe.storage.output import CHUNK_BYTES
from mergepipe.writer import ShardLayout, ShardWriter, TensorDigest, TensorSpec, plan_shards


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run, none of which changes a byte of the result: compute threads, and the cap on buffers in bytes."""

    threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MergeWork:
    """What to run: tasks, the operator, and what its randomness is keyed by (one content id per expert, or none)."""

    tasks: tuple[MergeTask, ...]
    operator: Operator
    seed: int
    content_ids: tuple[str, ...]


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
    sizes = choose_buffer_sizes(output.tasks, pool_bytes)
    pool = BufferPool(sizes.total_bytes, pool_bytes)
    with ShardWriter(directory, output.shards, ledger) as writer:
        sink = _WriterSink(writer, output.tasks)
        pipeline = Pipeline(output.tasks, files, pool, sizes.raw_bytes, sink, options.threads, on_tick)
        pipeline.run(_jobs(work, output.tasks, plan_jobs(output.tasks, sizes), pool.limit))
        writer.finish()
        return tuple(writer.digests)


def _jobs(work: MergeWork, tasks: Sequence[MergeTask], shapes: Iterator[JobShape], held_limit: int) -> Iterator[Job]:
    for shape in shapes:
        states = [TensorState(tasks[i], _operator_input(work, tasks[i])) for i in shape.task_indices]
        yield Job(shape, work.operator, states, held_limit)


def _operator_input(work: MergeWork, task: MergeTask) -> OperatorInput:
    return OperatorInput(
        globals=task.parameters.globals,
        anchor=task.parameters.anchor,
        experts=task.parameters.experts,
        n_elements=task.base.n_elements,
        stream_keys=tuple(stream_key(work.seed, each, task.name) for each in work.content_ids),
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
