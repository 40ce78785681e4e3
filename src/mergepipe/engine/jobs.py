"""Run one job: the passes over its segments, from the first read to the results passed to the writer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import F32, GRAIN_ELEMENTS, RawBlock, itemsize_of_code
from mergepipe.core.rounding import UNMEASURED
from mergepipe.engine.segments import HoldLimits, Piece, SegmentLayout, Segments, SegmentShape
from mergepipe.operators.base import BlockFunction, Reduced
from mergepipe.operators.elementwise import ElementwiseRule
from mergepipe.recipes.tasks import MergeTask
from mergepipe.storage.ranges import round_up, scratch

SURVEY_SEGMENTS = 8
SAMPLED_PIECE_ELEMENTS = 64 * 1024
HARMLESS_CHANGE = 0.02
"""The relative length of a change from which on a sample of it is scaled less; measured for decision 032."""
BASE_ALONE = ElementwiseRule(np.zeros(0, np.float32))
NOT_MEASURED = np.empty((0, 2))


class Stage(Enum):
    """The computation on a filled buffer."""

    SURVEY = auto()
    ACCUMULATE = auto()
    REFINE = auto()
    MERGE = auto()


@dataclass(frozen=True, slots=True)
class Pass:
    """One stage over some segments: `unread` are read first, the others are held from the pass before."""

    stage: Stage
    segments: tuple[SegmentShape, ...]
    unread: tuple[SegmentShape, ...]
    held: frozenset[int] = frozenset()  # numbers of the segments whose bytes are needed by the next pass
    writes: bool = False
    last_reads: bool = True  # no later pass of this job reads anything
    repeated: bool = False  # it reads what was read before: on top of the one pass that every merge makes, or spilled

    @property
    def holds_all(self) -> bool:
        """Whether the next pass needs every segment's bytes."""
        return len(self.held) == len(self.segments)


@dataclass(frozen=True, slots=True)
class Sample:
    """A tensor that is sampled in units of `unit_elements`: what a merge changes is multiplied, in float32.

    Other blocks are the base's. `factor` is one over the probability of the draw; where the change is long it is less
    (see `kernels.merge.scale_change`), for each stretch of elements by itself. Pieces are cut at multiples of
    `granularity` elements. Memory: a piece, in float32 and with the base's bytes, is 384 KiB a thread, or one stretch
    of `granularity`.
    """

    factor: float
    unit_elements: int
    granularity: int = 1

    @property
    def stretch_elements(self) -> int:
        """Elements that have one factor: units, whose edges are those of pieces, hold whole stretches."""
        return self.granularity if self.granularity > 1 else math.gcd(self.unit_elements, GRAIN_ELEMENTS)


class Reduction(Protocol):
    """Computes one tensor-wide quantity from the blocks it is given; those of one call lie in one buffer."""

    def survey(self, blocks: Sequence[RawBlock]) -> None:
        """Process sample blocks, before any `accumulate`."""
        ...

    def narrow(self) -> None:
        """Narrow the search by the surveyed sample."""
        ...

    def accumulate(self, blocks: Sequence[RawBlock]) -> None:
        """Add blocks; every element is added exactly once."""
        ...

    def finish(self) -> bool:
        """Whether the result is known; if not, pass every block to `refine`, then call `finish` again."""
        ...

    def refine(self, blocks: Sequence[RawBlock]) -> None:
        """Add blocks a second time."""
        ...

    def result(self) -> Reduced:
        """Return the answer, after `finish` returned True."""
        ...


class TensorWork:
    """The work on one tensor: an optional reduction over all of it, then a function for each block.

    Args:
        make_function: called once when the reduction is finished, on the coordinating thread; returns the block
            function, or None where nothing is written or bytes are copied.
        sample: how the result of the function is scaled, where only a sample is read; None where nothing is scaled.
    """

    def __init__(
        self,
        task: MergeTask,
        reduction: Reduction | None,
        make_function: Callable[[], BlockFunction | None],
        sample: Sample | None = None,
    ) -> None:
        self.task = task
        self.sample = sample
        self.rounding = UNMEASURED
        self.reduction = reduction
        self.function: BlockFunction | None = None
        self._make_function = make_function

    def conclude(self) -> None:
        """Make the block function and release the reduction."""
        self.function = self._make_function()
        self.reduction = None

    @property
    def is_copy(self) -> bool:
        """Whether the results are the base's bytes, after `conclude`."""
        copies = isinstance(self.function, ElementwiseRule) and self.function.copies_base
        return self.function is None or (copies and self.task.dtype == self.task.base.dtype)


@dataclass(frozen=True, slots=True)
class Tap:
    """Shows the bytes read of some tensors (by name), piece by piece, before they are merged.

    `look` is called once for each piece, from compute threads, with the buffer that it lies in.
    """

    tensors: frozenset[str]
    look: Callable[[MergeTask, Piece, NDArray[np.uint8]], None]


class Job:
    """Runs the passes over segments; `works` are those of their tasks. On the coordinating thread, but for `compute`.

    A tensor that is reduced first is held, as far as `limits` allow; what is not held is read again by each pass.
    `writes` is False for an analysis: then the work ends with the reductions. `reads_once` keeps what a budget has been
    charged for: what is read of a tensor that is not held whole `spills` to disk. A `tap` looks on.
    """

    def __init__(
        self,
        segments: Segments,
        works: Mapping[int, TensorWork],
        limits: HoldLimits,
        *,
        writes: bool = True,
        reads_once: bool = False,
        tap: Tap | None = None,
    ) -> None:
        self._segments = segments
        self._works = works
        self._limits = limits
        self._writes = writes
        self._tap = tap
        has_reductions = any(work.reduction for work in works.values())
        self._is_streamed = has_reductions and len(segments) > limits.whole_tensor
        self.spills = reads_once and self._is_streamed
        # The first stage that sees every piece: a survey sees a sample, which is accumulated after it.
        self._first_stage = Stage.ACCUMULATE if has_reductions else Stage.MERGE

    def passes(self) -> Iterator[Pass]:
        """Yield the passes in order; each may be computed only when the one before is complete."""
        segments = self._segments
        if not any(work.reduction for work in self._works.values()):
            self._conclude()
            if self._writes:
                yield Pass(Stage.MERGE, segments, segments, writes=True)
        elif self._is_streamed:
            yield from self._passes_streaming()
        else:
            yield from self._passes_in_memory()

    def _passes_in_memory(self) -> Iterator[Pass]:
        segments = self._segments
        everything = _numbers(segments)
        yield Pass(Stage.ACCUMULATE, segments, segments, everything)
        while not self._finish_reductions():
            yield Pass(Stage.REFINE, segments, (), everything)
        self._conclude()
        yield Pass(Stage.MERGE, segments, (), writes=self._writes)

    def _passes_streaming(self) -> Iterator[Pass]:
        segments = self._segments
        sample = _spread(segments, min(SURVEY_SEGMENTS, self._limits.whole_tensor))
        sampled = _numbers(sample)
        rest = tuple(s for s in segments if s.number not in sampled)
        held = _numbers((*sample, *rest)[: self._limits.part_of_tensor])
        again = tuple(s for s in segments if s.number not in held)
        yield Pass(Stage.SURVEY, sample, sample, sampled, last_reads=False)
        for work in self._works.values():
            if work.reduction:
                work.reduction.narrow()
        yield Pass(Stage.ACCUMULATE, segments, rest, held, last_reads=False)
        while not self._finish_reductions():
            yield Pass(Stage.REFINE, segments, again, held, last_reads=False, repeated=True)
        self._conclude()
        if self._writes:
            yield Pass(Stage.MERGE, segments, again, writes=True, repeated=True)
        elif held:
            kept = tuple(s for s in segments if s.number in held)
            yield Pass(Stage.MERGE, kept, ())

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
        filled = (piece for piece in layout.pieces if piece.run.span.n_elements)
        for index, pieces in groupby(filled, lambda piece: piece.run.task_index):
            self._compute_pieces(stage, self._works[index], list(pieces), buffer)

    def results(self, layout: SegmentLayout) -> Iterator[Piece]:
        """Yield the pieces of a merged buffer; `out_offset` of a copy is where it was read."""
        for piece in layout.pieces:
            is_copy = self._works[piece.run.task_index].is_copy
            yield replace(piece, out_offset=piece.base_offset) if is_copy else piece

    def _compute_pieces(
        self, stage: Stage, work: TensorWork, pieces: Sequence[Piece], buffer: NDArray[np.uint8]
    ) -> None:
        """Run `stage` on the pieces of one tensor."""
        for piece in pieces:
            if self._tap is not None and stage is self._first_stage and work.task.name in self._tap.tensors:
                self._tap.look(work.task, piece, buffer)
            if stage is Stage.MERGE:
                merge_piece(work, piece, buffer)
        if work.reduction:
            steps: dict[Stage, Callable[[Sequence[RawBlock]], None]] = {
                Stage.SURVEY: work.reduction.survey,
                Stage.ACCUMULATE: work.reduction.accumulate,
                Stage.REFINE: work.reduction.refine,
            }
            counted = [piece for piece in pieces if work.sample is None or piece.run.is_counted]
            steps[stage]([_raw_block(work.task, piece, buffer) for piece in counted])


def _spread(segments: tuple[SegmentShape, ...], size: int) -> tuple[SegmentShape, ...]:
    """Return `size` segments spread evenly over the tensor."""
    chosen = {len(segments) * (2 * i + 1) // (2 * size) for i in range(size)}
    return tuple(s for i, s in enumerate(segments) if i in chosen)


def _numbers(segments: Iterable[SegmentShape]) -> frozenset[int]:
    return frozenset(segment.number for segment in segments)


def merge_piece(work: TensorWork, piece: Piece, buffer: NDArray[np.uint8]) -> None:
    """Merge one piece inside its filled buffer, after `TensorWork.conclude`; a copy stays where it was read."""
    task, function = work.task, work.function
    if function is None or work.is_copy:
        return
    if work.sample is None:
        function(_result_block(work, piece, buffer))
    elif piece.run.is_counted:
        merge_scaled(_result_block(work, piece, buffer), function, work.sample)
    elif task.dtype == task.base.dtype:
        nbytes = piece.run.span.n_elements * task.dtype.itemsize
        buffer[piece.out_offset :][:nbytes] = buffer[piece.base_offset :][:nbytes]
    else:
        BASE_ALONE(_result_block(work, piece, buffer))


def merge_scaled(block: RawBlock, function: BlockFunction, sample: Sample) -> None:
    """Merge a block in float32 and write the base plus the sample's factors times what that changed, rounded once."""
    from mergepipe.kernels.merge import scale_change

    stretch = sample.stretch_elements
    most = min(stretch * max(1, SAMPLED_PIECE_ELEMENTS // stretch), block.n_elements)
    merged_offset = round_up(most * itemsize_of_code(block.base_code), F32.itemsize)
    room = scratch("merged-sample", merged_offset + most * F32.itemsize, np.uint8)
    only, offset, code = (np.array([value], np.int64) for value in (0, merged_offset, F32.kernel_code))
    for skip in range(0, block.n_elements, most):
        piece = block.part(skip, min(most, block.n_elements - skip)) if most < block.n_elements else block
        function(piece._replace(out=room, out_offset=merged_offset, out_code=F32.kernel_code))
        base_bytes = piece.n_elements * itemsize_of_code(block.base_code)
        room[:base_bytes] = piece.raw[piece.base_offset : piece.base_offset + base_bytes]
        merged = piece._replace(raw=room, base_offset=0, present_E=only, counted_E=only, offsets_E=offset, codes_E=code)
        scale_change(merged, sample.factor, stretch, HARMLESS_CHANGE)


def _result_block(work: TensorWork, piece: Piece, buffer: NDArray[np.uint8]) -> RawBlock:
    """Return a block whose result is rounded as the tensor's are; what that keeps is measured if anything is lost."""
    key = np.uint64(work.rounding.key)
    sums_G2 = work.rounding.sums_of(piece.run.span)
    return _raw_block(work.task, piece, buffer)._replace(rounding_key=key, sums_G2=sums_G2)


def _raw_block(task: MergeTask, piece: Piece, buffer: NDArray[np.uint8]) -> RawBlock:
    present = piece.run.present
    codes = [piece.run.source(task, e).kernel_code for e in present]
    return RawBlock(
        raw=buffer,
        base_offset=piece.base_offset,
        base_code=task.base.kernel_code,
        present_E=np.array(present, np.int64),
        counted_E=np.array(sorted((*present, *piece.run.free)), np.int64),
        offsets_E=np.array(piece.expert_offsets, np.int64),
        codes_E=np.array(codes, np.int64),
        first_element=piece.run.span.start,
        n_elements=piece.run.span.n_elements,
        out=buffer,
        out_offset=piece.out_offset,
        out_code=task.dtype.kernel_code,
        rounding_key=np.uint64(0),
        sums_G2=NOT_MEASURED,
        first_grain=piece.run.span.start // GRAIN_ELEMENTS,
    )
