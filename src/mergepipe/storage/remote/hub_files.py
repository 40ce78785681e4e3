"""Open files of the Hub: one kind reads from the network, the other from the local cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import fill_from_descriptor
from mergepipe.storage.regular import open_regular, os_error
from mergepipe.storage.remote.hub_api import HubSource
from mergepipe.storage.remote.hub_errors import changed
from mergepipe.storage.remote.hub_listing import HubFile
from mergepipe.storage.remote.transfers import Transfers
from mergepipe.storage.system_calls import stop_read_ahead


class RemoteFile:
    """A file on the network: every range is requested as it is, and charged each time that it is."""

    alignment = 1

    def __init__(self, location: Location, source: HubSource, transfers: Transfers) -> None:
        self.location = location
        self._source = source
        self._transfers = transfers

    @property
    def size_bytes(self) -> int:
        return self._source.file.size_bytes

    @property
    def version(self) -> str:
        return self._source.file.version

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`, as far as the file goes; see `RangeFile.read_into`."""
        nbytes = max(0, min(len(buffer), self.size_bytes - offset))
        if nbytes == 0:
            return 0
        if not self._source.has_address:
            self._transfers.ask(self.location, self._source.resolve)
        with self._source.whole.reading(offset, buffer[:nbytes]):
            self._transfers.read(self._source, offset, buffer[:nbytes], purpose)
        return nbytes

    def close(self) -> None:
        """Nothing to release: connections belong to the store."""


class CachedFile:
    """A file in the local cache, charged under its location on the Hub as any local file is."""

    alignment = 1

    def __init__(self, location: Location, path: Path, file: HubFile, ledger: Ledger) -> None:
        self.location = location
        self._file = file
        self._ledger = ledger
        self._ledger_name = str(location)
        self._descriptor = open_regular(path)
        try:
            size_bytes = os.fstat(self._descriptor).st_size
            stop_read_ahead(self._descriptor)
        except OSError as error:
            self.close()
            raise os_error(error, path, "opening it") from error
        if size_bytes != file.size_bytes:
            self.close()
            raise changed(location, "the size in the local cache", file.size_bytes, size_bytes)

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def version(self) -> str:
        return self._file.version

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`, as far as the file goes; see `RangeFile.read_into`."""
        nbytes = max(0, min(len(buffer), self.size_bytes - offset))
        self._ledger.charge(self._ledger_name, purpose, nbytes)
        try:
            fill_from_descriptor(self._descriptor, self.location, offset, np.frombuffer(buffer[:nbytes], np.uint8))
        except OSError as error:
            raise os_error(error, self.location, f"reading {nbytes} bytes at {offset}") from error
        return nbytes

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
