"""Local files by byte range: direct reads for files on disk, ordinary ones for files already in the page cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from pathlib import Path
from typing import Final

import numpy as np

from mergepipe.errors import MergePipeError, NotFoundError, StorageError
from mergepipe.storage.contract import Entry, FileKind, FileStatus, Store, StoreTerms, version_of
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import (
    open_regular,
    os_error,
    os_errors,
    read_at,
    read_descriptor_range,
    read_small,
    regular_status,
    stop_read_ahead,
    switch_direct,
)

DIRECT_ALIGNMENT_BYTES = 4096
RESIDENT_ENOUGH_FRACTION = 0.5
SAMPLE_WINDOWS = 32
WINDOW_PAGES = 64
LOCAL_TERMS = StoreTerms(granularity_bytes=DIRECT_ALIGNMENT_BYTES, most_requests=8, request_cost_bytes=0)


class LocalFile:
    """One open file. `alignment` is 4096 if it was opened for direct reads and 1 otherwise.

    Reads are positional and never go past what was asked for: kernel read-ahead is switched off. Where the file system
    takes the flag of direct reads but refuses such a read (EINVAL, which transfers nothing), the same bytes are read
    the ordinary way, and so are all that follow.
    """

    def __init__(self, location: Location, descriptor: int, size_bytes: int, *, direct: bool, ledger: Ledger) -> None:
        self.location: Final = location
        self.size_bytes: Final = size_bytes
        self.alignment: Final = DIRECT_ALIGNMENT_BYTES if direct else 1
        self._descriptor = descriptor
        self._direct = direct
        self._reads_directly = direct
        self._ledger = ledger
        self._ledger_name = str(location)

    @property
    def version(self) -> str:
        """The version of the opened file."""
        with os_errors(self.location, "looking at it"):
            return version_of(self.location.local_path, os.fstat(self._descriptor))

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; see `RangeFile.read_into`."""
        self._ledger.charge(self._ledger_name, purpose, len(buffer))
        done = 0
        try:
            while done < len(buffer) and offset + done < self.size_bytes:
                count = self._read_part(offset + done, buffer[done:])
                if count == 0:
                    break
                done += count
                if self._reads_directly and done % DIRECT_ALIGNMENT_BYTES:
                    break  # only the end of the file ends a direct read off the grid
        except OSError as error:
            raise os_error(error, self.location, f"reading {len(buffer)} bytes at {offset}") from error
        return done

    def _read_part(self, offset: int, buffer: memoryview) -> int:
        """Read as much as the system gives at a time, directly where it can."""
        try:
            return read_at(self._descriptor, buffer, offset)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        self._reads_directly = False
        switch_direct(self._descriptor, wanted=False)
        stop_read_ahead(self._descriptor)
        return read_at(self._descriptor, buffer, offset)

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalStore(Store):
    """Files of the local machine."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()

    def terms(self, location: Location) -> StoreTerms:
        """Return the terms of local disks: whole pages, as direct reads need; eight requests at once, at no price."""
        del location  # every disk is read so
        return LOCAL_TERMS

    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up, links followed; see `Store.stat`."""
        path = location.local_path
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
            return None
        except OSError as error:
            raise _not_looked_at(error, path) from error
        is_folder, is_file = stat.S_ISDIR(status.st_mode), stat.S_ISREG(status.st_mode)
        kind = FileKind.FOLDER if is_folder else FileKind.FILE if is_file else FileKind.OTHER
        return FileStatus(kind, status.st_size, version_of(path, status))

    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder, by name; see `Store.list`."""
        path = location.local_path
        try:
            with os.scandir(path) as entries:
                listed = [Entry(entry.name, _kind_listed(entry)) for entry in entries]
        except (FileNotFoundError, NotADirectoryError, ValueError) as error:
            raise NotFoundError.of("storage.not-found", path, "no such folder", "check the path") from error
        except OSError as error:
            raise os_error(error, path, "listing it") from error
        return tuple(sorted(listed, key=lambda entry: entry.name))

    def real_path(self, location: Location) -> Location | None:
        """Return the target of a location once all links are followed; see `Store.real_path`."""
        path = location.local_path
        try:
            return Location.local(Path(os.path.realpath(path, strict=True)))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise _not_looked_at(error, path) from error

    def size_bytes(self, location: Location) -> int:
        """Size of a regular file."""
        return regular_status(location.local_path).st_size

    def open(self, location: Location, *, direct: bool = False) -> LocalFile:
        """Open `location` for positional reads; `direct` bypasses the page cache unless most of the file lies in it."""
        path = location.local_path
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            use_direct = (
                direct
                and size > 0
                and resident_fraction(descriptor, size) < RESIDENT_ENOUGH_FRACTION
                and switch_direct(descriptor, wanted=True)
            )
            if not use_direct:
                stop_read_ahead(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise os_error(error, path, "opening it") from error
        return LocalFile(location, descriptor, size, direct=use_direct, ledger=self.ledger)

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset`, charged as metadata; by plain calls, which tracers tell from tensors'."""
        path = location.local_path
        descriptor = open_regular(path)
        try:
            with os_errors(path, "reading it"):
                stop_read_ahead(descriptor)
                wanted = max(0, min(nbytes, os.fstat(descriptor).st_size - offset))
                data = read_descriptor_range(descriptor, path, offset, wanted)
        finally:
            os.close(descriptor)
        self.ledger.charge(str(location), Purpose.METADATA, len(data))
        return data

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata. Raises as `ranges.read_small` does."""
        data = read_small(location.local_path, limit_bytes)
        self.ledger.charge(str(location), Purpose.METADATA, len(data))
        return data


def _not_looked_at(error: OSError, path: Path) -> MergePipeError:
    if error.errno == errno.EACCES:
        folders = reversed(path.absolute().parents)
        closed = next((folder for folder in folders if not os.access(folder, os.X_OK)), path)
        return os_error(error, closed, "entering the folder")
    return StorageError.of("storage.answer", path, f"its status cannot be read: {error.strerror}")


def _kind_listed(entry: os.DirEntry[str]) -> FileKind:
    try:
        if entry.is_file():
            return FileKind.FILE
        return FileKind.FOLDER if entry.is_dir() else FileKind.OTHER
    except OSError:  # a link in a circle
        return FileKind.OTHER


def resident_fraction(descriptor: int, size_bytes: int) -> float:
    """Share of the file's pages in the page cache, in [0, 1], from a sample; 0 where the kernel cannot be asked.

    A process that neither owns nor may write the file is told "all of it": then ordinary reads are used, which are
    never wrong, only slower.
    """
    if size_bytes == 0 or not hasattr(mmap, "PROT_READ"):
        return 0.0
    n_pages = -(-size_bytes // mmap.PAGESIZE)
    window = min(n_pages, WINDOW_PAGES)
    starts = {(n_pages - window) * i // (SAMPLE_WINDOWS - 1) for i in range(SAMPLE_WINDOWS)}
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            pages_SW = np.zeros((len(starts), window), np.uint8)
            for row, start in enumerate(sorted(starts)):
                place = ctypes.c_void_p(address + start * mmap.PAGESIZE)
                answer = ctypes.c_void_p(pages_SW[row].ctypes.data)
                if libc.mincore(place, ctypes.c_size_t(window * mmap.PAGESIZE), answer):
                    return 0.0
    except (OSError, ValueError, AttributeError, BufferError):
        return 0.0
    return float(np.mean(pages_SW & 1))
