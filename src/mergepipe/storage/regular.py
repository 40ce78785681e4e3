"""Open and read regular files only, without blocking on FIFOs or devices; small files up to a size limit."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, StorageError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_HINT = "put a regular file in its place"
_LARGEST_READ_BYTES = 1 << 30  # Linux reads at most 2 GiB at once


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
        return StorageError.of("storage.out-of-memory", path, f"{doing} failed: {reason}", hint)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError.of("storage.too-many-files", path, f"{doing} failed: {reason}", "raise `ulimit -n`")
    return StorageError.of("storage.io", path, f"{doing} failed: {reason}", "check the disk, then run again")


def not_a_file(path: Path, mode: int) -> MergePipeError:
    """Make the error for a path whose `st_mode` is not that of a regular file."""
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return StorageError.of("storage.not-a-file", path, f"is {kind}, a regular file is needed", _HINT)


def regular_status(path: Path) -> os.stat_result:
    """Look up a regular file, following links, without opening it.

    Raises:
        NotFoundError: `storage.not-found`.
        StorageError: `storage.not-a-file`, or the operating system refused.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise _refused(error, path, "looking it up") from error
    if not stat.S_ISREG(status.st_mode):
        raise not_a_file(path, status.st_mode)
    return status


def open_regular(path: Path) -> int:
    """Open a regular file for reading, following links; return its descriptor, which the caller closes.

    Never waits for the other end of a FIFO, never reads a device, never takes a terminal.

    Raises:
        NotFoundError: `storage.not-found`.
        StorageError: `storage.not-a-file`, or the operating system refused.
    """
    regular_status(path)  # before opening: to open a device may already do something
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise os_error(error, path, "opening it") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise not_a_file(path, status.st_mode)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except OSError as error:
        os.close(descriptor)
        raise os_error(error, path, "opening it") from error
    except MergePipeError:
        os.close(descriptor)
        raise
    return descriptor


def read_small(path: Path, limit_bytes: int) -> bytes:
    """Read a whole regular file of at most `limit_bytes`; a larger one is refused before anything is read.

    Memory: the size of the file, at most `limit_bytes`.

    Raises:
        NotFoundError: `storage.not-found`.
        StorageError: `storage.not-a-file`, or the operating system refused.
        CorruptError: `storage.too-large`.
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
        return os.pread(descriptor, nbytes, 0)
    except OSError as error:
        raise os_error(error, path, "reading it") from error
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, path: Path, limit_bytes: int) -> bytes:
    """Read a whole open regular file from its start, which errors call `path`. Raises as `read_small` does."""
    try:
        content = b""
        while len(content) < (size_bytes := os.fstat(descriptor).st_size):  # again: it may have grown meanwhile
            if size_bytes > limit_bytes:
                raise too_large(path, size_bytes, limit_bytes)
            part = read_up_to(descriptor, len(content), size_bytes - len(content))
            if not part:
                break
            content += part
    except OSError as error:
        raise os_error(error, path, "reading it") from error
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


def too_large(path: object, size_bytes: int, limit_bytes: int) -> MergePipeError:
    """Make the error for a small file that is larger than any of its kind."""
    message = f"has {size_bytes} bytes, at most {limit_bytes} are read of a file of this kind"
    return CorruptError.of("storage.too-large", path, message, "put the right file in its place")


def _refused(error: OSError | ValueError, path: Path, doing: str) -> MergePipeError:
    if isinstance(error, OSError):
        return os_error(error, path, doing)
    # A NUL or a lone surrogate in the path.
    return NotFoundError.of("storage.not-found", ascii(str(path)), f"is no path: {error}", "check the path")
