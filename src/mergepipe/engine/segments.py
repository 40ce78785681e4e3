"""Cuts the work into segments: what is read together into one buffer, merged there and written in order.

Pure planning: no file is opened. A segment holds either a run of one tensor or several whole small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.blocks import GRAIN_ELEMENTS, Span
from mergepipe.budget import Purpose
from mergepipe.errors import LimitError
from mergepipe.readers.base import TensorEntry
from mergepipe.recipe.resolve import MergeTask
from mergepipe.storage.buffers import PAGE_BYTES, round_up

IDEAL_BUFFER_BYTES = 16 << 20
LARGEST_SHARE_OF_MEMORY = 8  # a buffer takes at most 1/8 of the memory cap where it can
FEWEST_BUFFERS = 3
# A read may be rounded out by just under a page at either end, and starts on a page of the buffer.
ROUNDING_BYTES = 2 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one tensor for which the same experts take part.

    `sources[i]` is the expert whose stored bytes serve `present[i]`: itself, or one with identical bytes. `free` are
    experts that equal the base here and are not read.
    """

    task_index: int
    span: Span
    present: tuple[int, ...]
    sources: tuple[int, ...]
    free: tuple[int, ...] = ()

    @property
    def read_experts(self) -> tuple[int, ...]:
        """The experts whose bytes are read, each once."""
        return tuple(dict.fromkeys(self.sources))


RunsOf = Callable[[int, MergeTask], Iterable[Run]]


def full_access(task_index: int, task: MergeTask) -> Iterable[Run]:
    """Every expert everywhere."""
    everyone = tuple(range(len(task.experts)))
    return (Run(task_index, Span(0, task.base.n_elements), everyone, everyone),)


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """The runs of one segment. `number` counts segments in output order."""

    number: int
    runs: tuple[Run, ...]
    out_bytes: int


@dataclass(frozen=True, slots=True)
class JobShape:
    """Segments that need one another: all of one large tensor, or one segment of small tensors."""

    task_indices: tuple[int, ...]
    segments: tuple[SegmentShape, ...]


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
    sizes = [task.base.dtype.itemsize, *(task.experts[e].dtype.itemsize for e in experts)]
    return sum(n_elements * size + ROUNDING_BYTES for size in sizes)


def choose_buffer_sizes(
    tasks: Sequence[MergeTask], memory_bytes: int, cut_elements: int = GRAIN_ELEMENTS, reserved_bytes: int = 0
) -> BufferSizes:
    """Pick the buffer size for a memory cap; a buffer holds at least `cut_elements` of every model.

    `memory_bytes` is what the cap leaves for buffers, after `reserved_bytes` for something else.

    Raises:
        LimitError: not even three buffers of the smallest useful size fit into the cap.
    """
    raw_bytes, out_bytes = _smallest_buffer(tasks, cut_elements)
    smallest = raw_bytes + out_bytes
    needed = FEWEST_BUFFERS * smallest
    if memory_bytes < needed:
        raise LimitError.of(
            "memory.too-small",
            "--memory",
            f"{memory_bytes + reserved_bytes} bytes were allowed, at least {needed + reserved_bytes} are needed",
            "raise --memory",
        )
    wanted = max(smallest, min(IDEAL_BUFFER_BYTES, memory_bytes // LARGEST_SHARE_OF_MEMORY))
    scale = wanted / smallest
    return BufferSizes(
        round_up(int(raw_bytes * scale), PAGE_BYTES), max(out_bytes, int(out_bytes * scale) // PAGE_BYTES * PAGE_BYTES)
    )


def fits_memory(tasks: Sequence[MergeTask], memory_bytes: int, cut_elements: int) -> bool:
    """Whether `choose_buffer_sizes` would find a size."""
    return memory_bytes >= FEWEST_BUFFERS * sum(_smallest_buffer(tasks, cut_elements))


def _smallest_buffer(tasks: Sequence[MergeTask], cut_elements: int) -> tuple[int, int]:
    """Bytes for the stored and the resulting `cut_elements` of the widest task."""
    raw = out = PAGE_BYTES
    for task in tasks:
        n = min(cut_elements, task.base.n_elements)
        raw = max(raw, stored_bytes(task, n, range(len(task.experts))))
        out = max(out, n * task.dtype.itemsize)
    return round_up(raw, PAGE_BYTES), round_up(out, PAGE_BYTES)


def plan_jobs(
    tasks: Sequence[MergeTask],
    sizes: BufferSizes,
    runs_of: RunsOf = full_access,
    cut_elements: int = GRAIN_ELEMENTS,
) -> Iterator[JobShape]:
    """Cut `tasks` (in output order) into jobs, lazily. `cut_elements` is a multiple of `GRAIN_ELEMENTS`.

    Laws: the runs of each task are disjoint, in order and cover its tensor; every segment fits its buffer; every cut
    inside a tensor falls on a multiple of `cut_elements`.
    """
    packer = _Packer(tasks, sizes, cut_elements)
    for index, task in enumerate(tasks):
        runs = tuple(runs_of(index, task))
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

    def __init__(self, tasks: Sequence[MergeTask], sizes: BufferSizes, cut_elements: int) -> None:
        self._tasks = tasks
        self._sizes = sizes
        self._cut = cut_elements
        self._number = 0
        self.runs: list[Run] = []
        self._raw = 0
        self._out = 0

    def _need(self, runs: Iterable[Run]) -> tuple[int, int]:
        raw = out = 0
        for run in runs:
            task = self._tasks[run.task_index]
            raw += stored_bytes(task, run.span.n_elements, run.read_experts)
            out += run.span.n_elements * task.dtype.itemsize
        return raw, out

    def fits_whole(self, runs: Sequence[Run]) -> bool:
        raw, out = self._need(runs)
        return raw <= self._sizes.raw_bytes and out <= self._sizes.out_bytes

    def has_room(self, runs: Sequence[Run]) -> bool:
        raw, out = self._need(runs)
        return self._raw + raw <= self._sizes.raw_bytes and self._out + out <= self._sizes.out_bytes

    def add(self, runs: Sequence[Run]) -> None:
        raw, out = self._need(runs)
        self.runs.extend(runs)
        self._raw += raw
        self._out += out

    def _segment(self) -> SegmentShape:
        segment = SegmentShape(self._number, tuple(self.runs), self._out)
        self._number += 1
        self.runs, self._raw, self._out = [], 0, 0
        return segment

    def close(self) -> JobShape:
        tasks = tuple(dict.fromkeys(run.task_index for run in self.runs))
        return JobShape(tasks, (self._segment(),))

    def large(self, index: int, runs: Sequence[Run]) -> JobShape:
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
        return JobShape((index,), tuple(segments))

    def _furthest(self, run: Run, start: int) -> int:
        """Where a piece of `run` from `start` on can end in this segment: its own end, or a cut; `start` if nowhere."""
        if self.has_room((replace(run, span=Span(start, run.span.stop)),)):
            return run.span.stop
        cuts = self._cuts_that_fit(run)
        return min(run.span.stop, (start // self._cut + cuts) * self._cut) if cuts else start

    def _cuts_that_fit(self, run: Run) -> int:
        task = self._tasks[run.task_index]
        fixed = stored_bytes(task, 0, run.read_experts)
        raw_each = stored_bytes(task, self._cut, run.read_experts) - fixed
        out_each = self._cut * task.dtype.itemsize
        raw_room = (self._sizes.raw_bytes - self._raw - fixed) // raw_each
        return max(0, min(raw_room, (self._sizes.out_bytes - self._out) // out_each))


@dataclass(frozen=True, slots=True)
class Read:
    """One request: `nbytes` at `offset` of a file, to `buffer_offset`; all multiples of the file's alignment."""

    file: Path
    offset: int
    nbytes: int
    buffer_offset: int
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class Piece:
    """A run with the places of its bytes in the buffer: stored bytes from 0, results from `out_offset`."""

    run: Run
    base_offset: int
    expert_offsets: tuple[int, ...]
    out_offset: int


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Everything needed to fill, merge and write one buffer."""

    shape: SegmentShape
    reads: tuple[Read, ...]
    pieces: tuple[Piece, ...]


def lay_out(
    shape: SegmentShape, tasks: Sequence[MergeTask], out_start: int, alignment_of: Callable[[Path], int]
) -> SegmentLayout:
    """Place a segment's byte ranges in its buffer, joining those that touch once rounded to the file's alignment."""
    ranges: list[tuple[TensorEntry, Span, Purpose]] = []
    for run in shape.runs:
        task = tasks[run.task_index]
        ranges.append((task.base, run.span, Purpose.BASE))
        ranges.extend((task.experts[e], run.span, Purpose.EXPERT) for e in run.read_experts)
    reads, places = _join(ranges, alignment_of)
    pieces, position, out_offset = [], 0, out_start
    for run in shape.runs:
        stop = position + 1 + len(run.read_experts)
        place_of = dict(zip(run.read_experts, places[position + 1 : stop], strict=True))
        pieces.append(Piece(run, places[position], tuple(place_of[e] for e in run.sources), out_offset))
        position = stop
        out_offset += run.span.n_elements * tasks[run.task_index].dtype.itemsize
    return SegmentLayout(shape, tuple(reads), tuple(pieces))


def _join(
    ranges: Sequence[tuple[TensorEntry, Span, Purpose]], alignment_of: Callable[[Path], int]
) -> tuple[list[Read], list[int]]:
    """Requests that cover all ranges, and for each range the buffer offset of its first byte."""
    starts = [entry.offset + span.start * entry.dtype.itemsize for entry, span, _ in ranges]
    order = sorted(range(len(ranges)), key=lambda i: (ranges[i][2], str(ranges[i][0].file), starts[i]))
    reads: list[Read] = []
    places = [0] * len(ranges)
    position = 0
    for i in order:
        entry, span, purpose = ranges[i]
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
