"""Sequential output files that bypass the page cache where they can, durable once closed."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from mergepipe.budget import Ledger, Purpose
from mergepipe.storage.buffers import aligned_buffer
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES, os_error

CHUNK_BYTES = 8 << 20


class OutputFile:
    """A new file of known size, written from start to end.

    Its space is reserved when it is opened, so that a full disk shows before the work and not after it. Leaving the
    context without `close` leaves the file incomplete: its directory is staging and is removed by its owner.
    """

    def __init__(self, path: Path, size_bytes: int, ledger: Ledger) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._ledger = ledger
        self._chunk = aligned_buffer(CHUNK_BYTES)
        self._filled = 0
        self._flushed = 0
        self._descriptor = self._open()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = -1
        try:
            try:
                descriptor = os.open(self._path, flags | getattr(os, "O_DIRECT", 0), 0o666)
            except OSError:  # the file system has no direct writes
                descriptor = os.open(self._path, flags & ~os.O_EXCL, 0o666)
            if self._size_bytes:
                os.posix_fallocate(descriptor, 0, self._size_bytes)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise os_error(error, self._path, f"reserving {self._size_bytes} bytes") from error
        return descriptor

    def append(self, source: NDArray[np.uint8] | bytes) -> None:
        """Write `source` (uint8) after what was written before."""
        view = np.frombuffer(source, np.uint8) if isinstance(source, bytes) else source
        done = 0
        while done < len(view):
            count = min(CHUNK_BYTES - self._filled, len(view) - done)
            self._chunk[self._filled : self._filled + count] = view[done : done + count]
            self._filled += count
            done += count
            if self._filled == CHUNK_BYTES:
                self._flush(CHUNK_BYTES)

    def _flush(self, nbytes: int) -> None:
        try:
            written = 0
            while written < nbytes:
                written += os.pwrite(self._descriptor, self._chunk.data[written:nbytes], self._flushed + written)
        except OSError as error:
            raise os_error(error, self._path, f"writing at byte {self._flushed}") from error
        self._ledger.charge(str(self._path), Purpose.OUTPUT, self._filled)
        self._flushed += self._filled
        self._filled = 0

    def close(self) -> None:
        """Write what is left, cut the file to its size and make it durable."""
        if self._flushed + self._filled != self._size_bytes:
            raise ValueError(f"{self._path}: {self._flushed + self._filled} bytes written, {self._size_bytes} declared")
        if self._filled:
            # A direct write ends on the grid: it goes past the end by less than a page, which ftruncate takes back.
            tail = -self._filled % DIRECT_ALIGNMENT_BYTES
            self._chunk[self._filled : self._filled + tail] = 0
            self._flush(self._filled + tail)
        try:
            os.ftruncate(self._descriptor, self._size_bytes)
            os.fsync(self._descriptor)
        except OSError as error:
            raise os_error(error, self._path, "making it durable") from error
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, path, "making it durable") from error


def write_durably(path: Path, content: bytes, ledger: Ledger) -> None:
    """Write a small new file and make it durable."""
    try:
        with path.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise os_error(error, path, f"writing {len(content)} bytes") from error
    ledger.charge(str(path), Purpose.OUTPUT, len(content))
