"""SHA-256 digests of files taken from bytes that are read anyway, in about the order in which they lie there."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import CHUNK_BYTES
from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact

WAITING_BYTES = 256 << 20
MOST_READ_AGAIN_FRACTION = 1 / 8


class PassingDigests:
    """The digests of some files, of which `shown` tensors are to pass by; all else is read here, as analysis.

    Memory: `waiting_bytes` of bytes that pass by before their turn. What finds no room is read again at the end; a file
    of which that is more than an eighth gets no digest. Safe to use from many threads.
    """

    def __init__(self, files: Mapping[Location, RangeFile], shown: Iterable[TensorEntry], waiting_bytes: int) -> None:
        ranges: dict[Location, set[tuple[int, int]]] = {path: set() for path in files}
        for entry in shown:
            if entry.nbytes and entry.file in ranges:
                ranges[entry.file].add((entry.offset, entry.offset + entry.nbytes))
        room = _Room(waiting_bytes)
        self._digests = {path: _PassingDigest(files[path], sorted(ranges[path]), room) for path in files}

    def show(self, entry: TensorEntry, first: int, content: NDArray[np.uint8]) -> None:
        """Look at stored bytes of a tensor from its byte `first` on; they are copied where they have to wait."""
        digest = self._digests.get(entry.file)
        if digest is not None and len(content):
            digest.show(entry.offset + first, content)

    def finish(self) -> dict[Location, str]:
        """Return the digests of the files that passed by, by path."""
        finished = {path: digest.finish() for path, digest in self._digests.items()}
        return {path: digest for path, digest in finished.items() if digest is not None}


class _Room:
    """Bytes left for what waits."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes


class _PassingDigest:
    """The digest of one file; `shown` are the byte ranges that pass by, sorted."""

    def __init__(self, file: RangeFile, shown: list[tuple[int, int]], room: _Room) -> None:
        self._file = file
        self._shown = shown
        self._room = room
        self._hasher = hashlib.sha256()
        self._position = 0
        self._waiting: dict[int, bytes] = {}
        self._is_busy = False
        self._lock = threading.Lock()

    def show(self, offset: int, content: NDArray[np.uint8]) -> None:
        with self._lock:
            is_next = offset == self._position and not self._is_busy
            waits = not is_next and offset >= self._position and offset not in self._waiting
            if waits and self._room.take(len(content)):
                self._waiting[offset] = content.tobytes()
            if self._is_busy:
                return  # who is busy sees what waits before it stops
            self._is_busy = True
        if is_next:
            self._update(content.data)
        self._go_on()

    def _gap_end(self) -> int:
        """Return the start of the next range that was read; the position itself inside of one."""
        number = bisect_right(self._shown, self._position, key=lambda piece: piece[0])
        if number and self._position < self._shown[number - 1][1]:
            return self._position
        return self._shown[number][0] if number < len(self._shown) else self._file.size_bytes

    def _go_on(self) -> None:
        """Hash what waits and what does not pass by, as far as there is no hole."""
        while True:
            with self._lock:
                content = self._waiting.pop(self._position, None)
                gap_end = self._gap_end()
                if content is None and gap_end == self._position:
                    self._is_busy = False
                    return
            if content is None:
                self._read(min(gap_end, self._position + CHUNK_BYTES))
            else:
                self._room.give_back(len(content))
                self._update(memoryview(content))

    def _update(self, content: memoryview) -> None:
        self._hasher.update(content)
        with self._lock:
            self._position += len(content)

    def _read(self, stop: int) -> None:
        self._update(read_exact(self._file, self._position, stop, Purpose.ANALYSIS).data)

    def finish(self) -> str | None:
        """Return the digest, once all has passed by; None where too much would have to be read again."""
        self._is_busy = True
        self._go_on()
        remaining_bytes = self._file.size_bytes - self._position - sum(map(len, self._waiting.values()))
        if remaining_bytes > self._file.size_bytes * MOST_READ_AGAIN_FRACTION:
            return None
        while self._position < self._file.size_bytes:
            content = self._waiting.pop(self._position, None)
            if content is not None:
                self._update(memoryview(content))
            else:
                until = min((start for start in self._waiting if start > self._position), default=self._file.size_bytes)
                self._read(min(until, self._position + CHUNK_BYTES))
        return self._hasher.hexdigest()
