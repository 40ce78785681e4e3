"""The Hugging Face Hub as a store: models pinned by commit, files known by their digests, read by ranges."""

from __future__ import annotations

import threading
import weakref

from mergepipe.errors import MergePipeError, NotFoundError, StorageError
from mergepipe.storage.contract import Entry, FileStatus, RangeFile, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.ranges import read_exact
from mergepipe.storage.regular import too_large
from mergepipe.storage.remote.http_client import HttpClient
from mergepipe.storage.remote.hub_api import HubApi, HubSource
from mergepipe.storage.remote.hub_cache import HubCache
from mergepipe.storage.remote.hub_errors import is_unreachable, offline
from mergepipe.storage.remote.hub_files import CachedFile, RemoteFile
from mergepipe.storage.remote.hub_listing import HubFile, ModelListing
from mergepipe.storage.remote.hub_settings import HubSettings, hub_settings
from mergepipe.storage.remote.transfers import REQUEST_COST_BYTES, Transfers
from mergepipe.storage.traffic import RemoteSettings, RequestCounts

DEFAULT_REVISION = "main"
CACHED_TERMS = StoreTerms(granularity_bytes=1, most_requests=8, request_cost_bytes=0)


def open_store(scheme: str, ledger: Ledger, settings: RemoteSettings) -> HubStore:
    """Make the store of `hf://` locations with the settings of the environment.

    Raises:
        RecipeError: `hub.endpoint`, HF_ENDPOINT is no address of a web server.
    """
    if scheme != HUB_SCHEME:
        raise ValueError(f"not a scheme of the Hub: {scheme}")
    return HubStore(hub_settings(), ledger, Transfers(ledger, connections=settings.connections))


class HubStore:
    """Models of the Hub. One request pins a model; looking at its files needs no other.

    A branch keeps the commit that it led to at first use, for as long as the store lives. What the local cache of the
    Hugging Face tools holds is read there. Safe to use from many threads.
    """

    def __init__(self, settings: HubSettings, ledger: Ledger, transfers: Transfers | None = None) -> None:
        self._ledger = ledger
        self._is_offline = settings.is_offline
        self._cache = HubCache(settings.cache_folder)
        self._client = HttpClient()
        self._transfers = transfers or Transfers(ledger)
        self._api = HubApi(settings, self._transfers, self._client)
        self._transfers.on_abort(self._client.abort)
        self._remote_terms = StoreTerms(1, self._transfers.connections, REQUEST_COST_BYTES)
        self._notices: list[str] = []
        self._listings: dict[tuple[str, str], ModelListing] = {}
        self._sources: dict[tuple[Location, str], HubSource] = {}
        self._lock = threading.RLock()
        self._closed = weakref.finalize(self, _close, self._client, self._transfers)

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def counts(self) -> RequestCounts:
        """The requests made so far, retries among them."""
        return self._transfers.counts

    @property
    def notices(self) -> tuple[str, ...]:
        """The models that the local cache stood in for, because the Hub could not be reached."""
        return tuple(self._notices)

    def abort(self) -> None:
        """Fail the requests in flight soon; see `RemoteStore.abort`."""
        self._transfers.abort()

    def terms(self, location: Location) -> StoreTerms:
        """Return the price of requests, which is nothing where everything at a location lies in the local cache."""
        listing = self._listings.get((location.root, location.revision or DEFAULT_REVISION))
        if listing is None:
            return self._remote_terms
        folder = f"{location.key}/" if location.key else ""
        file = listing.files.get(location.key)
        files = [file] if file else [file for path, file in listing.files.items() if path.startswith(folder)]
        is_cached = files and all(self._cache.path_of(listing.model, listing.commit, file) for file in files)
        return CACHED_TERMS if is_cached else self._remote_terms

    def pin(self, location: Location) -> Location:
        """The location at the commit that its revision leads to now.

        Raises:
            NotFoundError: `hub.model`, `hub.revision`; `hub.offline`, there is no network and nothing in the cache.
            StorageError: `hub.token`, `storage.unavailable` and others, the Hub refuses.
            CorruptError: `hub.answer`, the answer is not that of a Hub.
        """
        return location.with_revision(self._listing(location).commit)

    def forget(self, location: Location) -> None:
        """Ask the Hub again at the next use of a revision where it leads; what is open stays as it is."""
        with self._lock:
            self._listings.pop((location.root, location.revision or DEFAULT_REVISION), None)

    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up in the pinned listing. Raises as `pin` does."""
        return self._listing(location).status(location.key)

    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder of the pinned listing, by name. Raises as `pin` does."""
        entries = self._listing(location).folders.get(location.key)
        if entries is None:
            raise NotFoundError.of("storage.not-found", location, "no such folder in the model", "check the path")
        return entries

    def real_path(self, location: Location) -> Location | None:
        """The location itself: models hold no links. Raises as `pin` does."""
        return None if self.stat(location) is None else location

    def size_bytes(self, location: Location) -> int:
        """Size of a file, from the pinned listing. Raises as `open` does."""
        return self._file(location)[1].size_bytes

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        """Open a file for positional reads: in the local cache, else on the network, which is asked at the first read.

        Raises:
            NotFoundError: `storage.not-found`, no such file; and as `pin`.
            StorageError: `storage.not-a-file`, a folder; and as `pin`.
        """
        del direct  # what is cached is read like what is not, byte for byte
        listing, file = self._file(location)
        cached = self._cache.path_of(listing.model, listing.commit, file)
        if cached is not None:
            return CachedFile(location, cached, file, self._ledger)
        return RemoteFile(location, self._source(location, listing, file), self._transfers)

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset`, charged as metadata. Raises as `open`, and as reading does."""
        file = self.open(location)
        try:
            stop = max(offset, min(offset + nbytes, file.size_bytes))
            return read_exact(file, offset, stop, Purpose.METADATA).tobytes()
        finally:
            file.close()

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata, and hold it against its digest.

        Raises:
            CorruptError: `storage.too-large`, it is larger; nothing was read.
            ConflictError: `input.changed`, it is not what was pinned.
        """
        file = self._file(location)[1]
        if file.size_bytes > limit_bytes:
            raise too_large(location, file.size_bytes, limit_bytes)
        content = self.read_metadata(location, 0, file.size_bytes)
        file.check(location, content)
        return content

    def close(self) -> None:
        """Let workers and connections go."""
        self._closed()

    def _file(self, location: Location) -> tuple[ModelListing, HubFile]:
        listing = self._listing(location)
        file = listing.files.get(location.key)
        if file is not None:
            return listing, file
        if location.key in listing.folders:
            raise StorageError.of("storage.not-a-file", location, "is a folder, a file is needed", "name a file in it")
        message = f"no such file at commit {listing.commit[:12]}"
        raise NotFoundError.of("storage.not-found", location, message, f"see hf.co/{location.root}/tree/main")

    def _source(self, location: Location, listing: ModelListing, file: HubFile) -> HubSource:
        """Return the one `HubSource` of a file, which all that open it share: it is resolved once."""
        with self._lock:
            key = (location, listing.commit)
            if key not in self._sources:
                self._sources[key] = HubSource(self._api, self._client, location, listing.commit, file)
            return self._sources[key]

    def _listing(self, location: Location) -> ModelListing:
        """The listing of a model at a revision, asked for once."""
        key = (location.root, location.revision or DEFAULT_REVISION)
        with self._lock:
            listing = self._listings.get(key)
            if listing is None:
                listing = self._look_up(location, key[1])
                self._listings[key] = self._listings[location.root, listing.commit] = listing
        return listing

    def _look_up(self, location: Location, revision: str) -> ModelListing:
        """Ask the Hub, or its local cache where there is no network."""
        if self._is_offline:
            return self._cached_listing(location, revision, "HF_HUB_OFFLINE is set")
        try:
            return self._api.model_info(location, revision)
        except MergePipeError as error:
            if not is_unreachable(error):
                raise
            listing = self._cached_listing(location, revision, error.problems[0].message)
        if listing.commit != revision:
            self._notices.append(
                f"{location}: the Hub cannot be reached: commit {listing.commit[:12]} of the local cache is used, "
                f"which '{revision}' led to when it was downloaded"
            )
        return listing

    def _cached_listing(self, location: Location, revision: str, why: str) -> ModelListing:
        commit = self._cache.commit_of(location.root, revision)
        listing = None if commit is None else self._cache.listing(location.root, commit)
        if listing is None:
            raise offline(location, why)
        return listing


def _close(client: HttpClient, transfers: Transfers) -> None:
    transfers.close()
    client.close()
