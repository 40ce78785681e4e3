"""Reads exact ranges of files, and alone knows short reads, special files and what only some systems can do.

What only some platforms have is looked for at every call, so that a test can take it away. Reads go into page-aligned
buffers: the pool of them is the memory a pipeline may hold, allocated once and reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.range_file import RangeFile, too_large

PAGE_BYTES = 4096
_LEAST_HUGE_BYTES = 4 << 20  # from here on pages of 2 MiB are asked for: they are made in a fifth of the time


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is >= `value`."""
    return -(-value // step) * step


class BufferPool:
    """At most `capacity_bytes // buffer_bytes` buffers, created when first needed. Used from one thread.

    The memory bound is `capacity_bytes`, whatever is in flight.
    """

    def __init__(self, buffer_bytes: int, capacity_bytes: int) -> None:
        self._buffer_bytes = round_up(buffer_bytes, PAGE_BYTES)
        self.limit: Final = capacity_bytes // self._buffer_bytes  # the largest number of buffers
        if self.limit < 1:
            raise ValueError(f"{capacity_bytes} bytes hold no buffer of {self._buffer_bytes}")
        self._free: list[NDArray[np.uint8]] = []
        self._made = 0

    def take(self) -> NDArray[np.uint8] | None:
        """Return a buffer (uint8, page-aligned, contents undefined), or None when all are in use."""
        if self._free:
            return self._free.pop()
        if self._made == self.limit:
            return None
        self._made += 1
        return aligned_buffer(self._buffer_bytes)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer; its holder must not touch it afterwards."""
        self._free.append(buffer)


class WaitingRoom:
    """Bounds the bytes that are held by all that wait for others before them. Safe to use from many threads."""

    def __init__(self, nbytes: int) -> None:
        self._left_bytes = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Claim room, or give it back where `nbytes` is negative; False where there is too little."""
        with self._lock:
            fits = nbytes <= self._left_bytes
            self._left_bytes -= nbytes if fits else 0
            return fits


def aligned_buffer(nbytes: int, *, is_reused: bool = True) -> NDArray[np.uint8]:
    """A page-aligned uint8 array outside the Python heap, freed with its last reference.

    One that is not filled again and again has small pages: where a virtual machine gave its free memory back to the
    host, the first touch of a large page is several times as dear (2.3 s a GiB against 0.4, measured on one).
    """
    try:
        mapping = _anonymous_mapping(max(nbytes, 1), is_reused)  # no mapping is empty
    except OSError as error:
        message = f"the system gives no {nbytes} bytes for a buffer: {error.strerror}"
        hint = "close other programs, or lower --memory or --threads"
        raise StorageError.of("storage.exhausted", "", message, hint) from error
    return np.frombuffer(mapping, np.uint8)[:nbytes]


def _anonymous_mapping(nbytes: int, is_reused: bool) -> mmap.mmap:
    """Map memory of this process alone where the system knows it: shared pages cost twice as much to make."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_reused and nbytes >= _LEAST_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


T = TypeVar("T", bound=np.generic)

KEPT_BYTES = (8 << 20) + 2 * PAGE_BYTES  # longer arrays are not kept
_STEP_BYTES = 256 << 10


_buffers = threading.local()  # by name


def scratch(name: str, n: int, dtype: type[T]) -> NDArray[T]:
    """Return this thread's page-aligned array of `n` elements for one use, `name`; contents are undefined.

    It is valid until the same thread asks for `name` again: never return it to callers that may keep it. Fresh arrays
    cost page faults.
    """
    element_type = np.dtype(dtype)
    nbytes = n * element_type.itemsize
    buffer: NDArray[np.uint8] | None = getattr(_buffers, name, None)
    if buffer is None or len(buffer) < nbytes:
        buffer = aligned_buffer(max(round_up(nbytes, _STEP_BYTES), _STEP_BYTES))
        if nbytes <= KEPT_BYTES:
            setattr(_buffers, name, buffer)
    return buffer[:nbytes].view(element_type)


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had resident."""
    import resource

    unit_bytes = {"darwin": 1}.get(sys.platform, 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


SHRUNK = "storage.shrunk"
"""The code of the error for a file that ends before a range that it should hold."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_HINT = "put a regular file in its place"
_LARGEST_READ_BYTES = 1 << 30  # Linux reads at most 2 GiB at once
_SYNC_FILE_RANGE_WRITE = 2
_SPARE_FILES = 64


# --- ranges ---


def read_exact(
    file: RangeFile, start: int, stop: int, purpose: Purpose, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Read bytes `[start, stop)` in one request, rounded outwards to the alignment of `file`; copy nothing.

    Returns the part (uint8) of `out` that holds them, or of a new page-aligned buffer. `out` has at least
    `request_bytes(file, start, stop)` bytes, at an address that is a multiple of the file's alignment. An empty range
    makes no request.
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
    """
    got = file.read_into(offset, out.data, purpose)
    if got < needed_bytes:
        raise shrunk(file.location, offset, needed_bytes, got)


def read_descriptor_range(descriptor: int, path: Path, offset: int, nbytes: int) -> bytes:
    """Read exactly `nbytes` at `offset` of an open file of this machine, which errors call `path`."""
    content = read_up_to(descriptor, offset, nbytes)
    if len(content) < nbytes:
        raise shrunk(path, offset, nbytes, len(content))
    return content


def shrunk(path: object, offset: int, needed_bytes: int, got_bytes: int) -> MergePipeError:
    """Make the error for a file that gave `got_bytes` of the `needed_bytes` at `offset`."""
    message = f"gave {got_bytes} of the {needed_bytes} bytes at byte {offset}: it ends before"
    return CorruptError.of(SHRUNK, path, message, "see that nothing writes to the file, then run again")


# --- regular files ---


def os_error(error: OSError, path: object, doing: str) -> MergePipeError:
    """Turn an `OSError` into the typed error of the same meaning, naming the file and what was being done."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError.of("storage.not-found", path, "no such file", "check the path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError.of("storage.no-space", path, f"{doing} failed: {reason}", "free some space and run again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError.of("storage.permission", path, f"{doing} failed: {reason}", "check the permissions")
    if error.errno in (errno.ENOMEM, errno.EAGAIN):
        hint = "close other programs, raise `ulimit -v`, or lower --memory or --threads"
        return StorageError.of("storage.exhausted", path, f"{doing} failed: {reason}", hint)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError.of("storage.exhausted", path, f"{doing} failed: {reason}", "raise `ulimit -n`")
    return StorageError.of("storage.io", path, f"{doing} failed: {reason}", "check the disk, then run again")


@contextlib.contextmanager
def os_errors(path: object, doing: str) -> Iterator[None]:
    """Raise errors of the operating system as `os_error` makes them."""
    try:
        yield
    except OSError as error:
        raise os_error(error, path, doing) from error


def not_a_file(path: Path, mode: int) -> MergePipeError:
    """Make the error for a path whose `st_mode` is not that of a regular file."""
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return StorageError.of("storage.not-a-file", path, f"is {kind}, a regular file is needed", _HINT)


def regular_status(path: Path) -> os.stat_result:
    """Look up a regular file, following links, without opening it."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise os_error(error, path, "looking it up") from error
        # A NUL or a lone surrogate in the path.
        message = f"is not a path: {error}"
        raise NotFoundError.of("storage.not-found", ascii(str(path)), message, "check the path") from error
    if not stat.S_ISREG(status.st_mode):
        raise not_a_file(path, status.st_mode)
    return status


def open_regular(path: Path) -> int:
    """Open a regular file for reading, following links; return its descriptor, which the caller closes.

    Never waits for the other end of a FIFO, never reads a device, never takes a terminal.
    """
    regular_status(path)  # before opening: to open a device may already do something
    with os_errors(path, "opening it"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise not_a_file(path, status.st_mode)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        except (OSError, MergePipeError):
            os.close(descriptor)
            raise
    return descriptor


def read_small(path: Path, limit_bytes: int) -> bytes:
    """Read a whole regular file of at most `limit_bytes`; a larger one is refused before anything is read.

    Memory: the size of the file, at most `limit_bytes`.
    """
    descriptor = open_regular(path)
    try:
        return read_descriptor(descriptor, path, limit_bytes)
    finally:
        os.close(descriptor)


def read_head(path: Path, nbytes: int) -> bytes:
    """Read the first `nbytes` of a regular file, fewer where it ends before. Raises as `open_regular` does."""
    descriptor = open_regular(path)
    try:
        with os_errors(path, "reading it"):
            return os.pread(descriptor, nbytes, 0)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, path: Path, limit_bytes: int) -> bytes:
    """Read a whole open regular file from its start, which errors call `path`. Raises as `read_small` does."""
    content = b""
    with os_errors(path, "reading it"):
        while len(content) < (size_bytes := os.fstat(descriptor).st_size):  # again: it may have grown meanwhile
            if size_bytes > limit_bytes:
                raise too_large(path, size_bytes, limit_bytes)
            part = read_up_to(descriptor, len(content), size_bytes - len(content))
            if not part:
                break
            content += part
    return content


def read_up_to(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Read `nbytes` at `offset` of an open file, fewer only where it ends before. Raises `OSError`."""
    parts: list[bytes] = []
    done = 0
    while done < nbytes:
        part = os.pread(descriptor, min(nbytes - done, _LARGEST_READ_BYTES), offset + done)
        if not part:
            break
        parts.append(part)
        done += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


# --- what only some systems can do ---


def allow_open_files(count: int) -> None:
    """Raise the soft limit on open files for `count` and some more; where that is refused, opening says so."""
    import resource

    wanted = count + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read into `buffer` from `offset`; return the count, which is less than asked for where the system gave less."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    content = os.pread(descriptor, len(buffer), offset)
    buffer[: len(content)] = content
    return len(content)


def stop_read_ahead(descriptor: int) -> None:
    """Switch the kernel's read-ahead off for an open file, where it can be: bytes nobody asked for stay unread."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    elif hasattr(fcntl, "F_RDAHEAD"):  # macOS
        fcntl.fcntl(descriptor, fcntl.F_RDAHEAD, 0)


def start_writing_back(descriptor: int, first: int, nbytes: int) -> None:
    """Let the system begin to write bytes of an open file to its disk, where it can be told; failures show in fsync."""
    function = getattr(_c_library(), "sync_file_range", None)  # Linux
    if function is not None:
        function(descriptor, ctypes.c_int64(first), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def switch_direct(descriptor: int, *, wanted: bool) -> bool:
    """Switch direct reads and writes of an open file on or off, where it can be; return whether they are on then."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):  # the file system has none
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & direct)
