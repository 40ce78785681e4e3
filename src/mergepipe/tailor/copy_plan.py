"""The copy plan as values: every output file as ordered byte ranges of the sources, cut into chunks. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from mergepipe.checkpoints.contract import ComputedTensor
from mergepipe.core.blocks import DType
from mergepipe.core.rounding import holds_results
from mergepipe.errors import LimitError
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES, round_up
from mergepipe.tailor.checkpoint import StoredState, Strip


@dataclass(frozen=True, slots=True)
class CopyRange:
    """`nbytes` bytes at `offset` of `file`, as they are. `is_skeleton` tells which side of the ledger they are on."""

    file: Location
    offset: int
    nbytes: int
    is_skeleton: bool


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements stored as `dtype` from `offset` of `file` on; with `strips`, from element `first` of their rows on.

    Of a `computed` tensor they are those from `offset` on of the bytes that it computes.
    """

    file: Location
    offset: int
    dtype: DType
    strips: tuple[Strip, ...] = ()
    first: int = 0
    computed: ComputedTensor | None = None

    def further(self, n_elements: int) -> ElementRange:
        """Return the range from that many elements later on."""
        if self.strips:
            return ElementRange(self.file, self.offset, self.dtype, self.strips, self.first + n_elements)
        return replace(self, offset=self.offset + n_elements * self.dtype.itemsize)

    def reads(self, n_elements: int) -> tuple[tuple[Location, int, int], ...]:
        """List what is read for some elements: file, offset, bytes; of strips, whole rows; all that is computed of."""
        if self.computed is not None:
            return tuple((entry.file, entry.offset, entry.nbytes) for entry in self.computed.stored)
        itemsize = self.dtype.itemsize
        if not self.strips:
            return ((self.file, self.offset, n_elements * itemsize),)
        top = self.first // self.row_elements
        rows = -(-(self.first + n_elements) // self.row_elements) - top
        return tuple((s.file, s.offset + top * s.width * itemsize, rows * s.width * itemsize) for s in self.strips)

    @property
    def row_elements(self) -> int:
        return sum(strip.width for strip in self.strips)


@dataclass(frozen=True, slots=True)
class AverageRange:
    """`n_elements` elements of some files, their average with `weights` (which sum to 1) written as `wanted`.

    Of one file it is a cast: each element rounded to the nearest of `wanted`, ties to even. With a `rounding_key` it is
    rounded stochastically; `first_element` is the index of the first one in its tensor.
    """

    parts: tuple[ElementRange, ...]
    weights: tuple[float, ...]
    n_elements: int
    wanted: DType
    rounding_key: int = 0
    first_element: int = 0

    @property
    def nbytes(self) -> int:
        return self.n_elements * self.wanted.itemsize

    def cut(self, start: int, n_elements: int) -> AverageRange:
        """Return some of its elements."""
        parts = tuple(part.further(start) for part in self.parts)
        return replace(self, parts=parts, n_elements=n_elements, first_element=self.first_element + start)

    def continues_in(self, other: AverageRange) -> bool:
        """Whether the other is the average of what follows this one in every file."""
        following = self.cut(self.n_elements, other.n_elements)
        if not self.rounding_key:  # the tensor's index does not matter
            following = replace(following, first_element=other.first_element)
        return following == other


@dataclass(frozen=True, slots=True)
class Literal:
    """Constant bytes."""

    content: bytes

    @property
    def nbytes(self) -> int:
        return len(self.content)


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC-32 of the output's bytes `[start, stop)`, written (u32) at every one of `places`, all behind `stop`."""

    start: int
    stop: int
    places: tuple[int, ...]


Segment: TypeAlias = CopyRange | AverageRange | Literal


@dataclass(frozen=True, slots=True)
class Patch:
    """A segment and its place in the output file."""

    offset: int
    segment: Segment

    @property
    def stop(self) -> int:
        return self.offset + self.segment.nbytes


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One output file: its segments in order, and the checksums to be renewed. `name` is relative, with slashes.

    `size_bytes` is counted once: progress asks for it with every chunk.
    """

    name: str
    segments: tuple[Segment, ...]
    checksums: tuple[Checksum, ...] = ()
    size_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", sum(segment.nbytes for segment in self.segments))

    @property
    def source_files(self) -> frozenset[Location]:
        """Return the files that its segments read."""
        return frozenset(file for segment in self.segments for file, *_ in _reads_of(segment))

    @property
    def read_bytes(self) -> int:
        """Bytes that its segments read from files."""
        return sum(nbytes for segment in self.segments for *_, nbytes in _reads_of(segment))


def is_rounded(plan: FilePlan) -> bool:
    """Whether averages or casts of a file are rounded stochastically."""
    computed = (segment for segment in plan.segments if isinstance(segment, AverageRange))
    return any(segment.rounding_key and not holds_results(segment.wanted) for segment in computed)


def _reads_of(segment: Segment) -> tuple[tuple[Location, int, int], ...]:
    """List what a segment reads: file, offset, bytes."""
    if isinstance(segment, AverageRange):
        return tuple(read for part in segment.parts for read in part.reads(segment.n_elements))
    return ((segment.file, segment.offset, segment.nbytes),) if isinstance(segment, CopyRange) else ()


def patch_states(
    sources: Sequence[StoredState], target: StoredState, weights: tuple[float, ...] = (1.0,), rounding_key: int = 0
) -> Iterator[tuple[Location, Patch]]:
    """Yield (file of the target, patch) that write the values of a source, or the average of several, to `target`.

    All must be raw and of one shape. They are rounded as an `AverageRange` with that key.

    Law: every element that `target` has a place for is patched once, if no source
    has gaps.
    """
    edges = sorted(
        {edge for source in sources for piece in source.pieces for edge in (piece.span.start, piece.span.stop)}
    )
    places = [0] * len(sources)  # of the piece that holds the next element
    for piece in target.pieces:
        first, last = bisect_right(edges, piece.span.start), bisect_left(edges, piece.span.stop)
        for start, stop in pairwise((piece.span.start, *edges[first:last], piece.span.stop)):
            if start < stop:
                parts = []
                for index, source in enumerate(sources):
                    while source.pieces[places[index]].span.stop <= start:
                        places[index] += 1
                    held = source.pieces[places[index]]
                    first_element = ElementRange(
                        held.file, held.offset, source.dtype, held.strips, computed=held.computed
                    )
                    parts.append(first_element.further(start - held.span.start))
                at = piece.offset + (start - piece.span.start) * target.dtype.itemsize
                average = AverageRange(tuple(parts), weights, stop - start, target.dtype, rounding_key, start)
                yield piece.file, Patch(at, _values(average))


def _values(average: AverageRange) -> Segment:
    """Make the segment of some elements: a copy where one source has them in the dtype that is wanted."""
    first = average.parts[0]
    is_stored = not first.strips and first.computed is None
    if len(average.parts) > 1 or first.dtype != average.wanted or not is_stored:
        return average
    return CopyRange(first.file, first.offset, average.nbytes, is_skeleton=False)


def patched_file(
    name: str, original: Location, size_bytes: int, patches: Iterable[Patch], checksums: Sequence[Checksum] = ()
) -> FilePlan:
    """Plan a copy of `original` with some ranges replaced. Law: the segments cover `[0, size_bytes)` in order."""
    ordered = sorted(patches, key=lambda p: p.offset)
    segments = patched_range(original, 0, size_bytes, ordered)
    return FilePlan(name, tuple(joined(segments)), tuple(checksums))


def patched_range(original: Location, start: int, stop: int, patches: Iterable[Patch]) -> list[Segment]:
    """Copy the bytes `[start, stop)` of `original`, with the `patches` in them, which are in order and apart."""
    segments: list[Segment] = []
    for patch in patches:
        if patch.offset < start or patch.stop > stop:
            raise ValueError(f"{original}: a patch at [{patch.offset}, {patch.stop}) overlaps or lies outside")
        segments += [CopyRange(original, start, patch.offset - start, is_skeleton=True), patch.segment]
        start = patch.stop
    return [*segments, CopyRange(original, start, stop - start, is_skeleton=True)]


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Join ranges that follow one another in the same file; leave out empty ones."""
    waiting: Segment | None = None
    for segment in segments:
        if segment.nbytes == 0:
            continue
        longer = _together(waiting, segment)
        if longer is None and waiting is not None:
            yield waiting
        waiting = longer or segment
    if waiting is not None:
        yield waiting


def _together(first: Segment | None, second: Segment) -> Segment | None:
    """Join two ranges if the second follows the first in the same files; else None."""
    if isinstance(first, AverageRange) and isinstance(second, AverageRange) and first.continues_in(second):
        return replace(first, n_elements=first.n_elements + second.n_elements)
    if isinstance(first, CopyRange) and isinstance(second, CopyRange):
        end = (first.file, first.offset + first.nbytes, first.is_skeleton)
        if end == (second.file, second.offset, second.is_skeleton):
            return replace(first, nbytes=first.nbytes + second.nbytes)
    return None


# --- cut a file's segments into chunks that fit one buffer, and place each part in it. Pure ---


_MAX_PARTS = 256
_EDGE_BYTES = 2 * PAGE_BYTES  # what rounding a read outwards adds at most


Chunk: TypeAlias = tuple[Segment, ...]
"""Segments, or pieces of them, that follow one another in the output; each has its `room_of` a buffer."""


def buffer_bytes_for(chunk_bytes: int) -> int:
    """Return the buffer size that a chunk needs when parts of up to `chunk_bytes` are cut."""
    return round_up(chunk_bytes, PAGE_BYTES) + _EDGE_BYTES


def cut_chunks(segments: Iterable[Segment], chunk_bytes: int) -> Iterator[Chunk]:
    """Yield chunks that fit a buffer of `buffer_bytes_for(chunk_bytes)`.

    Law: the pieces in order are the segments in order. Cuts inside a copied range fall on page boundaries of its
    file, so that no page is read twice because of a cut.
    """
    limit = buffer_bytes_for(chunk_bytes)
    chunk: list[Segment] = []
    used_bytes = 0
    for segment in segments:
        for piece in _cut(segment, chunk_bytes):
            if chunk and (used_bytes + room_of(piece) > limit or len(chunk) == _MAX_PARTS):
                yield tuple(chunk)
                chunk, used_bytes = [], 0
            chunk.append(piece)
            used_bytes += room_of(piece)
    if chunk:
        yield tuple(chunk)


def room_of(segment: Segment) -> int:
    """Return the bytes of a buffer, in whole pages, that a segment is read and made in."""
    if isinstance(segment, AverageRange):
        return sum(average_rooms(segment)) + round_up(segment.nbytes, PAGE_BYTES)
    return whole_pages(segment.offset, segment.nbytes) if isinstance(segment, CopyRange) else 0


def whole_pages(offset: int, nbytes: int) -> int:
    """Return the bytes of the pages that a range touches."""
    return round_up(offset + nbytes, PAGE_BYTES) - offset // PAGE_BYTES * PAGE_BYTES


def average_rooms(segment: AverageRange) -> tuple[int, ...]:
    """Return the buffer bytes that reading each part needs, in whole pages, and of strips putting them together."""
    return tuple(sum(part_rooms(part, segment.n_elements)) for part in segment.parts)


def part_rooms(part: ElementRange, n_elements: int) -> tuple[int, int]:
    """Return the bytes for what is read, in whole pages, and for the rows that strips make, or what is computed."""
    if part.computed is not None:
        return 0, round_up(n_elements * part.dtype.itemsize, PAGE_BYTES)
    reads = part.reads(n_elements)
    rows = round_up(sum(nbytes for *_, nbytes in reads), PAGE_BYTES) if part.strips else 0
    return sum(whole_pages(offset, nbytes) for _, offset, nbytes in reads), rows


def _cut(segment: Segment, chunk_bytes: int) -> Iterator[Segment]:
    if isinstance(segment, CopyRange):
        position, stop = segment.offset, segment.offset + segment.nbytes
        while position < stop:
            end = position + chunk_bytes
            end = stop if end >= stop else end // PAGE_BYTES * PAGE_BYTES
            yield replace(segment, offset=position, nbytes=end - position)
            position = end
    elif isinstance(segment, AverageRange):
        yield from _cut_average(segment, chunk_bytes)
    else:
        yield from (
            Literal(segment.content[at : at + chunk_bytes]) for at in range(0, len(segment.content), chunk_bytes)
        )


def _cut_average(segment: AverageRange, chunk_bytes: int) -> Iterator[AverageRange]:
    """Cut so that all parts and the result fit; on page boundaries of the first part's file where that is possible."""
    itemsizes = [part.dtype.itemsize for part in segment.parts for _ in range(2 if part.strips else 1)]
    itemsizes.append(segment.wanted.itemsize)
    n_rounded = 1 + sum(len(part.strips) + 1 for part in segment.parts)  # reads, rows of strips, and the result
    rounding_bytes = 2 * PAGE_BYTES * n_rounded
    # rows that a cut touches at both ends, read and put together
    rounding_bytes += sum(4 * part.row_elements * part.dtype.itemsize for part in segment.parts)
    room = (buffer_bytes_for(chunk_bytes) - rounding_bytes) // sum(itemsizes)
    if room < 1:
        message = f"a row of {len(segment.parts[0].strips)} strips needs more"
        raise LimitError.of("memory.too-small", "--memory", message, "raise it")
    page = PAGE_BYTES // itemsizes[0]
    step = max(1, room // page * page or room)
    for start in range(0, segment.n_elements, step):
        yield segment.cut(start, min(step, segment.n_elements - start))
