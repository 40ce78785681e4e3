"""The store whose files are pinned when first looked at: reads of another version are refused, never mixed."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from mergepipe.storage.contract import FileKind, FileStatus, RangeFile, RequestCounts, Store, StoreTerms
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
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


class PinnedStore(Store):
    """The common part of stores of remote files. A file keeps its first size and version for the store's life."""

    def __init__(self, transfers: Transfers, http: HttpClient | None = None) -> None:
        self.ledger = transfers.ledger
        self._transfers = transfers
        self._http = http or HttpClient()
        transfers.on_abort(self._http.abort)

    @property
    def counts(self) -> RequestCounts:
        """The requests made so far, retries among them."""
        return self._transfers.counts

    def abort(self) -> None:
        """Fail the requests in flight soon; see `Store.abort`."""
        self._transfers.abort()

    def terms(self, location: Location) -> StoreTerms:
        """Any range; many requests at once, each of which costs as much as some megabytes."""
        del location
        return StoreTerms(1, self._transfers.connections, REQUEST_COST_BYTES)

    @abstractmethod
    def _source(self, location: Location) -> Source:
        """Return the source of a file's bytes, which was looked up before."""

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        """Open a file for positional reads; see `Store.open`. `direct` means nothing here."""
        del direct
        status = self._file_status(location)
        return PinnedFile(self._source(location), status, self._transfers)

    def close(self) -> None:
        """Let workers and connections go."""
        self._transfers.close()
        self._http.close()


def status_of(entry: Pin | FileKind | None) -> FileStatus | None:
    """Describe a pinned file, a folder or nothing."""
    if isinstance(entry, Pin):
        return FileStatus(FileKind.FILE, entry.size_bytes, entry.version)
    return None if entry is None else FOLDER
