"""Run one job: the passes over its segments, from the first read to the results passed to the writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.values import dataclass
from mergepipe.engine.observer import Tap
from mergepipe.engine.pipeline.segment_layout import Piece, SegmentLayout
from mergepipe.engine.pipeline.segments import JobShape, SegmentShape
from mergepipe.engine.reductions.block_reductions import Reduction
from mergepipe.errors import LimitError
from mergepipe.operators.base import NOTHING_REDUCED, BlockFunction, RawBlock, Reduced
from mergepipe.recipes.resolve.tasks import MergeTask

SURVEY_SEGMENTS = 8


class Stage(Enum):
    """The computation on a filled buffer."""

    SURVEY = auto()
    ACCUMULATE = auto()
    REFINE = auto()
    MERGE = auto()


class Afterwards(Enum):
    """The fate of the buffer after the stage: kept, written or released."""

    HOLD = auto()  # its bytes are needed by the next pass
    RELEASE = auto()
    WRITE = auto()


@dataclass(frozen=True, slots=True)
class Pass:
    """One stage over some segments. `reads`: they are to be read first, else they are held from the pass before."""

    stage: Stage
    segments: tuple[SegmentShape, ...]
    reads: bool
    afterwards: Afterwards
    last_reads: bool  # no later pass of this job reads anything
    repeated: bool = False  # its reads come on top of the one pass that every merge makes


class TensorWork:
    """The work on one tensor: an optional reduction over all of it, then a function for each block.

    Args:
        make_function: given what was reduced, the block function; None where nothing is written or bytes are copied.
        on_reduced: told once when the reduction is finished, on the coordinating thread.
    """

    def __init__(
        self,
        task: MergeTask,
        reduction: Reduction | None,
        make_function: Callable[[Reduced], BlockFunction | None],
        on_reduced: Callable[[], None] = lambda: None,
    ) -> None:
        self.task = task
        self.reduction = reduction
        self.function: BlockFunction | None = None
        self._make_function = make_function
        self._on_reduced = on_reduced

    def conclude(self) -> None:
        """Make the block function and release the reduction."""
        reduced = NOTHING_REDUCED
        if self.reduction is not None:
            reduced = self.reduction.result()
            self._on_reduced()
        self.function = self._make_function(reduced)
        self.reduction = None


class Job:
    """Runs the passes of one `JobShape`. Used by the coordinating thread, but for `compute`.

    `writes` is False for an analysis: then the work ends with the reductions. `reads_once` refuses what a budget has
    not been charged for: reading a tensor again that does not fit into memory. A `tap` looks on.
    """

    def __init__(
        self,
        shape: JobShape,
        works: Sequence[TensorWork],
        held_limit: int,
        *,
        writes: bool = True,
        reads_once: bool = False,
        tap: Tap | None = None,
    ) -> None:
        self.shape = shape
        self._works = dict(zip(shape.task_indices, works, strict=True))
        self._held_limit = held_limit
        self._writes = writes
        self._reads_once = reads_once
        self._tap = tap
        # The first stage that sees every piece: a survey sees a sample, which is accumulated after it.
        self._first_stage = Stage.ACCUMULATE if any(work.reduction for work in works) else Stage.MERGE

    def passes(self) -> Iterator[Pass]:
        """Yield the passes in order; each may be computed only when the one before is complete."""
        if not any(work.reduction for work in self._works.values()):
            self._conclude()
            if self._writes:
                yield Pass(Stage.MERGE, self.shape.segments, True, Afterwards.WRITE, last_reads=True)
        elif len(self.shape.segments) <= self._held_limit:
            yield from self._passes_in_memory()
        elif self._reads_once:
            name = next(work.task.name for work in self._works.values() if work.reduction)
            raise LimitError.of(
                "memory.plan",
                name,
                f"{len(self.shape.segments)} buffers would hold this tensor, --memory allows {self._held_limit}",
                "raise --memory, or run `mergepipe analyze` first so that it need not be held",
            )
        else:
            yield from self._passes_streaming()

    def _passes_in_memory(self) -> Iterator[Pass]:
        segments = self.shape.segments
        yield Pass(Stage.ACCUMULATE, segments, True, Afterwards.HOLD, last_reads=True)
        while not self._finish_reductions():
            yield Pass(Stage.REFINE, segments, False, Afterwards.HOLD, last_reads=True)
        self._conclude()
        last = Pass(Stage.MERGE, segments, False, Afterwards.WRITE, last_reads=True)
        yield last if self._writes else Pass(Stage.MERGE, segments, False, Afterwards.RELEASE, last_reads=True)

    def _passes_streaming(self) -> Iterator[Pass]:
        segments = self.shape.segments
        sample, rest = _split_sample(segments, min(SURVEY_SEGMENTS, self._held_limit))
        yield Pass(Stage.SURVEY, sample, True, Afterwards.HOLD, last_reads=False)
        for work in self._works.values():
            if work.reduction:
                work.reduction.narrow()
        yield Pass(Stage.ACCUMULATE, sample, False, Afterwards.RELEASE, last_reads=False)
        yield Pass(Stage.ACCUMULATE, rest, True, Afterwards.RELEASE, last_reads=False)
        while not self._finish_reductions():  # an analysis refines once
            yield Pass(Stage.REFINE, segments, True, Afterwards.RELEASE, last_reads=not self._writes, repeated=True)
        self._conclude()
        if self._writes:
            yield Pass(Stage.MERGE, segments, True, Afterwards.WRITE, last_reads=True, repeated=True)

    def _finish_reductions(self) -> bool:
        finished = [work.reduction.finish() for work in self._works.values() if work.reduction]
        return all(finished)

    def _conclude(self) -> None:
        for work in self._works.values():
            work.conclude()

    def compute(self, stage: Stage, layout: SegmentLayout, buffer: NDArray[np.uint8]) -> None:
        """Run `stage` on the filled `buffer`. Called from compute threads."""
        if stage is Stage.MERGE and not self._writes:
            return
        for piece in layout.pieces:
            if piece.run.span.n_elements:
                if self._tap is not None and stage is self._first_stage:
                    self._show(self._tap, piece, buffer)
                self._compute_piece(stage, piece, buffer)

    def _show(self, tap: Tap, piece: Piece, buffer: NDArray[np.uint8]) -> None:
        task = self._works[piece.run.task_index].task
        if task.name in tap.tensors:
            tap.look(task, piece, buffer)

    def _compute_piece(self, stage: Stage, piece: Piece, buffer: NDArray[np.uint8]) -> None:
        work = self._works[piece.run.task_index]
        if stage is Stage.MERGE:
            merge_piece(work, piece, buffer)
        elif work.reduction:
            steps: dict[Stage, Callable[[RawBlock], None]] = {
                Stage.SURVEY: work.reduction.survey,
                Stage.ACCUMULATE: work.reduction.accumulate,
                Stage.REFINE: work.reduction.refine,
            }
            steps[stage](_raw_block(work.task, piece, buffer))


def _split_sample(
    segments: tuple[SegmentShape, ...], size: int
) -> tuple[tuple[SegmentShape, ...], tuple[SegmentShape, ...]]:
    """`size` segments spread evenly over the tensor, and the others."""
    chosen = {len(segments) * (2 * i + 1) // (2 * size) for i in range(size)}
    sample = tuple(s for i, s in enumerate(segments) if i in chosen)
    return sample, tuple(s for i, s in enumerate(segments) if i not in chosen)


def merge_piece(work: TensorWork, piece: Piece, buffer: NDArray[np.uint8]) -> None:
    """Merge or copy one piece inside its filled buffer, after `TensorWork.conclude`."""
    task = work.task
    function = work.function
    is_reused = piece.run.reused is not None
    if is_reused or function is None or (function.copies_base and task.dtype == task.base.dtype):
        nbytes = piece.run.span.n_elements * task.dtype.itemsize
        source = buffer[piece.base_offset : piece.base_offset + nbytes]
        buffer[piece.out_offset : piece.out_offset + nbytes] = source
    else:
        function(_raw_block(task, piece, buffer))


def _raw_block(task: MergeTask, piece: Piece, buffer: NDArray[np.uint8]) -> RawBlock:
    present = piece.run.present
    return RawBlock(
        raw=buffer,
        base_offset=piece.base_offset,
        base_code=task.base.kernel_code,
        present_E=np.array(present, np.int64),
        counted_E=np.array(sorted((*present, *piece.run.free)), np.int64),
        offsets_E=np.array(piece.expert_offsets, np.int64),
        codes_E=np.array([piece.run.source(task, e).kernel_code for e in present], np.int64),
        first_element=piece.run.span.start,
        n_elements=piece.run.span.n_elements,
        out=buffer,
        out_offset=piece.out_offset,
        out_code=task.dtype.kernel_code,
    )
