"""Keep what is read of experts in a scratch file, so that a second pass requests nothing of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from mergepipe.storage import owned
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import os_errors, read_at, shrunk


class SpilledFiles(Mapping[Location, RangeFile]):
    """Open files of which every range read for `Purpose.EXPERT` is written to a scratch file; after `replay`, the same
    ranges are read from there. Reads for other purposes, and of other ranges, go to the files.

    Disk: the ranges, in an unnamed file in `folder` until `close`. Memory: about 200 bytes a range.
    """

    def __init__(self, files: Mapping[Location, RangeFile], folder: Path) -> None:
        self._files = files
        self._spill = _Spill(folder)

    def __getitem__(self, location: Location) -> RangeFile:
        return _SpilledFile(self._files[location], self._spill)

    def __iter__(self) -> Iterator[Location]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def replay(self) -> None:
        """Serve reads from the scratch file from now on. All reads so far have returned."""
        self._spill.is_replayed = True

    def close(self) -> None:
        """Give the space of the scratch file back; the files stay open. No read is under way."""
        self._spill.close()


class _Spill:
    """The scratch file: ranges by file, offset and size. Safe to use from many threads."""

    def __init__(self, folder: Path) -> None:
        self.is_replayed = False
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptor = -1
        self._end = 0
        self._kept: dict[tuple[Location, int, int], tuple[int, int]] = {}

    def keep(self, location: Location, offset: int, room_bytes: int, content: memoryview) -> None:
        """Write what a read of `room_bytes` at `offset` returned."""
        with self._lock, os_errors(self._folder, "making room for what is read of experts"):
            if self._descriptor < 0:
                self._descriptor = owned.create_unnamed_file(self._folder)
            place, self._end = self._end, self._end + len(content)
        with os_errors(self._folder, "keeping what was read of experts"):
            done = 0
            while done < len(content):
                done += os.pwrite(self._descriptor, content[done:], place + done)
        with self._lock:
            self._kept[location, offset, room_bytes] = place, len(content)

    def read_into(self, location: Location, offset: int, buffer: memoryview) -> int | None:
        """Fill `buffer` with the range that it was filled with before; return its bytes, None if it was not."""
        kept = self._kept.get((location, offset, len(buffer)))
        if kept is None:
            return None
        place, nbytes = kept
        done = 0
        with os_errors(self._folder, "reading again what was read of experts"):
            while done < nbytes:
                count = read_at(self._descriptor, buffer[done:nbytes], place + done)
                if count == 0:
                    raise shrunk(self._folder, place, nbytes, done)
                done += count
        return nbytes

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._kept = -1, {}


class _SpilledFile:
    """One of the `SpilledFiles`; closing it closes nothing."""

    def __init__(self, file: RangeFile, spill: _Spill) -> None:
        self._file = file
        self._spill = spill

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

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        if purpose is not Purpose.EXPERT:
            return self._file.read_into(offset, buffer, purpose)
        if self._spill.is_replayed:
            nbytes = self._spill.read_into(self.location, offset, buffer)
            if nbytes is not None:
                return nbytes
        nbytes = self._file.read_into(offset, buffer, purpose)
        if not self._spill.is_replayed:
            self._spill.keep(self.location, offset, len(buffer), buffer[:nbytes])
        return nbytes

    def close(self) -> None:
        """Leave the file open: it is closed by whoever opened it."""
