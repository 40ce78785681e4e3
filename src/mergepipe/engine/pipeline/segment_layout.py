"""Lay out a segment in its buffer: byte ranges to read, joined where they touch, then tensors to compute.

Pure planning: no file is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, NeedsBase, Readable, TensorEntry
from mergepipe.core.blocks import Span
from mergepipe.engine.pipeline.segments import Run, SegmentShape
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.storage.buffers import PAGE_BYTES, round_up
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class Read:
    """One request: `nbytes` at `offset` of a file, to `buffer_offset`; all multiples of the file's alignment."""

    file: Location
    offset: int
    nbytes: int
    buffer_offset: int
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class Computation:
    """Elements of a computed tensor to be fetched into the buffer, at `buffer_offset`.

    The stored bytes of the base's same elements are `base_bytes` at `base_offset`; it is fetched `on_base`, with
    them, where they are what it is encoded on.
    """

    source: ComputedTensor
    span: Span
    buffer_offset: int
    base_offset: int
    base_bytes: int
    on_base: bool
    purpose: Purpose

    @property
    def key(self) -> tuple[int, bool]:
        """Equal for computations that share one opened source, while that source is alive."""
        return id(self.source), self.on_base

    @property
    def nbytes(self) -> int:
        return self.span.n_elements * self.source.dtype.itemsize

    def place_in(self, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the part of the buffer that the elements go to."""
        return buffer[self.buffer_offset : self.buffer_offset + self.nbytes]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run with the places of its bytes in the buffer: stored bytes from 0, results from `out_offset`."""

    run: Run
    base_offset: int
    expert_offsets: tuple[int, ...]
    out_offset: int


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The reads, computations and pieces that fill, merge and write one buffer."""

    shape: SegmentShape
    reads: tuple[Read, ...]
    computations: tuple[Computation, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _NeededElements:
    """A source's elements that a segment needs; `base` is the index of the base's elements in the same list."""

    source: Readable
    span: Span
    purpose: Purpose
    base: int


def lay_out(
    shape: SegmentShape, tasks: Sequence[MergeTask], out_start: int, alignment_of: Callable[[Location], int]
) -> SegmentLayout:
    """Place a segment's sources in its buffer: byte ranges, joined where they touch, then computed tensors."""
    needed: list[_NeededElements] = []
    for run in shape.runs:
        task, base = tasks[run.task_index], len(needed)
        needed.append(_NeededElements(task.base, run.span, Purpose.BASE, base))
        experts = [run.source(task, e) for e in run.read_experts]
        needed.extend(_NeededElements(source, run.span, Purpose.EXPERT, base) for source in experts)
    reads, places = _join(needed, alignment_of)
    end = round_up(reads[-1].buffer_offset + reads[-1].nbytes, PAGE_BYTES) if reads else 0
    computations = _place_computed(needed, places, end)
    pieces, position, out_offset = [], 0, out_start
    for run in shape.runs:
        stop = position + 1 + len(run.read_experts)
        place_of = dict(zip(run.read_experts, places[position + 1 : stop], strict=True))
        pieces.append(Piece(run, places[position], tuple(place_of[e] for e in run.sources), out_offset))
        position = stop
        out_offset += run.span.n_elements * tasks[run.task_index].dtype.itemsize
    return SegmentLayout(shape, tuple(reads), computations, tuple(pieces))


def is_on_base(source: Readable, base: Readable) -> bool:
    """Whether `source` is encoded on just this base."""
    return isinstance(source, NeedsBase) and source.encoded_on == base


def _place_computed(needed: Sequence[_NeededElements], places: list[int], position: int) -> tuple[Computation, ...]:
    """Give computed tensors their places after `position`."""
    computations = []
    for i, elements in enumerate(needed):
        if not isinstance(elements.source, TensorEntry):
            places[i] = position
            base = needed[elements.base].source
            computations.append(
                Computation(
                    source=elements.source,
                    span=elements.span,
                    buffer_offset=position,
                    base_offset=places[elements.base],
                    base_bytes=elements.span.n_elements * base.dtype.itemsize,
                    on_base=is_on_base(elements.source, base),
                    purpose=elements.purpose,
                )
            )
            position = round_up(position + computations[-1].nbytes, PAGE_BYTES)
    return tuple(computation for computation in computations if computation.span.n_elements)


def _join(needed: Sequence[_NeededElements], alignment_of: Callable[[Location], int]) -> tuple[list[Read], list[int]]:
    """Return requests that cover all stored ranges, and the buffer offset of each range's first byte."""
    entries = [(i, elements.source) for i, elements in enumerate(needed) if isinstance(elements.source, TensorEntry)]
    starts = {i: entry.offset + needed[i].span.start * entry.dtype.itemsize for i, entry in entries}
    entries.sort(key=lambda pair: (needed[pair[0]].purpose, str(pair[1].file), starts[pair[0]]))
    reads: list[Read] = []
    places = [0] * len(needed)
    position = 0
    for i, entry in entries:
        span, purpose = needed[i].span, needed[i].purpose
        alignment = alignment_of(entry.file)
        first = starts[i] // alignment * alignment
        last = round_up(starts[i] + span.n_elements * entry.dtype.itemsize, alignment) if span.n_elements else first
        previous = reads[-1] if reads else None
        if (
            previous is not None
            and (previous.file, previous.purpose) == (entry.file, purpose)
            and previous.offset <= first <= previous.offset + previous.nbytes
        ):
            grown = max(previous.nbytes, last - previous.offset)
            reads[-1] = Read(previous.file, previous.offset, grown, previous.buffer_offset, purpose)
        else:
            reads.append(Read(entry.file, first, last - first, position, purpose))
        position = round_up(reads[-1].buffer_offset + reads[-1].nbytes, PAGE_BYTES)
        places[i] = reads[-1].buffer_offset + starts[i] - reads[-1].offset
    return [read for read in reads if read.nbytes], places
