"""Writes one planned file: parts read ahead by several threads, checksums renewed on the way, one ordered writer."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.budget import Purpose
from mergepipe.errors import CorruptError, LimitError
from mergepipe.storage.base import RangeFile, Store
from mergepipe.storage.buffers import PAGE_BYTES, BufferPool, round_up
from mergepipe.storage.output import CHUNK_BYTES, OutputFile
from mergepipe.tailor.casting import cast_bytes
from mergepipe.tailor.chunks import Chunk, Part, buffer_bytes_for, cut_chunks
from mergepipe.tailor.copy_plan import CastRange, Checksum, CopyRange, FilePlan, Fill

Bytes = NDArray[np.uint8]
Advance = Callable[[int], None]

FEWEST_BYTES = 16 << 20
_LARGEST_CHUNK_BYTES = 4 << 20
_MOST_BUFFERS = 32
_READERS = 8


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as written: `blake3` (32 hex digits) digests all of its bytes."""

    name: str
    size_bytes: int
    blake3: str


class Copier:
    """Writes planned files one after another. Memory: at most `memory_bytes`, whatever their size.

    Raises (when made):
        LimitError: the cap is too small.
    """

    def __init__(self, store: Store, memory_bytes: int, on_advance: Advance) -> None:
        if memory_bytes < FEWEST_BYTES:
            raise LimitError.of(
                "memory.too-small", "--memory",
                f"{memory_bytes} bytes of buffers were allowed, composing needs at least {FEWEST_BYTES}",
                "raise --memory",
            )  # fmt: skip
        room = memory_bytes - CHUNK_BYTES
        self._chunk_bytes = min(_LARGEST_CHUNK_BYTES, room // 4 // PAGE_BYTES * PAGE_BYTES - 2 * PAGE_BYTES)
        buffer_bytes = buffer_bytes_for(self._chunk_bytes)
        self._pool = BufferPool(buffer_bytes, min(room, _MOST_BUFFERS * buffer_bytes))
        self._store = store
        self._on_advance = on_advance

    def write(self, plan: FilePlan, path: Path) -> WrittenFile:
        """Write the file that `plan` describes at `path`, durably.

        Raises:
            CorruptError: a source is shorter than it was.
            StorageError: the operating system refused.
        """
        renewal = ChecksumRenewal(plan.checksums)
        with (
            self._open_sources(plan) as files,
            OutputFile(path, plan.size_bytes, self._store.ledger) as output,
            ThreadPoolExecutor(_READERS, "mergepipe-tailor-read") as readers,
            ThreadPoolExecutor(1, "mergepipe-tailor-write") as writer,
        ):
            flow = _Flow(self._pool, readers, writer, files, output)
            for views in flow.run(cut_chunks(plan.segments, self._chunk_bytes)):
                renewal.pass_through(views)
                self._on_advance(sum(view.size for view in views))
            output.close()
        return WrittenFile(plan.name, plan.size_bytes, renewal.digest())

    @contextmanager
    def _open_sources(self, plan: FilePlan) -> Iterator[Mapping[Path, RangeFile]]:
        paths = {s.file for s in plan.segments if isinstance(s, CopyRange | CastRange)}
        with ExitStack() as stack:
            files: dict[Path, RangeFile] = {}
            for path in sorted(paths):
                files[path] = self._store.open(path, direct=True)
                stack.callback(files[path].close)
            yield files


class _Flow:
    """Reads chunks ahead, hands each to the caller in order, then writes it; buffers go round."""

    def __init__(
        self,
        pool: BufferPool,
        readers: ThreadPoolExecutor,
        writer: ThreadPoolExecutor,
        files: Mapping[Path, RangeFile],
        output: OutputFile,
    ) -> None:
        self._pool = pool
        self._readers = readers
        self._writer = writer
        self._files = files
        self._output = output
        self._reads: deque[tuple[Future[list[Bytes]], Bytes]] = deque()
        self._writes: deque[tuple[Future[None], Bytes]] = deque()

    def run(self, chunks: Iterable[Chunk]) -> Iterator[list[Bytes]]:
        """Yield the contents of each chunk, to be changed in place if need be; it is written on the next step."""
        waiting = iter(chunks)
        try:
            self._read_ahead(waiting)
            while self._reads:
                reading, buffer = self._reads.popleft()
                views = reading.result()
                yield views
                self._writes.append((self._writer.submit(_append, self._output, views), buffer))
                self._collect(at_most=self._pool.limit // 2)
                self._read_ahead(waiting)
            self._collect(at_most=0)
        finally:
            self._settle()

    def _read_ahead(self, waiting: Iterator[Chunk]) -> None:
        while (buffer := self._pool.take()) is not None:
            chunk = next(waiting, None)
            if chunk is None:
                self._pool.give_back(buffer)
                return
            self._reads.append((self._readers.submit(_fill, chunk, buffer, self._files), buffer))

    def _collect(self, *, at_most: int) -> None:
        """Take back the buffers of finished writes, waiting until no more than `at_most` are under way."""
        while self._writes and (len(self._writes) > at_most or self._writes[0][0].done()):
            writing, buffer = self._writes.popleft()
            self._pool.give_back(buffer)
            writing.result()

    def _settle(self) -> None:
        """After a failure: wait for what is under way, so that nobody touches a buffer any more."""
        for reading, buffer in self._reads:
            if not reading.cancel():
                reading.exception()
            self._pool.give_back(buffer)
        for writing, buffer in self._writes:
            if not writing.cancel():
                writing.exception()
            self._pool.give_back(buffer)
        self._reads.clear()
        self._writes.clear()


def _append(output: OutputFile, views: list[Bytes]) -> None:
    for view in views:
        output.append(view)


def _fill(chunk: Chunk, buffer: Bytes, files: Mapping[Path, RangeFile]) -> list[Bytes]:
    """Bring the bytes of every part into memory; the arrays are writable and lie in `buffer` where they were read."""
    return [
        _part(part, buffer[part.buffer_offset : part.buffer_offset + part.room_bytes], files) for part in chunk.parts
    ]


def _part(part: Part, room: Bytes, files: Mapping[Path, RangeFile]) -> Bytes:
    segment = part.segment
    if isinstance(segment, CopyRange):
        return _read(files[segment.file], segment.offset, segment.nbytes, room, _purpose(segment))
    if isinstance(segment, CastRange):
        nbytes = segment.n_elements * segment.stored.itemsize
        raw = _read(files[segment.file], segment.offset, nbytes, room, Purpose.EXPERT)
        return cast_bytes(raw, segment.stored, segment.wanted, segment.file)
    if isinstance(segment, Fill):
        room[: segment.nbytes] = 0
        return room[: segment.nbytes]
    return np.frombuffer(bytearray(segment.content), np.uint8)


def _purpose(segment: CopyRange) -> Purpose:
    return Purpose.BASE if segment.is_skeleton else Purpose.EXPERT


def _read(file: RangeFile, offset: int, nbytes: int, room: Bytes, purpose: Purpose) -> Bytes:
    """Read a range, rounded outwards to what the file asks for; `room` is page-aligned."""
    start = offset // file.alignment * file.alignment
    stop = round_up(offset + nbytes, file.alignment)
    found = file.read_into(start, room.data[: stop - start], purpose)
    if start + found < offset + nbytes:
        raise CorruptError.of(
            "storage.shrunk", file.path, f"ended at byte {start + found} while it was being read", "run again"
        )
    return room[offset - start : offset - start + nbytes]


class ChecksumRenewal:
    """Follows a file's bytes in order: takes checksums of members, writes them where they belong, digests the rest.

    Law: after the last byte, every place of every checksum holds the CRC-32 of its range as it was passed through.
    """

    def __init__(self, checksums: Iterable[Checksum]) -> None:
        self._waiting = deque(sorted(checksums, key=lambda c: c.start))
        self._crc = 0
        self._due: list[tuple[int, bytes]] = []
        self._position = 0
        self._digest = blake3()

    def pass_through(self, views: Iterable[Bytes]) -> None:
        """Take the file's next bytes (uint8), renewing checksums in place."""
        for view in views:
            stop = self._position + view.size
            self._take(view, stop)
            self._write_due(view, stop)
            self._digest.update(view.data)
            self._position = stop

    def digest(self) -> str:
        """BLAKE3-128 of everything, 32 hex digits."""
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
