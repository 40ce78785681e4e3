"""The store whose files are pinned when first looked at: reads of another version are refused, never mixed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from mergepipe.errors import NotFoundError, StorageError
from mergepipe.storage.contract import Entry, FileKind, FileStatus, RangeFile, RequestCounts, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact, too_large
from mergepipe.storage.remote.http_client import HttpClient, Pin
from mergepipe.storage.remote.retry import REQUEST_COST_BYTES, Source, Transfers

FOLDER: Final = FileStatus(FileKind.FOLDER, 0, "")


class PinnedFile:
    """One version of a remote file, open for positional reads from many threads."""

    alignment: Final = 1

    def __init__(self, source: Source, status: FileStatus, transfers: Transfers) -> None:
        self._source = source
        self._transfers = transfers
        self.size_bytes: Final = status.size_bytes
        self.version: Final = status.version

    @property
    def location(self) -> Location:
        return self._source.location

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; see `RangeFile.read_into`. Bytes past the end are not asked for or charged."""
        nbytes = max(0, min(len(buffer), self.size_bytes - offset))
        if nbytes:
            self._fill(offset, buffer[:nbytes], purpose)
        return nbytes

    def _fill(self, offset: int, buffer: memoryview, purpose: Purpose) -> None:
        self._transfers.read(self._source, offset, buffer, purpose)

    def close(self) -> None:
        """Nothing to release: connections belong to the store."""


class PinnedStore(ABC):
    """The common part of stores of remote files. A file keeps its first size and version for the store's life."""

    def __init__(self, transfers: Transfers, http: HttpClient | None = None) -> None:
        self._transfers = transfers
        self._http = http or HttpClient()
        transfers.on_abort(self._http.abort)

    @property
    def ledger(self) -> Ledger:
        return self._transfers.ledger

    @property
    def counts(self) -> RequestCounts:
        """The requests made so far, retries among them."""
        return self._transfers.counts

    @property
    def notices(self) -> tuple[str, ...]:
        """Nothing, where every file is the one that was named."""
        return ()

    def abort(self) -> None:
        """Fail the requests in flight soon; see `RemoteStore.abort`."""
        self._transfers.abort()

    def terms(self, location: Location) -> StoreTerms:
        """Any range; many requests at once, each of which costs as much as some megabytes."""
        del location
        return StoreTerms(1, self._transfers.connections, REQUEST_COST_BYTES)

    @abstractmethod
    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder, by name; see `Store.list`."""

    @abstractmethod
    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up; see `Store.stat`."""

    @abstractmethod
    def _source(self, location: Location) -> Source:
        """Return the source of a file's bytes, which was looked up before."""

    def real_path(self, location: Location) -> Location | None:
        """The location itself, None where there is nothing: no remote store has links."""
        return None if self.stat(location) is None else location

    def pin(self, location: Location) -> Location:
        """The location itself, where versions are those of single files."""
        return location

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        """Open a file for positional reads; see `Store.open`. `direct` means nothing here."""
        del direct
        status = self._file_status(location)
        return PinnedFile(self._source(location), status, self._transfers)

    def size_bytes(self, location: Location) -> int:
        """Size of a file."""
        return self._file_status(location).size_bytes

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset` (fewer only at the end of the file), charged as metadata."""
        file = self.open(location)
        try:
            stop = max(offset, min(offset + nbytes, file.size_bytes))
            return read_exact(file, offset, stop, Purpose.METADATA).tobytes()
        finally:
            file.close()

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata; see `Store.read_small`."""
        size_bytes = self.size_bytes(location)
        if size_bytes > limit_bytes:
            raise too_large(location, size_bytes, limit_bytes)
        return self.read_metadata(location, 0, size_bytes)

    def close(self) -> None:
        """Let workers and connections go."""
        self._transfers.close()
        self._http.close()

    def _file_status(self, location: Location) -> FileStatus:
        status = self.stat(location)
        if status is None:
            raise NotFoundError.of("storage.not-found", location, "no such file", "check the location")
        if not status.is_file:
            raise StorageError.of("storage.not-a-file", location, "is a folder, a file is needed", "name a file in it")
        return status


def status_of(entry: Pin | FileKind | None) -> FileStatus | None:
    """Describe a pinned file, a folder or nothing."""
    if isinstance(entry, Pin):
        return FileStatus(FileKind.FILE, entry.size_bytes, entry.version)
    return None if entry is None else FOLDER
