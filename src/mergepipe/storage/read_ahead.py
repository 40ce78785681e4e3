"""Requests ranges of files before they are read, and keeps them in bounded memory until they are."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import MergePipeError
from mergepipe.storage.buffers import PAGE_BYTES, aligned_buffer, round_up
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import FileOnTop, request

PIECE_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes `[start, stop)` of a file."""

    location: Location
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class _Piece:
    """A requested range; `content` is None once its request has failed."""

    range: FileRange
    content: NDArray[np.uint8] | None
    unserved_bytes: int
    n_users: int = 0
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def buffer_bytes(self) -> int:
        return round_up(len(self.range), PAGE_BYTES)


class ReadAhead:
    """Reads ranges in order on `workers` threads, from `start` until `stop`; files from `over` serve them after that.

    Every range is charged to `purpose` when it is requested, and serves reads of that purpose only. One whose request
    failed is requested again by its reader. Memory: the ranges, each until all of it was served, within what
    `limit_memory` leaves.
    """

    def __init__(
        self, open_file: Callable[[Location], RangeFile], ranges: Sequence[FileRange], purpose: Purpose, workers: int
    ) -> None:
        self._open_file = open_file
        self._purpose = purpose
        self._unrequested = iter(_pieces(ranges))
        self._requested: dict[Location, list[_Piece]] = defaultdict(list)
        self._is_stopped = False
        self._most_bytes: int | None = None
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, name="read-ahead", daemon=True) for _ in range(workers)]

    def start(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Request nothing more; what is requested already is served from now on."""
        with self._lock:
            self._is_stopped = True

    def close(self) -> None:
        """Stop, wait for the requests under way, and release the memory."""
        self.stop()
        for thread in self._threads:
            thread.join()
        self._requested.clear()

    def limit_memory(self, most_bytes: int, *, drops: bool) -> bool:
        """Hold `most_bytes` from now on if no more is held; return whether that is so.

        With `drops`, ranges that were read are given up for it, the last of them first: they are requested again when
        they are needed.
        """
        with self._lock:
            pieces = [piece for pieces in self._requested.values() for piece in pieces]
            held_bytes = self._held_bytes()
            for piece in reversed(pieces) if drops else ():
                if held_bytes > most_bytes and piece.is_done.is_set() and not piece.n_users:
                    self._requested[piece.range.location].remove(piece)
                    piece.content = None
                    held_bytes -= piece.buffer_bytes
            if held_bytes > most_bytes:
                return False
            self._most_bytes = most_bytes
            return True

    def _held_bytes(self) -> int:
        return sum(piece.buffer_bytes for pieces in self._requested.values() for piece in pieces)

    def over(self, file: RangeFile) -> RangeFile:
        """Return a file that reads from what is there, and the rest from `file`."""
        return _AheadFile(file, self)

    def _work(self) -> None:
        while (piece := self._next_piece()) is not None:
            try:
                file = self._open_file(piece.range.location)
                try:
                    assert piece.content is not None
                    request(file, piece.range.start, piece.content, piece.unserved_bytes, self._purpose)
                finally:
                    file.close()
            except MergePipeError:
                piece.content = None
            finally:
                piece.is_done.set()

    def _next_piece(self) -> _Piece | None:
        with self._lock:
            wanted = None if self._is_stopped else next(self._unrequested, None)
            if wanted is None:
                return None
            nbytes = len(wanted)
            room_bytes = round_up(nbytes, PAGE_BYTES)
            if self._most_bytes is not None and self._held_bytes() + room_bytes > self._most_bytes:
                return None
            piece = _Piece(wanted, aligned_buffer(room_bytes)[:nbytes], nbytes)
            self._requested[wanted.location].append(piece)
            return piece

    def piece_from(self, location: Location, position: int, purpose: Purpose) -> _Piece | None:
        """Return the piece that holds or comes first after `position`; None for another purpose, and before `stop`."""
        with self._lock:
            pieces = self._requested.get(location, []) if self._is_stopped and purpose is self._purpose else []
            return min((p for p in pieces if p.range.stop > position), key=lambda p: p.range.start, default=None)

    def take(self, piece: _Piece, start: int, out: memoryview) -> bool:
        """Copy bytes of a piece from `start` on, waiting for them; return False where there are none to be had."""
        piece.is_done.wait()
        with self._lock:
            content = piece.content
            if content is None:
                return False
            piece.n_users += 1
        first = start - piece.range.start
        out[:] = content.data[first : first + len(out)]
        del content
        with self._lock:
            piece.n_users -= 1
            piece.unserved_bytes -= len(out)
            if piece.unserved_bytes <= 0:
                self._requested[piece.range.location].remove(piece)
        return True


class _AheadFile(FileOnTop):
    """A file of which some ranges are read already."""

    def __init__(self, file: RangeFile, ahead: ReadAhead) -> None:
        super().__init__(file)
        self._ahead = ahead
        self.close = file.close

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; see `RangeFile.read_into`."""
        position, stop = offset, max(offset, min(offset + len(buffer), self.size_bytes))
        while position < stop:
            piece = self._ahead.piece_from(self.location, position, purpose)
            begins = stop if piece is None else min(stop, piece.range.start)
            if piece is None or begins > position:
                self._request(position, buffer[position - offset : begins - offset], purpose)
                position = begins
                continue
            ends = min(stop, piece.range.stop)
            part = buffer[position - offset : ends - offset]
            if not self._ahead.take(piece, position, part):
                self._request(position, part, purpose)
            position = ends
        return stop - offset

    def _request(self, offset: int, buffer: memoryview, purpose: Purpose) -> None:
        request(self._file, offset, np.frombuffer(buffer, np.uint8), len(buffer), purpose)


def read_ahead_of(store: object) -> ReadAhead | None:
    """Return the read-ahead that serves the files of a store, if one does."""
    ahead = getattr(store, "ahead", None)
    return ahead if isinstance(ahead, ReadAhead) else None


def _pieces(ranges: Sequence[FileRange]) -> list[FileRange]:
    """Join ranges that touch, and cut them into what is requested at once."""
    joined: list[FileRange] = []
    for wanted in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.location == wanted.location and last.stop == wanted.start:
            joined[-1] = FileRange(last.location, last.start, wanted.stop)
        else:
            joined.append(wanted)
    return [
        FileRange(whole.location, start, min(start + PIECE_BYTES, whole.stop))
        for whole in joined
        for start in range(whole.start, whole.stop, PIECE_BYTES)
    ]
