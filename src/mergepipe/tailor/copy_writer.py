"""Write planned files: several threads read ahead, one writer writes in order and renews checksums."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F16, F32, F64, DType, RawBlock, Span
from mergepipe.core.units import size_option
from mergepipe.errors import LimitError, unsupported
from mergepipe.operators.base import NOTHING_REDUCED, BlockFunction, OperatorInput
from mergepipe.operators.registry import operator_named
from mergepipe.storage.contract import Digested, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output import CHUNK_BYTES, OutputFile
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import PAGE_BYTES, BufferPool, allow_open_files, read_exact
from mergepipe.tailor.checkpoint import OpenedTensors, gather_strips
from mergepipe.tailor.copy_plan import (
    AverageRange,
    Checksum,
    Chunk,
    CopyRange,
    ElementRange,
    FilePlan,
    Segment,
    average_rooms,
    buffer_bytes_for,
    cut_chunks,
    part_rooms,
    room_of,
    whole_pages,
)

# --- cast elements between floating dtypes, rounding to nearest even, as optimizers cast master weights ---


_NUMPY_TYPES: dict[DType, np.dtype[Any]] = {
    F64: np.dtype(np.float64), F32: np.dtype(np.float32), F16: np.dtype(np.float16),
}  # fmt: skip
_CACHED_ELEMENTS = 1 << 15


def values_of(raw: NDArray[np.uint8], dtype: DType, where: object) -> NDArray[Any]:
    """Return the elements that `raw` holds, in a numpy dtype that holds them exactly; bfloat16 as float32."""
    if dtype == BF16:
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(_numpy_type(dtype, where))


def cast_bytes(
    raw: NDArray[np.uint8], stored: DType, wanted: DType, where: object, *, in_place: bool = False
) -> NDArray[np.uint8]:
    """Return `raw` (elements of `stored`) as bytes of `wanted`: `raw` itself where the two are one, else a new array.

    With `in_place` elements that become no wider are written over the first bytes of `raw`, which are returned.
    """
    if stored == wanted:
        return raw
    n_elements = raw.size // stored.itemsize
    is_over = in_place and wanted.itemsize <= stored.itemsize
    out = raw[: n_elements * wanted.itemsize] if is_over else np.empty(n_elements * wanted.itemsize, np.uint8)
    for start in range(0, n_elements, _CACHED_ELEMENTS):
        stop = min(start + _CACHED_ELEMENTS, n_elements)
        part = _cast(raw[start * stored.itemsize : stop * stored.itemsize], stored, wanted, where)
        out.view(part.dtype)[start:stop] = part
    return out


def _cast(raw: NDArray[np.uint8], stored: DType, wanted: DType, where: object) -> NDArray[Any]:
    """Return some elements in a new array."""
    values = values_of(raw, stored, where)
    with np.errstate(over="ignore", invalid="ignore"):  # to infinity, and NaN to NaN, as in training
        if wanted != BF16:
            return values.astype(_numpy_type(wanted, where))
        bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits  # wraps only for NaN
    is_nan = np.isnan(bits.view(np.float32))
    if is_nan.any():
        rounded[is_nan] = bits[is_nan] & np.uint32(0x80000000) | np.uint32(0x7FC00000)
    return rounded.view(np.uint16)[1::2]


def _numpy_type(dtype: DType, where: object) -> np.dtype[Any]:
    if dtype not in _NUMPY_TYPES:
        raise unsupported(where, f"values of dtype {dtype.name} are not converted")
    return _NUMPY_TYPES[dtype]


# --- write planned files: several threads read ahead, one writer writes in order and renews checksums ---


Bytes = NDArray[np.uint8]
Advance = Callable[[int], None]

FEWEST_BYTES = 16 << 20
_LARGEST_CHUNK_BYTES = 4 << 20
_LARGEST_SUMMAND_BYTES = 1 << 20  # of a chunk in which many files are averaged, from each
_POOL_BYTES = 32 * _LARGEST_CHUNK_BYTES
_FEWEST_BUFFERS = 10  # some more than are read at once
_FILES_AHEAD = 3


def write_files(
    store: Store, jobs: Sequence[tuple[FilePlan, Path]], memory_bytes: int, on_advance: Advance
) -> tuple[Digested, ...]:
    """Write the file that each plan describes at its path, durably; the next is read while one is written.

    Memory: at most `memory_bytes`, whatever their size; besides, where weights are computed, the factors of those that
    were opened last and a chunk of stored weights for each thread.

    Raises:
        LimitError: the cap is too small.
    """
    if memory_bytes < FEWEST_BYTES:
        message = f"{memory_bytes} bytes of buffers were allowed, composing needs at least {FEWEST_BYTES}"
        hint = f"raise --memory to {size_option(FEWEST_BYTES)} or more"
        raise LimitError.of("memory.too-small", "--memory", message, hint)
    written: list[Digested] = []
    with _Flow(store, jobs, memory_bytes - CHUNK_BYTES) as flow:
        for index, steps in groupby(flow.run(), key=lambda pair: pair[0]):
            plan = jobs[index][0]
            renewal = ChecksumRenewal(plan.checksums)
            for _, views in steps:
                renewal.pass_through(views)
                on_advance(sum(view.size for view in views))
            written.append(Digested(plan.name, plan.size_bytes, renewal.digest()))
    return tuple(written)


def _chunk_bytes(plans: Sequence[FilePlan], room_bytes: int) -> int:
    """Choose the size of chunks: that of one request, or of one to each file that is averaged and their average."""
    segments = (segment for plan in plans for segment in plan.segments)
    widest = max((len(s.parts) + 1 for s in segments if isinstance(s, AverageRange)), default=0)
    many_bytes = min(widest * _LARGEST_SUMMAND_BYTES, min(room_bytes, _POOL_BYTES) // _FEWEST_BUFFERS)
    wanted_bytes = max(_LARGEST_CHUNK_BYTES, many_bytes // PAGE_BYTES * PAGE_BYTES)
    return min(wanted_bytes, room_bytes // 4 // PAGE_BYTES * PAGE_BYTES - 2 * PAGE_BYTES)


def _steps(jobs: Iterable[tuple[FilePlan, Path]], chunk_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """Yield the chunks of every output with its index; a file without bytes has one empty chunk."""
    for index, (plan, _) in enumerate(jobs):
        chunks = cut_chunks(plan.segments, chunk_bytes)
        yield index, next(chunks, ())
        yield from ((index, chunk) for chunk in chunks)


class _Flow:
    """Reads chunks ahead, yields them in order, then writes them; buffers are recycled. A context manager.

    A source file is open from the first plan that needs it to the last. An output file is made with its first bytes,
    durable and closed after its last.
    """

    def __init__(self, store: Store, jobs: Sequence[tuple[FilePlan, Path]], room_bytes: int) -> None:
        self._store = store
        self._jobs = jobs
        self._needed = [plan.source_files for plan, _ in jobs]
        self._last_use = {path: index for index, paths in enumerate(self._needed) for path in paths}
        self._files: dict[Location, RangeFile] = {}
        self._computing = OpenedTensors()
        self._output: OutputFile | None = None  # of the writing thread
        chunk_bytes = _chunk_bytes([plan for plan, _ in jobs], room_bytes)
        self._pool = BufferPool(buffer_bytes_for(chunk_bytes), min(room_bytes, _POOL_BYTES))
        self._steps = _steps(jobs, chunk_bytes)
        self._upcoming = next(self._steps, None)
        n_readers = max((store.terms(path).most_requests for path in self._last_use), default=1)
        self._readers = ThreadPoolExecutor(n_readers, "mergepipe-tailor-read")
        self._writer = ThreadPoolExecutor(1, "mergepipe-tailor-write")
        self._reads: deque[tuple[int, Future[list[Bytes]], Bytes]] = deque()
        self._writes: deque[tuple[Future[None], Bytes]] = deque()

    def __enter__(self) -> _Flow:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until no thread uses a buffer or a file any more; a file that is not finished stays incomplete."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            if self._output is not None:
                stack.push(self._output)

    def run(self) -> Iterator[tuple[int, list[Bytes]]]:
        """Yield each output's index with the contents of each chunk of it, to be changed in place and written then."""
        self._read_ahead(0)
        while self._reads:
            index, reading, buffer = self._reads.popleft()
            views = reading.result()
            yield index, views
            following = self._reads[0] if self._reads else self._upcoming
            is_last = following is None or following[0] != index
            self._writes.append((self._writer.submit(self._append, index, views, is_last=is_last), buffer))
            if is_last:
                for path in self._needed[index]:
                    if self._last_use[path] == index:
                        self._files.pop(path).close()
            self._collect(at_most=self._pool.limit // 2)
            self._read_ahead(index)
        self._collect(at_most=0)

    def _read_ahead(self, current: int) -> None:
        while self._upcoming is not None and self._upcoming[0] <= current + _FILES_AHEAD:
            index, chunk = self._upcoming
            for path in sorted(self._needed[index] - self._files.keys()):
                allow_open_files(len(self._files))
                self._files[path] = self._store.open(path, direct=True)
            buffer = self._pool.take()
            if buffer is None:
                return
            files = {path: self._files[path] for path in self._needed[index]}
            reading = self._readers.submit(_fill, chunk, buffer, _Sources(files, self._computing))
            self._reads.append((index, reading, buffer))
            self._upcoming = next(self._steps, None)

    def _append(self, index: int, views: Iterable[Bytes], *, is_last: bool) -> None:
        if self._output is None:
            plan, path = self._jobs[index]
            self._output = OutputFile(path, plan.size_bytes, self._store.ledger)
        for view in views:
            self._output.append(view)
        if is_last:
            self._output.close()
            self._output = None  # and its buffer with it

    def _collect(self, *, at_most: int) -> None:
        """Collect the buffers of finished writes; wait until at most `at_most` are pending."""
        while self._writes and (len(self._writes) > at_most or self._writes[0][0].done()):
            writing, buffer = self._writes.popleft()
            self._pool.give_back(buffer)
            writing.result()


@dataclass(frozen=True, slots=True)
class _Sources:
    """The open files that an output is made of, and the computed tensors that were opened."""

    files: Mapping[Location, RangeFile]
    computing: OpenedTensors


def _fill(chunk: Chunk, buffer: Bytes, sources: _Sources) -> list[Bytes]:
    """Read the bytes of every segment; the arrays are writable, and lie in `buffer` where they were read."""
    ends = list(accumulate((room_of(segment) for segment in chunk), initial=0))
    return [_content(segment, buffer[a:b], sources) for segment, (a, b) in zip(chunk, pairwise(ends), strict=True)]


def _content(segment: Segment, room: Bytes, sources: _Sources) -> Bytes:
    if isinstance(segment, CopyRange):
        stop = segment.offset + segment.nbytes
        purpose = Purpose.BASE if segment.is_skeleton else Purpose.EXPERT
        return read_exact(sources.files[segment.file], segment.offset, stop, purpose, room)
    if isinstance(segment, AverageRange):
        return _average(segment, room, sources)
    return np.frombuffer(bytearray(segment.content), np.uint8)


def _average(segment: AverageRange, room: Bytes, sources: _Sources) -> Bytes:
    """Read every part and average them with the merge engine's linear operator, behind them in the room.

    One part alone is cast, in its place where the result is no wider.
    """
    if len(segment.parts) == 1:
        (part,) = segment.parts
        _, raw = _read_part(part, segment.n_elements, room, sources)
        if segment.rounding_key and part.dtype != segment.wanted:
            return _rounded(raw, part, segment)
        return cast_bytes(raw, part.dtype, segment.wanted, part.file, in_place=True)
    offsets, start = [], 0
    for part, nbytes in zip(segment.parts, average_rooms(segment), strict=True):
        offset, _ = _read_part(part, segment.n_elements, room[start : start + nbytes], sources)
        offsets.append(start + offset)
        start += nbytes
    codes = [part.dtype.kernel_code for part in segment.parts]
    experts_E = np.arange(len(codes) - 1)
    block = RawBlock(
        room, offsets[0], codes[0], experts_E, experts_E, np.array(offsets[1:], np.int64),
        np.array(codes[1:], np.int64), segment.first_element, segment.n_elements, room, start,
        segment.wanted.kernel_code, np.uint64(segment.rounding_key), np.empty((0, 2)), 0,
    )  # fmt: skip
    _averaging(segment.weights)(block)
    return room[start : start + segment.nbytes]


def _rounded(raw: Bytes, part: ElementRange, segment: AverageRange) -> Bytes:
    """Return elements of one part in a new array, rounded stochastically."""
    from mergepipe.kernels.rounding import encode_all_by

    out = np.empty(segment.nbytes, np.uint8)
    itemsize = part.dtype.itemsize
    for start in range(0, segment.n_elements, _CACHED_ELEMENTS):
        stop = min(start + _CACHED_ELEMENTS, segment.n_elements)
        values = values_of(raw[start * itemsize : stop * itemsize], part.dtype, part.file).astype(np.float32)
        made = out[start * segment.wanted.itemsize :]
        key = np.uint64(segment.rounding_key)
        encode_all_by(values, segment.first_element + start, key, made, segment.wanted.kernel_code)
    return out


def _read_part(part: ElementRange, n_elements: int, room: Bytes, sources: _Sources) -> tuple[int, Bytes]:
    """Read or compute the elements of one part into the room; return them and where they begin there."""
    itemsize = part.dtype.itemsize
    if part.computed is not None:
        first = part.offset // itemsize
        out = room[: n_elements * itemsize]
        fetch = sources.computing.opened(part.computed, sources.files)
        fetch(Span(first, first + n_elements), out, Purpose.EXPERT)
        return 0, out
    read_bytes, _ = part_rooms(part, n_elements)
    done = 0

    def read(path: Location, start: int, stop: int) -> Bytes:
        nonlocal done
        place, done = done, done + whole_pages(start, stop - start)
        return read_exact(sources.files[path], start, stop, Purpose.EXPERT, room[place:done])

    if not part.strips:
        stop = part.offset + n_elements * itemsize
        return part.offset % sources.files[part.file].alignment, read(part.file, part.offset, stop)
    rows = room[read_bytes:]
    raw = gather_strips(part.strips, itemsize, part.first, n_elements, read, rows)
    return read_bytes + part.first % part.row_elements * itemsize, raw


@lru_cache(maxsize=8)
def _averaging(weights: tuple[float, ...]) -> BlockFunction:
    """The block function of `linear` for these weights; the first checkpoint stands where a merge has its base."""
    first, *others = ({"weight": weight} for weight in weights)
    inputs = OperatorInput({"normalize": True}, first, tuple(others), 1, (0,) * len(others))
    return operator_named("linear").block_function(inputs, NOTHING_REDUCED)


class ChecksumRenewal:
    """Processes a file's bytes in order: computes members' checksums, writes them into place, digests all bytes.

    Law: after the last byte, every place of every checksum holds the CRC-32 of its range as it was passed through.
    """

    def __init__(self, checksums: Iterable[Checksum]) -> None:
        self._waiting = deque(sorted(checksums, key=lambda c: c.start))
        self._crc = 0
        self._due: list[tuple[int, bytes]] = []
        self._position = 0
        self._digest = blake3()

    def pass_through(self, views: Iterable[Bytes]) -> None:
        """Process the file's next bytes (uint8), renewing checksums in place."""
        for view in views:
            stop = self._position + view.size
            self._take(view, stop)
            self._write_due(view, stop)
            self._digest.update(view.data)
            self._position = stop

    def digest(self) -> str:
        """Return the BLAKE3-128 of all bytes, 32 hex digits."""
        return self._digest.hexdigest(16)

    def _take(self, view: Bytes, stop: int) -> None:
        while self._waiting and self._waiting[0].start < stop:
            current = self._waiting[0]
            first, last = max(current.start, self._position), min(current.stop, stop)
            if first < last:
                self._crc = zlib.crc32(view.data[first - self._position : last - self._position], self._crc)
            if current.stop > stop:
                return
            for place in current.places:
                heapq.heappush(self._due, (place, self._crc.to_bytes(4, "little")))
            self._waiting.popleft()
            self._crc = 0

    def _write_due(self, view: Bytes, stop: int) -> None:
        while self._due and self._due[0][0] < stop:
            place, content = self._due[0]
            first, last = max(place, self._position), min(place + len(content), stop)
            if first < last:
                view[first - self._position : last - self._position] = np.frombuffer(content, np.uint8)[
                    first - place : last - place
                ]
            if place + len(content) > stop:
                return
            heapq.heappop(self._due)
