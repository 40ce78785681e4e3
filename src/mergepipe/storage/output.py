"""Files that a run writes: outputs that bypass the page cache and are durable once closed, and scratch files."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import aligned_buffer, os_errors, read_at, read_descriptor_range, shrunk, switch_direct

CHUNK_BYTES = 8 << 20
_WRITTEN_IN_PLACE_BYTES = 1 << 20
_SYNCED_AT_ONCE = 32


class OutputFile:
    """A new file of known size, written from start to end; or one whose first `written_bytes` are there already.

    Its space is reserved when it is opened, so that a full disk shows before the work and not after it. Leaving the
    context without `close` leaves the file incomplete: its directory is staging and is removed by its owner.
    """

    def __init__(self, path: Path, size_bytes: int, ledger: Ledger, written_bytes: int = 0) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._ledger = ledger
        self._chunk = aligned_buffer(CHUNK_BYTES)
        self._kept = written_bytes % DIRECT_ALIGNMENT_BYTES  # of the first chunk: written before, not to be charged
        self._filled = self._kept
        self._flushed = written_bytes - self._kept
        self._synced = written_bytes
        if self._kept:
            self._chunk[: self._kept] = np.frombuffer(_read_written(path, self._flushed, self._kept), np.uint8)
        self._is_direct = False
        self._descriptor = self._open(is_new=not written_bytes)

    @property
    def unsynced_bytes(self) -> int:
        """Bytes handed to the operating system since they were last made durable."""
        return max(0, self._flushed - self._synced)

    @property
    def flushed_bytes(self) -> int:
        """Bytes from the start that were handed to the operating system: those that `sync` makes durable."""
        return self._flushed

    def sync(self) -> int:
        """Make durable what the operating system has; return how many bytes from the start are."""
        with os_errors(self._path, "making it durable"):
            owned.sync_file(self._descriptor)
        self._synced = max(self._synced, self._flushed)
        return self._synced

    def _open(self, *, is_new: bool) -> int:
        with os_errors(self._path, f"reserving {self._size_bytes} bytes"):
            descriptor = owned.create_file(self._path) if is_new else owned.open_file(self._path)
            try:
                self._is_direct = switch_direct(descriptor, wanted=True)
                if self._size_bytes:
                    owned.reserve(descriptor, self._size_bytes)
            except OSError:
                os.close(descriptor)
                raise
        return descriptor

    def append(self, source: NDArray[np.uint8] | bytes) -> None:
        """Write `source` (uint8) after what was written before."""
        view = np.frombuffer(source, np.uint8) if isinstance(source, bytes) else source
        is_aligned = not (self._filled % DIRECT_ALIGNMENT_BYTES or view.ctypes.data % DIRECT_ALIGNMENT_BYTES)
        done = 0
        if is_aligned and len(view) >= _WRITTEN_IN_PLACE_BYTES:  # where it lies on the grid, without a copy
            done = len(view) // DIRECT_ALIGNMENT_BYTES * DIRECT_ALIGNMENT_BYTES
            self._flush(self._chunk[: self._filled], self._filled)
            self._flush(view[:done], done)
        while done < len(view):
            count = min(CHUNK_BYTES - self._filled, len(view) - done)
            self._chunk[self._filled : self._filled + count] = view[done : done + count]
            self._filled += count
            done += count
            if self._filled == CHUNK_BYTES:
                self._flush(self._chunk, CHUNK_BYTES)

    def _flush(self, content: NDArray[np.uint8], nbytes: int) -> None:
        """Write `content`, of which the first `nbytes` are the file's; what was kept of the first page is not new."""
        written = 0
        with os_errors(self._path, f"writing at byte {self._flushed}"):
            while written < len(content):
                written += self._write(content.data[written:], self._flushed + written)
        self._ledger.charge(str(self._path), Purpose.OUTPUT, nbytes - self._kept)
        self._flushed += nbytes
        self._filled = self._kept = 0

    def _write(self, content: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._descriptor, content, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._is_direct = switch_direct(self._descriptor, wanted=False)  # it takes the flag, not the write
            return os.pwrite(self._descriptor, content, offset)

    def close(self) -> None:
        """Write what is left, cut the file to its size and make it durable."""
        if self._flushed + self._filled != self._size_bytes:
            raise ValueError(f"{self._path}: {self._flushed + self._filled} bytes written, {self._size_bytes} declared")
        if self._filled > self._kept:
            # A direct write ends on the grid: it goes past the end by less than a page, which ftruncate takes back.
            tail = -self._filled % DIRECT_ALIGNMENT_BYTES
            self._chunk[self._filled : self._filled + tail] = 0
            self._flush(self._chunk[: self._filled + tail], self._filled)
        try:
            with os_errors(self._path, "making it durable"):
                os.ftruncate(self._descriptor, self._size_bytes)
                owned.sync_file(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _read_written(path: Path, offset: int, nbytes: int) -> bytes:
    """Read bytes of a file that is ours, which are known to be there."""
    with os_errors(path, "reading what was written before"):
        descriptor = owned.open_file(path, flags=os.O_RDONLY)
        try:
            return read_descriptor_range(descriptor, path, offset, nbytes)
        finally:
            os.close(descriptor)


def make_folders(path: Path) -> None:
    """Make what is missing of a folder in staging."""
    with os_errors(path, "creating it"):
        owned.make_folders(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with os_errors(path, "making it durable"):
        owned.sync_folder(path)


def write_durably(path: Path, content: bytes, ledger: Ledger) -> None:
    """Write a small new file and make it durable."""
    with os_errors(path, f"writing {len(content)} bytes"):
        owned.write_file(path, content)
    ledger.charge(str(path), Purpose.OUTPUT, len(content))


def replace_durably(path: Path, content: bytes, ledger: Ledger) -> None:
    """Put a small file in place of another in one step, durably."""
    with os_errors(path, f"writing {len(content)} bytes"):
        owned.replace_file(path, content)
    ledger.charge(str(path), Purpose.OUTPUT, len(content))


def write_all_durably(contents: Mapping[Path, bytes], ledger: Ledger) -> None:
    """Write small new files, one after the other, and make them durable together.

    Waiting for the disk once a file takes ten times as long. A failure leaves some of them behind, whole or not.
    """
    from concurrent.futures import ThreadPoolExecutor

    def sync(path: Path, descriptor: int) -> None:
        with os_errors(path, "making it durable"):
            owned.sync_file(descriptor)

    paths = list(contents)
    for start in range(0, len(paths), _SYNCED_AT_ONCE):
        batch = paths[start : start + _SYNCED_AT_ONCE]
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(batch), "mergepipe-sync") as pool:
            descriptors = []
            for path in batch:
                with os_errors(path, f"writing {len(contents[path])} bytes"):
                    descriptors.append(owned.create_file(path))
                    stack.callback(os.close, descriptors[-1])
                    owned.write_all(descriptors[-1], contents[path])
            list(pool.map(sync, batch, descriptors))
    for path, content in contents.items():
        ledger.charge(str(path), Purpose.OUTPUT, len(content))


# --- keep what is read of experts in a scratch file, so that a second pass requests nothing of them ---


class SpilledFiles(Mapping[Location, RangeFile]):
    """Open files of which every range read for `Purpose.EXPERT` is written to a scratch file; after `replay`, the same
    ranges are read from there. Reads for other purposes, and of other ranges, go to the files. Safe to use from many
    threads.

    Disk: the ranges, in an unnamed file in `folder` until `close`. Memory: about 200 bytes a range.
    """

    def __init__(self, files: Mapping[Location, RangeFile], folder: Path) -> None:
        self._files = files
        self._folder = folder
        self._lock = threading.Lock()
        self._is_replayed = False
        self._descriptor = -1
        self._end = 0
        self._kept: dict[tuple[Location, int, int], tuple[int, int]] = {}  # place and bytes by file, offset and room

    def __getitem__(self, location: Location) -> RangeFile:
        return _SpilledFile(self._files[location], self)

    def __iter__(self) -> Iterator[Location]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def replay(self) -> None:
        """Serve reads from the scratch file from now on. All reads so far have returned."""
        self._is_replayed = True

    def close(self) -> None:
        """Give the space of the scratch file back; the files stay open. No read is under way."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._kept = -1, {}

    def read_into(self, file: RangeFile, offset: int, buffer: memoryview) -> int:
        """Read of a file and keep that, or read what was kept."""
        kept = self._kept.get((file.location, offset, len(buffer))) if self._is_replayed else None
        if kept is not None:
            self._read_again(*kept, buffer)
            return kept[1]
        nbytes = file.read_into(offset, buffer, Purpose.EXPERT)
        if not self._is_replayed:
            place = self._keep(buffer[:nbytes])
            with self._lock:
                self._kept[file.location, offset, len(buffer)] = place, nbytes
        return nbytes

    def _keep(self, content: memoryview) -> int:
        with self._lock, os_errors(self._folder, "making room for what is read of experts"):
            if self._descriptor < 0:
                self._descriptor = owned.create_unnamed_file(self._folder)
            place, self._end = self._end, self._end + len(content)
        with os_errors(self._folder, "keeping what was read of experts"):
            owned.write_at(self._descriptor, content, place)
        return place

    def _read_again(self, place: int, nbytes: int, buffer: memoryview) -> None:
        done = 0
        with os_errors(self._folder, "reading again what was read of experts"):
            while done < nbytes:
                count = read_at(self._descriptor, buffer[done:nbytes], place + done)
                if count == 0:
                    raise shrunk(self._folder, place, nbytes, done)
                done += count


class _SpilledFile:
    """One of the `SpilledFiles`; closing it closes nothing."""

    def __init__(self, file: RangeFile, spill: SpilledFiles) -> None:
        self.location: Final = file.location
        self.size_bytes: Final = file.size_bytes
        self.alignment: Final = file.alignment
        self._file = file
        self._spill = spill

    @property
    def version(self) -> str:
        return self._file.version

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        if purpose is not Purpose.EXPERT:
            return self._file.read_into(offset, buffer, purpose)
        return self._spill.read_into(self._file, offset, buffer)

    def close(self) -> None:
        """Leave the file open: it is closed by whoever opened it."""
