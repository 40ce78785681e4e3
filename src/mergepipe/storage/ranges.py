"""Reads an exact range of bytes of a file, and alone knows what a short read is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.storage.buffers import PAGE_BYTES, aligned_buffer, round_up
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.regular import read_up_to
from mergepipe.storage.system_calls import read_at

SHRUNK = "storage.shrunk"
"""The code of the error for a file that ends before a range that it should hold."""


class FileOnTop:
    """Answers for the file below what does not change when some of its ranges are served from elsewhere."""

    def __init__(self, file: RangeFile) -> None:
        self._file = file

    @property
    def location(self) -> Location:
        return self._file.location

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def alignment(self) -> int:
        return self._file.alignment

    @property
    def version(self) -> str:
        return self._file.version


def read_exact(
    file: RangeFile, start: int, stop: int, purpose: Purpose, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Read bytes `[start, stop)` in one request, rounded outwards to the alignment of `file`; copy nothing.

    Returns the part (uint8) of `out` that holds them, or of a new page-aligned buffer. `out` has at least
    `request_bytes(file, start, stop)` bytes, at an address that is a multiple of the file's alignment. An empty range
    makes no request.

    Raises:
        CorruptError: `storage.shrunk`, the file ends before `stop`.
        StorageError: the read failed.
    """
    if start == stop:
        return np.empty(0, np.uint8) if out is None else out[:0]
    alignment = file.alignment
    first = start // alignment * alignment
    nbytes = round_up(stop, alignment) - first
    room = aligned_buffer(round_up(nbytes, PAGE_BYTES)) if out is None else out
    request(file, first, room[:nbytes], stop - first, purpose)
    return room[start - first : stop - first]


def request_bytes(file: RangeFile, start: int, stop: int) -> int:
    """Size in bytes of the request that `read_exact` makes."""
    if start == stop:
        return 0
    return round_up(stop, file.alignment) - start // file.alignment * file.alignment


def request(file: RangeFile, offset: int, out: NDArray[np.uint8], needed_bytes: int, purpose: Purpose) -> None:
    """Make the one request for all of `out` (uint8) at `offset`, of which the file must hold the first `needed_bytes`.

    For requests whose size was fixed when they were planned; `offset`, the size and the address of `out` are multiples
    of the file's alignment.

    Raises:
        CorruptError: `storage.shrunk`, the file holds fewer.
        StorageError: the read failed.
    """
    got = file.read_into(offset, out.data, purpose)
    if got < needed_bytes:
        raise shrunk(file.location, offset, needed_bytes, got)


def read_descriptor_range(descriptor: int, path: Path, offset: int, nbytes: int) -> bytes:
    """Read exactly `nbytes` at `offset` of an open file of this machine, which errors call `path`.

    Raises:
        CorruptError: `storage.shrunk`, it ends before.
        OSError: the operating system failed the read.
    """
    content = read_up_to(descriptor, offset, nbytes)
    if len(content) < nbytes:
        raise shrunk(path, offset, nbytes, len(content))
    return content


def fill_from_descriptor(descriptor: int, path: object, offset: int, out: NDArray[np.uint8]) -> None:
    """Fill all of `out` (uint8) from `offset` of an open file of this machine, as `read_descriptor_range` reads."""
    done = 0
    while done < len(out):
        count = read_at(descriptor, out.data[done:], offset + done)
        if count == 0:
            raise shrunk(path, offset, len(out), done)
        done += count


def shrunk(path: object, offset: int, needed_bytes: int, got_bytes: int) -> MergePipeError:
    """Make the error for a file that gave `got_bytes` of the `needed_bytes` at `offset`."""
    message = f"gave {got_bytes} of the {needed_bytes} bytes at byte {offset}: it ends before"
    return CorruptError.of(SHRUNK, path, message, "see that nothing writes to the file, then run again")
