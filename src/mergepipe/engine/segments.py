"""Cut the work into segments, read into one buffer, merged there and written in order, and lay out each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, LeveledTensor, Readable, TensorEntry, Unchanged
from mergepipe.core.blocks import F32, GRAIN_ELEMENTS, Span
from mergepipe.core.units import size_option
from mergepipe.errors import LimitError
from mergepipe.recipes.tasks import MergeTask
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES, round_up

# --- lay out a segment in its buffer: byte ranges to read, joined where they touch, then tensors to compute ---
#
# Pure planning: no file is opened.


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
        experts = [run.source(task, e) for e in run.present]
        needed.extend(_NeededElements(source, run.span, Purpose.EXPERT, base) for source in experts)
    reads, places = _join(needed, alignment_of)
    end = round_up(reads[-1].buffer_offset + reads[-1].nbytes, PAGE_BYTES) if reads else 0
    computations = _place_computed(needed, places, end)
    pieces, position, out_offset = [], 0, out_start
    for run in shape.runs:
        stop = position + 1 + len(run.present)
        pieces.append(Piece(run, places[position], tuple(places[position + 1 : stop]), out_offset))
        position = stop
        out_offset += run.span.n_elements * tasks[run.task_index].dtype.itemsize
    return SegmentLayout(shape, tuple(reads), computations, tuple(pieces))


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
                    on_base=elements.source.encoded_on == base,
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


# --- cut the work into segments: runs that are read into one buffer, merged there and written in order ---
#
# Pure planning: no file is opened. A segment holds either a run of one tensor or several whole small tensors.


IDEAL_BUFFER_BYTES = 16 << 20
LARGEST_SHARE_OF_MEMORY = 8  # a buffer takes at most 1/8 of the memory cap where it can
FEWEST_BUFFERS = 3
HELD_BYTES = 896 << 20  # of one tensor between passes, where reading again costs little
SHARE_TO_HOLD = 5  # with a larger memory cap, a fifth of it
SHARE_READ_AGAIN = 6  # more is held where more than a sixth of all bytes would be read again
RESERVED_BUFFERS = 24  # for reads while a tensor is held in part
MOST_COUNTED = 16  # pairs of a small tensor and an expert in one buffer: reductions count each in up to 1 MiB
# A read may be rounded out by just under a page at either end, and starts on a page of the buffer.
ROUNDING_BYTES = 2 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one tensor for which the same experts take part.

    `present` are the experts that are read, `free` those that equal the base here and are not read. `levels` are
    (expert, level) of those that are read in part.
    """

    task_index: int
    span: Span
    present: tuple[int, ...]
    free: tuple[int, ...] = ()
    levels: tuple[tuple[int, int], ...] = ()

    def source(self, task: MergeTask, expert: int) -> Readable:
        """Return the source that is read of an expert, at its level."""
        source = task.experts[expert]
        if isinstance(source, Unchanged):
            raise ValueError(f"{source.name} is not changed by this expert: there is nothing to read")
        for e, level in self.levels:
            if e == expert:
                return at_level(source, level)
        return source

    @property
    def is_counted(self) -> bool:
        """Whether anything is known of any expert here: of what a sample did not draw nothing is."""
        return bool(self.present or self.free)


RunsOf = Callable[[int, MergeTask], Iterable[Run]]


def at_level(source: Readable, level: int) -> Readable:
    """Return the source at a level: itself at 0."""
    if not level:
        return source
    if not isinstance(source, LeveledTensor):
        raise ValueError(f"{source.name} has no levels: it is read as it is")
    return source.at_level(level)


Levels = tuple[tuple[int, int], ...]


def full_access(task_index: int, task: MergeTask, levels: Levels = ()) -> tuple[Run]:
    """Return the run that reads every expert, except those known not to change the tensor."""
    unchanged = tuple(e for e, source in enumerate(task.experts) if isinstance(source, Unchanged))
    present = tuple(e for e in range(len(task.experts)) if e not in unchanged)
    return (Run(task_index, Span(0, task.base.n_elements), present, unchanged, levels),)


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """The runs of one segment. `number` counts segments in output order."""

    number: int
    runs: tuple[Run, ...]


Segments = tuple[SegmentShape, ...]
"""Segments that need one another: all of one large tensor, or one segment of small tensors."""


def tasks_of(segments: Segments) -> Iterable[int]:
    """Return the tasks that segments hold runs of, in order, by their indices."""
    return dict.fromkeys(run.task_index for segment in segments for run in segment.runs)


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Bytes of one buffer: the region for stored bytes, then the region for results."""

    raw_bytes: int
    out_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.raw_bytes + self.out_bytes


def stored_bytes(task: MergeTask, n_elements: int, experts: Sequence[int]) -> int:
    """Buffer bytes that `n_elements` of the base and of `experts` need at most, rounding of reads included."""
    item_bytes = task.base.dtype.itemsize
    for source in (task.experts[e] for e in experts):  # at the level with the widest elements
        item_bytes += max(source.dtype.itemsize, F32.itemsize if isinstance(source, LeveledTensor) else 0)
    return n_elements * item_bytes + (1 + len(experts)) * ROUNDING_BYTES


CutOf = Callable[[MergeTask], int]
"""Elements whose multiples are where a task's tensor may be cut."""


def cut_everywhere(cut_elements: int) -> CutOf:
    """Return the same cuts for every task."""
    return lambda _: cut_elements


CUT_AT_GRAINS = cut_everywhere(GRAIN_ELEMENTS)


def uncut_blocks(cut_of: CutOf, tasks: Sequence[MergeTask], memory_bytes: int) -> CutOf:
    """Restrict the cuts to those between encoded blocks, so that no block is decoded twice.

    Where buffers for that do not fit into `memory_bytes`, the cuts stay.
    """

    def coarse(task: MergeTask) -> int:
        return math.lcm(cut_of(task), *(source.cut_elements for source in (task.base, *task.experts)))

    return coarse if memory_bytes >= FEWEST_BUFFERS * sum(_smallest_buffer(tasks, coarse)) else cut_of


def choose_buffer_sizes(
    tasks: Sequence[MergeTask],
    memory_bytes: int,
    cut_of: CutOf = CUT_AT_GRAINS,
    reserved_bytes: int = 0,
    *,
    in_part: bool = False,
) -> BufferSizes:
    """Pick the buffer size for a memory cap; a buffer holds at least one stretch between cuts of every model.

    `memory_bytes` is what the cap leaves for buffers, after `reserved_bytes` for something else. Where models are read
    `in_part`, most stretches need hardly more than the base's bytes: more room is for results.
    """
    raw_bytes, out_bytes = _smallest_buffer(tasks, cut_of)
    smallest = raw_bytes + out_bytes
    needed = FEWEST_BUFFERS * smallest
    if memory_bytes < needed:
        raise LimitError.of(
            "memory.too-small",
            "--memory",
            f"{memory_bytes + reserved_bytes} bytes were allowed, at least {needed + reserved_bytes} are needed",
            f"raise --memory to {size_option(needed + reserved_bytes)} or more",
        )
    ideal = max(smallest, min(IDEAL_BUFFER_BYTES, memory_bytes // LARGEST_SHARE_OF_MEMORY))
    results = max(out_bytes * ideal // smallest, min(ideal // 4, ideal - raw_bytes) if in_part else 0)
    results = max(out_bytes, results // PAGE_BYTES * PAGE_BYTES)
    return BufferSizes(round_up(ideal - results, PAGE_BYTES), results)


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """The buffers that may hold one tensor between passes: all of it, or a part while the rest is read again."""

    whole_tensor: int
    part_of_tensor: int

    @classmethod
    def of(cls, n_buffers: int) -> HoldLimits:
        """Return the limits of a pool that may be used up; half of a small one is left for reads."""
        return cls(n_buffers, n_buffers - min(RESERVED_BUFFERS, -(-n_buffers // 2)))

    @classmethod
    def sparing(cls, n_buffers: int, sizes: BufferSizes, tasks: Sequence[MergeTask]) -> HoldLimits:
        """Return limits that leave memory unused: where little is read again for it, which costs little."""
        ample = cls.of(n_buffers)
        largest_bytes = n_buffers * sizes.total_bytes
        merged = [(task.base, len(task.experts), task.dtype) for task in tasks if task.experts]
        bytes_T = [base.n_elements * (base.dtype.itemsize * (1 + k) + dtype.itemsize) for base, k, dtype in merged]
        held_bytes = max(HELD_BYTES, largest_bytes // SHARE_TO_HOLD)
        while held_bytes < largest_bytes:
            if sum(max(0, nbytes - held_bytes) for nbytes in bytes_T) <= sum(bytes_T) // SHARE_READ_AGAIN:
                break
            held_bytes += held_bytes // 4
        most = held_bytes // sizes.total_bytes
        return cls(min(ample.whole_tensor, most), min(ample.part_of_tensor, most))


def _smallest_buffer(tasks: Sequence[MergeTask], cut_of: CutOf) -> tuple[int, int]:
    """Bytes for the stored and the resulting stretch between cuts of the widest task."""
    raw = out = PAGE_BYTES
    for task in tasks:
        n = min(cut_of(task), task.base.n_elements)
        raw = max(raw, stored_bytes(task, n, range(len(task.experts))), n * task.dtype.itemsize + ROUNDING_BYTES)
        out = max(out, n * task.dtype.itemsize)
    return round_up(raw, PAGE_BYTES), round_up(out, PAGE_BYTES)


def plan_jobs(
    tasks: Sequence[MergeTask],
    sizes: BufferSizes,
    runs_of: RunsOf = full_access,
    cut_of: CutOf = CUT_AT_GRAINS,
    starts: Collection[int] = (),
) -> Iterator[Segments]:
    """Cut `tasks` (in output order) into jobs, lazily. No job reaches across `starts`, the first tasks of shards.

    Laws: the runs of each task are disjoint, in order and cover its tensor; every segment fits its buffer; every cut
    inside a tensor falls on a multiple of `cut_of` its task; the jobs of a shard do not depend on other shards.
    """
    packer = _Packer(tasks, sizes, cut_of)
    for index, task in enumerate(tasks):
        runs = tuple(runs_of(index, task))
        if index in starts and packer.runs:
            yield packer.close()
        if packer.fits_whole(runs):
            if not packer.has_room(runs):
                yield packer.close()
            packer.add(runs)
        else:
            if packer.runs:
                yield packer.close()
            yield packer.large(index, runs)
    if packer.runs:
        yield packer.close()


class _Packer:
    """Fills one segment at a time."""

    def __init__(self, tasks: Sequence[MergeTask], sizes: BufferSizes, cut_of: CutOf) -> None:
        self._tasks = tasks
        self._sizes = sizes
        self._cut_of = cut_of
        self._number = 0
        self.runs: list[Run] = []
        self._raw = 0
        self._out = 0
        self._counted = 0

    def _need(self, runs: Iterable[Run]) -> tuple[int, int]:
        raw = out = 0
        for run in runs:
            task = self._tasks[run.task_index]
            raw += stored_bytes(task, run.span.n_elements, run.present)
            out += run.span.n_elements * task.dtype.itemsize
        return raw, out

    def fits_whole(self, runs: Sequence[Run]) -> bool:
        raw, out = self._need(runs)
        return raw <= self._sizes.raw_bytes and out <= self._sizes.out_bytes

    def has_room(self, runs: Sequence[Run]) -> bool:
        raw, out = self._need(runs)
        has_bytes = self._raw + raw <= self._sizes.raw_bytes and self._out + out <= self._sizes.out_bytes
        return has_bytes and (not self.runs or self._counted + self._pairs(runs) <= MOST_COUNTED)

    def _pairs(self, runs: Sequence[Run]) -> int:
        """Count the experts of some runs' tensors."""
        return sum(len(self._tasks[index].experts) for index in {run.task_index for run in runs})

    def add(self, runs: Sequence[Run]) -> None:
        raw, out = self._need(runs)
        self._counted += self._pairs(runs)
        self.runs.extend(runs)
        self._raw += raw
        self._out += out

    def _segment(self) -> SegmentShape:
        segment = SegmentShape(self._number, tuple(self.runs))
        self._number += 1
        self.runs, self._raw, self._out, self._counted = [], 0, 0, 0
        return segment

    def close(self) -> Segments:
        return (self._segment(),)

    def large(self, index: int, runs: Sequence[Run]) -> Segments:
        segments = []
        for run in runs:
            start = run.span.start
            while start < run.span.stop:
                stop = self._furthest(run, start)
                if stop == start:
                    if not self.runs:
                        raise ValueError(f"no buffer holds elements {start} to {run.span.stop} of task {index}")
                    segments.append(self._segment())
                    continue
                self.add((replace(run, span=Span(start, stop)),))
                start = stop
        if self.runs:
            segments.append(self._segment())
        return tuple(segments)

    def _furthest(self, run: Run, start: int) -> int:
        """Return where a piece of `run` from `start` can end in this segment: its end, or a cut; `start` if nowhere."""
        if self.has_room((replace(run, span=Span(start, run.span.stop)),)):
            return run.span.stop
        cut = self._cut_of(self._tasks[run.task_index])
        task = self._tasks[run.task_index]
        fixed = stored_bytes(task, 0, run.present)
        raw_each = stored_bytes(task, cut, run.present) - fixed
        out_each = cut * task.dtype.itemsize
        raw_room = (self._sizes.raw_bytes - self._raw - fixed) // raw_each
        cuts = max(0, min(raw_room, (self._sizes.out_bytes - self._out) // out_each))
        return min(run.span.stop, (start // cut + cuts) * cut) if cuts else start
