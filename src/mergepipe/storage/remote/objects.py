"""Checkpoints in buckets: `s3://`, `gs://` and `az://`, listed once a folder and read by pinned ranges."""

from __future__ import annotations

import threading

from mergepipe.errors import NotFoundError
from mergepipe.storage.contract import Entry, FileKind
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.remote.client import ObjectClient, open_bucket
from mergepipe.storage.remote.http_client import HttpClient, Pin
from mergepipe.storage.remote.pinned_store import PinnedStore
from mergepipe.storage.remote.transfers import Source, Transfers
from mergepipe.storage.traffic import RemoteSettings


def open_store(scheme: str, ledger: Ledger, settings: RemoteSettings) -> ObjectStore:
    """Return the store of all buckets of a scheme; a bucket's client is made when it is first named.

    Raises:
        ValueError: a scheme of no object store.
    """
    if scheme not in ("s3", "gs", "az"):
        raise ValueError(f"no object store has the scheme {scheme}")
    return ObjectStore(Transfers(ledger, connections=settings.connections))


class ObjectStore(PinnedStore):
    """Objects by bucket and key. A folder is what keys have before a slash; an empty one does not exist."""

    def __init__(self, transfers: Transfers, http: HttpClient | None = None) -> None:
        super().__init__(transfers)
        self._http = http or HttpClient()
        transfers.on_abort(self._http.abort)
        self._lock = threading.Lock()
        self._clients: dict[str, ObjectClient] = {}
        self._folders: dict[Location, dict[str, Pin | FileKind]] = {}

    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder; see `Store.list`. One request a folder in the store's life."""
        listing = {} if "\0" in location.key else self._listing(location)
        if not listing and location.key:
            raise NotFoundError.of("storage.not-found", location, "no such folder", "check the bucket and the prefix")
        return tuple(
            Entry(name, FileKind.FILE if isinstance(listing[name], Pin) else FileKind.FOLDER)
            for name in sorted(listing)
        )

    def close(self) -> None:
        """Let workers and connections go."""
        super().close()
        self._http.close()

    def _look_up(self, location: Location) -> Pin | FileKind | None:
        try:
            if location.key and location.parent in self._folders:
                return self._folders[location.parent].get(location.name)
            if self._listing(location) or not location.key:
                return FileKind.FOLDER
            return self._listing(location.parent).get(location.name)
        except NotFoundError:  # there is no such bucket
            return None

    def _source(self, location: Location, pin: Pin) -> Source:
        return _ObjectSource(location, pin, self._client(location), self._http)

    def _listing(self, folder: Location) -> dict[str, Pin | FileKind]:
        """The pins and folders below a folder by name, empty where there is no such folder."""
        if folder not in self._folders:
            client = self._client(folder)
            answer = self._transfers.ask(folder, lambda: client.list_folder(folder.key))
            listing: dict[str, Pin | FileKind] = {_name(key): FileKind.FOLDER for key in answer.folders}
            listing |= {_name(key): pin for key, pin in answer.objects.items()}
            with self._lock:  # another thread may have listed it meanwhile: the first pins stay
                self._folders.setdefault(folder, listing)
        return self._folders[folder]

    def _client(self, location: Location) -> ObjectClient:
        with self._lock:
            if location.root not in self._clients:
                self._clients[location.root] = open_bucket(location, self._http.stall_seconds)
            return self._clients[location.root]


class _ObjectSource:
    """One pinned object."""

    def __init__(self, location: Location, pin: Pin, client: ObjectClient, http: HttpClient) -> None:
        self.location = location
        self._pin = pin
        self._client = client
        self._http = http

    def fetch(self, offset: int, buffer: memoryview) -> None:
        """Make one request, signed for itself. Raises RequestFailed."""
        key = self.location.key
        if self._client.signs_addresses:
            self._http.read_range(self._client.address(key), offset, buffer, self._pin)
        else:
            self._client.read_range(key, offset, buffer, self._pin)

    def renew(self) -> bool:
        """Every request is signed anew already."""
        return False


def _name(key: str) -> str:
    return key.rpartition("/")[2]
