"""Cut a file's segments into chunks that fit one buffer, and place each part in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mergepipe.storage.buffers import PAGE_BYTES, round_up
from mergepipe.tailor.composition.copy.plan import (
    AverageRange,
    CastRange,
    CopyRange,
    Literal,
    Segment,
    source_bytes,
)

_MAX_PARTS = 256
_EDGE_BYTES = 2 * PAGE_BYTES  # what rounding a read outwards adds at most


@dataclass(frozen=True, slots=True)
class Part:
    """A segment, or a piece of one, with the buffer region it may use: page-aligned, `room_bytes` long."""

    segment: Segment
    buffer_offset: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts that follow one another in the output."""

    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.segment.nbytes for part in self.parts)


def buffer_bytes_for(chunk_bytes: int) -> int:
    """Return the buffer size that a chunk needs when parts of up to `chunk_bytes` are cut."""
    return round_up(chunk_bytes, PAGE_BYTES) + _EDGE_BYTES


def cut_chunks(segments: Iterable[Segment], chunk_bytes: int) -> Iterator[Chunk]:
    """Yield chunks that fit a buffer of `buffer_bytes_for(chunk_bytes)`.

    Law: the parts in order are the segments in order. Cuts inside a copied range fall on page boundaries of its
    file, so that no page is read twice because of a cut.
    """
    limit = buffer_bytes_for(chunk_bytes)
    parts: list[Part] = []
    used = 0
    for segment in segments:
        for piece in _cut(segment, chunk_bytes):
            room = _room(piece)
            if parts and (used + room > limit or len(parts) == _MAX_PARTS):
                yield Chunk(tuple(parts))
                parts, used = [], 0
            parts.append(Part(piece, used, room))
            used += room
    if parts:
        yield Chunk(tuple(parts))


def _room(segment: Segment) -> int:
    nbytes = source_bytes(segment)
    if isinstance(segment, AverageRange):
        return sum(average_rooms(segment)) + round_up(segment.nbytes, PAGE_BYTES)
    if nbytes == 0:
        return 0
    start = segment.offset if isinstance(segment, CopyRange | CastRange) else 0
    read = round_up(start + nbytes, PAGE_BYTES) - start // PAGE_BYTES * PAGE_BYTES
    return read + (round_up(segment.nbytes, PAGE_BYTES) if isinstance(segment, CastRange) else 0)


def average_rooms(segment: AverageRange) -> tuple[int, ...]:
    """Return the buffer bytes that reading each part needs, in whole pages."""
    starts = ((part.offset, part.offset + segment.n_elements * part.dtype.itemsize) for part in segment.parts)
    return tuple(round_up(stop, PAGE_BYTES) - start // PAGE_BYTES * PAGE_BYTES for start, stop in starts)


def _cut(segment: Segment, chunk_bytes: int) -> Iterator[Segment]:
    if isinstance(segment, CopyRange):
        yield from _cut_copy(segment, chunk_bytes)
    elif isinstance(segment, CastRange):
        yield from _cut_cast(segment, chunk_bytes)
    elif isinstance(segment, AverageRange):
        yield from _cut_average(segment, chunk_bytes)
    else:
        yield from (
            Literal(segment.content[at : at + chunk_bytes]) for at in range(0, len(segment.content), chunk_bytes)
        )


def _cut_copy(segment: CopyRange, chunk_bytes: int) -> Iterator[CopyRange]:
    position, stop = segment.offset, segment.offset + segment.nbytes
    while position < stop:
        end = position + chunk_bytes
        end = stop if end >= stop else end // PAGE_BYTES * PAGE_BYTES
        yield replace(segment, offset=position, nbytes=end - position)
        position = end


def _cut_cast(segment: CastRange, chunk_bytes: int) -> Iterator[CastRange]:
    step = max(1, chunk_bytes // 2 // max(segment.stored.itemsize, segment.wanted.itemsize) - PAGE_BYTES)
    for start in range(0, segment.n_elements, step):
        offset = segment.offset + start * segment.stored.itemsize
        yield replace(segment, offset=offset, n_elements=min(step, segment.n_elements - start))


def _cut_average(segment: AverageRange, chunk_bytes: int) -> Iterator[AverageRange]:
    """Cut so that all parts and the result fit; on page boundaries of the first part's file where that is possible."""
    itemsizes = [*(part.dtype.itemsize for part in segment.parts), segment.wanted.itemsize]
    rounding_bytes = 2 * PAGE_BYTES * len(itemsizes)
    room = (buffer_bytes_for(chunk_bytes) - rounding_bytes) // sum(itemsizes)
    page = PAGE_BYTES // itemsizes[0]
    step = max(1, room // page * page or room)
    for start in range(0, segment.n_elements, step):
        yield segment.cut(start, min(step, segment.n_elements - start))
