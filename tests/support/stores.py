"""Stores for tests: one that refuses to serve tensor bytes, and one in memory that behaves like an object store."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn
from unittest.mock import patch

from mergepipe.errors import ConflictError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.contract import Entry, FileKind, FileStatus, Store, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.stores import OPENERS


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """What a store was asked: `open`, `stat`, `list` or `read`, of which bytes."""

    operation: str
    path: Location
    offset: int = 0
    nbytes: int = 0
    purpose: Purpose = Purpose.METADATA


class MetadataStore(LocalStore):
    """Serves headers and sidecars of real files; fails the test that opens a file for its tensor bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[StoreRequest] = []

    def open(self, location: Location, *, direct: bool = False, cached: bool = True) -> NoReturn:
        raise AssertionError(f"{location} was opened for tensor bytes (direct={direct}, cached={cached})")

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        self.reads.append(StoreRequest("read", location, offset, nbytes))
        return LocalStore(self.ledger).read_metadata(location, offset, nbytes)

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        content = super().read_small(location, limit_bytes)
        self.reads.append(StoreRequest("read", location, 0, len(content)))
        return content


Script = Callable[[StoreRequest], None]
"""Called before each request is served: raises to make it fail, sleeps to make it slow."""


def serve_at_once(_request: StoreRequest) -> None:
    """Make no request fail or wait."""


class InMemoryFile:
    """One version of an object: reads of it fail once another version is in its place."""

    alignment = 1

    def __init__(self, store: InMemoryStore, location: Location) -> None:
        self._store = store
        self.location = location
        self._status = store.object_status(location)

    @property
    def size_bytes(self) -> int:
        return self._status.size_bytes

    @property
    def version(self) -> str:
        return self._status.version

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        self._store.ledger.charge(str(self.location), purpose, len(buffer))
        content = self._store.get(StoreRequest("read", self.location, offset, len(buffer), purpose), self.version)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Nothing to release."""


class InMemoryStore(Store):
    """Objects by their paths: no rename, no empty folders, no links, another version with every overwriting.

    `requests` records everything that was asked, in order; `script` sees each request before it is served.
    """

    def __init__(
        self,
        files: Mapping[Location, bytes] | None = None,
        ledger: Ledger | None = None,
        script: Script = serve_at_once,
    ) -> None:
        self.ledger = ledger or Ledger()
        self.requests: list[StoreRequest] = []
        self.script = script
        self._objects: dict[Location, tuple[int, bytes]] = {}
        self._n_puts = 0
        for path, content in (files or {}).items():
            self.put(path, content)

    def terms(self, location: Location) -> StoreTerms:
        del location
        return StoreTerms(granularity_bytes=1, most_requests=4, request_cost_bytes=1 << 20)

    @property
    def reads(self) -> list[StoreRequest]:
        """The requests for bytes."""
        return [request for request in self.requests if request.operation == "read"]

    def charging(self, ledger: Ledger) -> InMemoryStore:
        """The same objects, requests and script, with another ledger."""
        other = copy.copy(self)
        other.ledger = ledger
        return other

    def put(self, path: Location, content: bytes) -> None:
        """Store an object, or another version of it."""
        self._n_puts += 1
        self._objects[path] = (self._n_puts, content)

    def delete(self, path: Location) -> None:
        """Remove an object."""
        del self._objects[path]

    def open(self, location: Location, *, direct: bool = False) -> InMemoryFile:
        del direct  # there is no page cache
        self._ask(StoreRequest("open", location))
        return InMemoryFile(self, location)

    def stat(self, location: Location) -> FileStatus | None:
        self._ask(StoreRequest("stat", location))
        return self._status(location)

    def list(self, location: Location) -> tuple[Entry, ...]:
        self._ask(StoreRequest("list", location))
        below = [each.relative_to(location).parts for each in self._objects if location in each.parents]
        if not below:
            raise NotFoundError.of("storage.not-found", location, "no such folder", "check the location")
        kinds = {parts[0]: FileKind.FILE if len(parts) == 1 else FileKind.FOLDER for parts in below}
        return tuple(Entry(name, kinds[name]) for name in sorted(kinds))

    def real_path(self, location: Location) -> Location | None:
        return None if self._status(location) is None else location

    def size_bytes(self, location: Location) -> int:
        self._ask(StoreRequest("stat", location))
        return self.object_status(location).size_bytes

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        content = self.get(StoreRequest("read", location, offset, nbytes))
        self.ledger.charge(str(location), Purpose.METADATA, len(content))
        return content

    def get(self, request: StoreRequest, version: str | None = None) -> bytes:
        """Bytes of an object, of one version of it if that is given."""
        self._ask(request)
        status = self._status(request.path)
        if version is not None and (status is None or status.version != version):
            raise ConflictError.of("input.changed", request.path, "changed while it was being read", "run again")
        self.object_status(request.path)
        return self._objects[request.path][1][request.offset : request.offset + request.nbytes]

    def object_status(self, path: Location) -> FileStatus:
        """The status of an object, not of a folder."""
        status = self._status(path)
        if status is None:
            raise _missing(path)
        if not status.is_file:
            raise StorageError.of("storage.not-a-file", path, "is a folder, an object is needed")
        return status

    def _status(self, path: Location) -> FileStatus | None:
        if path in self._objects:
            number, content = self._objects[path]
            return FileStatus(FileKind.FILE, len(content), f"v{number}")
        if any(path in each.parents for each in self._objects):
            return FileStatus(FileKind.FOLDER, 0, "")
        return None

    def _ask(self, request: StoreRequest) -> None:
        self.requests.append(request)
        self.script(request)


def _missing(path: Location) -> MergePipeError:
    return NotFoundError.of("storage.not-found", path, "no such object", "check the path")


@contextmanager
def memory_scheme(store: InMemoryStore) -> Iterator[None]:
    """Serve all locations of the scheme `memory` from a store, for as long as the context lasts."""
    with patch.dict(OPENERS, memory=lambda ledger, _settings: store.charging(ledger)):
        yield
