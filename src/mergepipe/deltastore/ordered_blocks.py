"""Write the encoded blocks of one store in index order, in whatever order they arrive."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.block import EncodedBlock, RawBytes
from mergepipe.deltastore.codec.levels import Piece
from mergepipe.deltastore.writer import StoreWriter
from mergepipe.storage import owned
from mergepipe.storage.local import os_error
from mergepipe.storage.ranges import fill_from_descriptor

EARLY_BYTES = 8 << 20


class OrderedBlocks:
    """Accepts blocks in any order from many threads, and writes them in index order.

    Memory: `early_bytes` of blocks that arrive before their turn, and their rows; further ones wait in the temporary
    file `early`, created on demand and truncated when nothing waits in it. `on_written` is called, under the lock, with
    the number of blocks written. `put` copies or writes pieces before it returns. After a failure nothing more is
    accepted: the content on disk is unknown then, and must not be recorded as durable.
    """

    def __init__(
        self, writer: StoreWriter, early: Path, on_written: Callable[[int], None], early_bytes: int = EARLY_BYTES
    ) -> None:
        self._writer = writer
        self._on_written = on_written
        self._limit = early_bytes
        self._lock = threading.Lock()
        self._waiting: dict[int, _PendingBlock] = {}
        self._held_bytes = 0
        self._early = _EarlyFile(early)
        self._failure: BaseException | None = None

    @property
    def n_written(self) -> int:
        """The number of blocks in the store, which is the number of the next block."""
        return self._writer.n_rows

    def put(self, number: int, block: EncodedBlock, row: NDArray[np.void]) -> None:
        """Add block `number` with its row of the index.

        Raises:
            StorageError: this block, or one before, could not be written.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                self._take(number, block, row)
            except BaseException as error:
                self._failure = error
                raise

    def _take(self, number: int, block: EncodedBlock, row: NDArray[np.void]) -> None:
        if number != self._writer.n_rows:
            self._waiting[number] = self._set_aside(block, row)
            return
        self._writer.append(row, block.pieces)
        while (waiting := self._waiting.pop(self._writer.n_rows, None)) is not None:
            self._writer.append(waiting.row, self._taken_back(waiting))
        self._on_written(self._writer.n_rows)

    def _set_aside(self, block: EncodedBlock, row: NDArray[np.void]) -> _PendingBlock:
        content = np.concatenate([np.empty(0, np.uint8), *(block.pieces[piece] for piece in sorted(block.pieces))])
        if self._held_bytes + len(content) > self._limit:
            return _PendingBlock(row, None, self._early.append(content))
        self._held_bytes += len(content)
        return _PendingBlock(row, content, 0)

    def _taken_back(self, waiting: _PendingBlock) -> Mapping[Piece, RawBytes]:
        lengths = [int(length) for length in waiting.row["lengths"][0]]
        if waiting.content is None:
            content = self._early.take_back(waiting.offset, sum(lengths))
        else:
            content = waiting.content
            self._held_bytes -= len(content)
        ends = np.cumsum(lengths)
        return {piece: content[ends[piece] - lengths[piece] : ends[piece]] for piece in Piece}

    def close(self) -> None:
        """Remove the temporary file."""
        self._early.close()


@dataclass(frozen=True, slots=True)
class _PendingBlock:
    """A block before its turn: its pieces concatenated, in memory or (None) in the temporary file at `offset`."""

    row: NDArray[np.void]
    content: RawBytes | None
    offset: int


class _EarlyFile:
    """The temporary file of blocks that do not fit into memory; used under the caller's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._end = 0
        self._left = 0

    def append(self, content: RawBytes) -> int:
        """Write bytes at the end; return their offset."""
        start = self._end
        unwritten = content.data
        try:
            if self._descriptor < 0:
                with contextlib.suppress(FileNotFoundError):  # left by a killed run
                    owned.remove_file(self._path)
                self._descriptor = owned.create_file(self._path, flags=os.O_RDWR, mode=0o600)
            while unwritten:
                count = os.pwrite(self._descriptor, unwritten, self._end)
                self._end += count
                unwritten = unwritten[count:]
        except OSError as error:
            raise os_error(error, self._path, f"writing {len(content)} bytes") from error
        self._left += len(content)
        return start

    def take_back(self, offset: int, nbytes: int) -> RawBytes:
        """Read back bytes, which are free afterwards."""
        content = np.empty(nbytes, np.uint8)
        try:
            fill_from_descriptor(self._descriptor, self._path, offset, content)
            self._left -= nbytes
            if self._left == 0:
                os.ftruncate(self._descriptor, 0)
                self._end = 0
        except OSError as error:
            raise os_error(error, self._path, f"reading {nbytes} bytes") from error
        return content

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with contextlib.suppress(FileNotFoundError):
                owned.remove_file(self._path)
