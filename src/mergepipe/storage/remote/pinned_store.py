"""The store whose files are pinned when first looked at: reads of another version are refused, never mixed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from mergepipe.errors import NotFoundError, StorageError
from mergepipe.storage.contract import Entry, FileKind, FileStatus, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact
from mergepipe.storage.regular import too_large
from mergepipe.storage.remote.http_client import Pin
from mergepipe.storage.remote.transfers import REQUEST_COST_BYTES, Source, Transfers
from mergepipe.storage.traffic import RequestCounts

_FOLDER: Final = FileStatus(FileKind.FOLDER, 0, "")


class PinnedFile:
    """One version of a remote file, open for positional reads from many threads."""

    alignment: Final = 1

    def __init__(self, source: Source, pin: Pin, transfers: Transfers) -> None:
        self._source = source
        self._pin = pin
        self._transfers = transfers

    @property
    def location(self) -> Location:
        return self._source.location

    @property
    def size_bytes(self) -> int:
        return self._pin.size_bytes

    @property
    def version(self) -> str:
        return self._pin.version

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; see `RangeFile.read_into`. Bytes past the end are neither asked for nor charged.

        Raises:
            ConflictError: `input.changed`, the server has another version by now.
            LimitError: `budget.exceeded`.
            NotFoundError, StorageError: the request failed, as often as it was made again.
        """
        nbytes = max(0, min(len(buffer), self.size_bytes - offset))
        if nbytes:
            self._transfers.read(self._source, offset, buffer[:nbytes], purpose)
        return nbytes

    def close(self) -> None:
        """Nothing to release: connections belong to the store."""


class PinnedStore(ABC):
    """The common part of stores of remote files. A file keeps its first size and version for the store's life."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    @property
    def ledger(self) -> Ledger:
        return self._transfers.ledger

    @property
    def counts(self) -> RequestCounts:
        """The requests made so far, retries among them."""
        return self._transfers.counts

    @property
    def notices(self) -> tuple[str, ...]:
        """Nothing: every file is the one that was named."""
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
    def _look_up(self, location: Location) -> Pin | FileKind | None:
        """The pin of a file, the kind of anything else, None where there is nothing."""

    @abstractmethod
    def _source(self, location: Location, pin: Pin) -> Source:
        """Return the source of a pinned file's bytes."""

    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up; see `Store.stat`."""
        if "\0" in location.key:
            return None
        match self._look_up(location):
            case Pin() as pin:
                return FileStatus(FileKind.FILE, pin.size_bytes, pin.version)
            case None:
                return None
            case _:
                return _FOLDER

    def real_path(self, location: Location) -> Location | None:
        """The location itself, None where there is nothing: no remote store has links."""
        return None if self.stat(location) is None else location

    def pin(self, location: Location) -> Location:
        """The location itself: versions are those of single files."""
        return location

    def open(self, location: Location, *, direct: bool = False) -> PinnedFile:
        """Open a file for positional reads; see `Store.open`. `direct` means nothing here."""
        del direct
        pin = self._pin_of(location)
        return PinnedFile(self._source(location, pin), pin, self._transfers)

    def size_bytes(self, location: Location) -> int:
        """Size of a file."""
        return self._pin_of(location).size_bytes

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset` (fewer only at the end of the file), charged as metadata."""
        file = self.open(location)
        stop = max(offset, min(offset + nbytes, file.size_bytes))
        return read_exact(file, offset, stop, Purpose.METADATA).tobytes()

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata; see `Store.read_small`."""
        size_bytes = self.size_bytes(location)
        if size_bytes > limit_bytes:
            raise too_large(location, size_bytes, limit_bytes)
        return self.read_metadata(location, 0, size_bytes)

    def close(self) -> None:
        """Let workers and connections go."""
        self._transfers.close()

    def _pin_of(self, location: Location) -> Pin:
        pin = None if "\0" in location.key else self._look_up(location)
        if pin is None:
            raise NotFoundError.of("storage.not-found", location, "no such file", "check the location")
        if not isinstance(pin, Pin):
            raise StorageError.of("storage.not-a-file", location, "is a folder, a file is needed", "name a file in it")
        return pin
