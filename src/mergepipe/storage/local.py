"""Local files by byte range: direct reads for files on disk, ordinary ones for files already in the page cache."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from mergepipe.budget import Ledger, Purpose
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.residency import resident_fraction

DIRECT_ALIGNMENT_BYTES = 4096
RESIDENT_ENOUGH_FRACTION = 0.5


def os_error(error: OSError, path: Path, doing: str) -> MergePipeError:
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


class LocalFile:
    """One open file. `alignment` is 4096 while reads bypass the page cache and 1 otherwise.

    Reads are positional and never go past what was asked for: kernel read-ahead is switched off.
    """

    def __init__(self, path: Path, descriptor: int, size_bytes: int, *, direct: bool, ledger: Ledger) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size_bytes = size_bytes
        self._direct = direct
        self._ledger = ledger
        self._ledger_name = str(path)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def alignment(self) -> int:
        return DIRECT_ALIGNMENT_BYTES if self._direct else 1

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; see `RangeFile.read_into`."""
        self._ledger.charge(self._ledger_name, purpose, len(buffer))
        done = 0
        try:
            while done < len(buffer) and offset + done < self._size_bytes:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
                if self._direct and done % DIRECT_ALIGNMENT_BYTES:
                    break  # only the end of the file ends a direct read off the grid
        except OSError as error:
            raise os_error(error, self._path, f"reading {len(buffer)} bytes at {offset}") from error
        return done

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalStore:
    """Files of the local machine."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger if ledger is not None else Ledger()

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    def size_bytes(self, path: Path) -> int:
        """Size of a regular file."""
        try:
            status = path.stat()
        except OSError as error:
            raise os_error(error, path, "looking it up") from error
        if not stat.S_ISREG(status.st_mode):
            raise StorageError.of("storage.not-a-file", path, "not a regular file", "give a file")
        return status.st_size

    def open(self, path: Path, *, direct: bool = False, cached: bool = True) -> LocalFile:
        """Open `path` for positional reads; `direct` bypasses the page cache unless most of the file lies in it.

        Without `cached` it does so wherever the file lies.
        """
        size = self.size_bytes(path)
        descriptor = _open_read_only(path)
        try:
            use_direct = (
                direct
                and size > 0
                and not (cached and resident_fraction(descriptor, size) >= RESIDENT_ENOUGH_FRACTION)
                and _switch_to_direct(descriptor)
            )
            if not use_direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            os.close(descriptor)
            raise os_error(error, path, "opening it") from error
        if use_direct:
            self._ledger.charge(str(path), Purpose.METADATA, DIRECT_ALIGNMENT_BYTES)  # the trial read
        return LocalFile(path, descriptor, size, direct=use_direct, ledger=self._ledger)

    def read_metadata(self, path: Path, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset`, charged as metadata."""
        size = self.size_bytes(path)
        wanted = max(0, min(nbytes, size - offset))
        descriptor = _open_read_only(path)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            parts = []
            while wanted > 0:
                part = os.pread(descriptor, wanted, offset)
                if not part:
                    raise CorruptError.of(
                        "storage.shrunk", path, f"ended at byte {offset} while it was being read", "run again"
                    )
                parts.append(part)
                offset += len(part)
                wanted -= len(part)
        except OSError as error:
            raise os_error(error, path, "reading it") from error
        finally:
            os.close(descriptor)
        data = b"".join(parts)
        self._ledger.charge(str(path), Purpose.METADATA, len(data))
        return data


def _open_read_only(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise os_error(error, path, "opening it") from error


def _switch_to_direct(descriptor: int) -> bool:
    """Set O_DIRECT on an open file; False where the file system has none, shown by a trial read of one page."""
    import fcntl
    import mmap

    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with mmap.mmap(-1, DIRECT_ALIGNMENT_BYTES) as page:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag)
            os.preadv(descriptor, [page], 0)
        except OSError:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            return False
    return True
