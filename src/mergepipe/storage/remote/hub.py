"""The Hugging Face Hub as a store: models pinned by commit, files known by their digests, read by ranges.

What lies in the local cache of the Hugging Face tools is read there:

    models--ORG--NAME/refs/BRANCH           the commit that a branch or tag led to when it was last downloaded
    models--ORG--NAME/snapshots/COMMIT/...  the files of a commit as far as they were downloaded, as links to blobs
    models--ORG--NAME/blobs/DIGEST          the content of files, named by SHA-256 (large files) or git's blob id

A blob gets its name only when it is whole. It may itself be a link, into a store that models share.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.storage.contract import Entry, FileStatus, StoreTerms, version_of
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.local import LocalFile
from mergepipe.storage.location import Location, bare_name
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import open_regular, stop_read_ahead
from mergepipe.storage.remote.hub_api import HubApi, HubSettings, HubSource, hub_settings, offline
from mergepipe.storage.remote.hub_listing import COMMIT, GIT, SHA256, HubFile, ModelListing, changed, is_contained
from mergepipe.storage.remote.pinned_store import PinnedFile, PinnedStore
from mergepipe.storage.remote.retry import Transfers

DEFAULT_REVISION: Final = "main"
CACHED_TERMS: Final = StoreTerms(granularity_bytes=1, most_requests=8, request_cost_bytes=0)
_REFERENCE_LIMIT_BYTES: Final = 1 << 10
_KIND_OF_LENGTH: Final = {64: SHA256, 40: GIT}


def open_store(ledger: Ledger, connections: int) -> HubStore:
    """Make the store of `hf://` locations with the settings of the environment."""
    return HubStore(hub_settings(), Transfers(ledger, connections=connections))


class HubStore(PinnedStore):
    """Models of the Hub. One request pins a model; looking at its files needs no other.

    A branch keeps the commit that it led to at first use, for as long as the store lives. Safe to use from many
    threads. Every method that takes a location raises as `pin` does.
    """

    def __init__(self, settings: HubSettings, transfers: Transfers) -> None:
        super().__init__(transfers)
        self._is_offline = settings.is_offline
        self._cache = HubCache(settings.cache_folder)
        self._api = HubApi(settings, transfers, self._http)
        self._notices: list[str] = []
        self._listings: dict[tuple[str, str], ModelListing] = {}
        self._sources: dict[tuple[Location, str], HubSource] = {}
        self._lock = threading.RLock()

    @property
    def notices(self) -> tuple[str, ...]:
        """The models that the local cache stood in for, because the Hub could not be reached."""
        return tuple(self._notices)

    def terms(self, location: Location) -> StoreTerms:
        """Return the price of requests, which is nothing where everything at a location lies in the local cache."""
        listing = self._listings.get((location.root, location.revision or DEFAULT_REVISION))
        if listing is None:
            return super().terms(location)
        folder = f"{location.key}/" if location.key else ""
        file = listing.files.get(location.key)
        files = [file] if file else [file for path, file in listing.files.items() if path.startswith(folder)]
        is_cached = files and all(self._cache.path_of(listing.model, listing.commit, file) for file in files)
        return CACHED_TERMS if is_cached else super().terms(location)

    def pin(self, location: Location) -> Location:
        """The location at the commit that its revision leads to now."""
        return location.with_revision(self._listing(location).commit)

    def forget(self, location: Location) -> None:
        """Ask the Hub again at the next use of a revision where it leads; what is open stays as it is."""
        with self._lock:
            self._listings.pop((location.root, location.revision or DEFAULT_REVISION), None)

    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up in the pinned listing."""
        return self._listing(location).status(location.key)

    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder of the pinned listing, by name."""
        entries = self._listing(location).folders.get(location.key)
        if entries is None:
            raise NotFoundError.of("storage.not-found", location, "no such folder in the model", "check the path")
        return entries

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        """Open a file for positional reads: in the local cache, else on the network, asked at the first read.

        What is cached is read like what is not, byte for byte: `direct` means nothing here.
        """
        del direct
        status, listing = self._file_status(location), self._listing(location)
        file = listing.files[location.key]
        cached = self._cache.path_of(listing.model, listing.commit, file)
        if cached is not None:
            return _CachedFile(location, cached, file, self.ledger)
        return _CheckedFile(self._source(location), status, self._transfers)

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata, and hold it against its digest."""
        listing = self._listing(location)
        content = super().read_small(location, limit_bytes)
        listing.files[location.key].check(location, content)
        return content

    def _source(self, location: Location) -> HubSource:
        """Return the one `HubSource` of a file, which all that open it share: it is resolved once."""
        with self._lock:
            listing = self._listing(location)
            key = (location, listing.commit)
            if key not in self._sources:
                file = listing.files[location.key]
                self._sources[key] = HubSource(self._api, self._http, location, listing.commit, file)
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
            if error.code != "storage.unreachable":
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
        held = [path.rpartition("/")[2] for path in listing.files]
        kinds = (("configuration", "config.json"), ("tokenizer", "tokenizer"))
        lacking = [kind for kind, start in kinds if not any(name.startswith(start) for name in held)]
        if lacking:
            kept = "the local cache of the Hub, which alone is read, holds no"
            self._notices.append(f"{location}: {kept} {' and no '.join(lacking)} of it")
        return listing


class _CheckedFile(PinnedFile):
    """A file on the network, held against its digest where all of it is read."""

    _source: HubSource

    def _fill(self, offset: int, buffer: memoryview, purpose: Purpose) -> None:
        if not self._source.has_address:
            self._transfers.ask(self.location, self._source.resolve)
        with self._source.whole.reading(offset, buffer):
            super()._fill(offset, buffer, purpose)


class _CachedFile(LocalFile):
    """A file in the local cache, charged under its location on the Hub as any local file is."""

    def __init__(self, location: Location, path: Path, file: HubFile, ledger: Ledger) -> None:
        self._file = file
        super().__init__(location, open_regular(path), file.size_bytes, direct=False, ledger=ledger)
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes != file.size_bytes:
            self.close()
            raise changed(location, "the size in the local cache", file.size_bytes, size_bytes)
        stop_read_ahead(self._descriptor)

    @property
    def version(self) -> str:
        return self._file.version


@dataclass(frozen=True, slots=True)
class HubCache:
    """The cache in `folder`, which need not exist. Nothing is ever written to it."""

    folder: Path

    def commit_of(self, model: str, revision: str) -> str | None:
        """The commit of a branch, tag or commit, as far as the cache knows it."""
        if COMMIT.fullmatch(revision):
            return revision if (self._model_folder(model) / "snapshots" / revision).is_dir() else None
        if not is_contained(revision):
            return None
        try:
            with (self._model_folder(model) / "refs" / revision).open("rb") as file:
                commit = file.read(_REFERENCE_LIMIT_BYTES).decode("ascii", "replace").strip()
        except OSError:
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def listing(self, model: str, commit: str) -> ModelListing | None:
        """The files of a commit that the cache holds; None where it holds none."""
        snapshot = self._model_folder(model) / "snapshots" / commit
        places = (Path(parent) / name for parent, _, names in os.walk(snapshot) for name in sorted(names))
        paths = (place.relative_to(snapshot).as_posix() for place in places)
        files = [file for path in paths if (file := _described(snapshot, path)) is not None]
        return ModelListing.of(model, commit, files) if files else None

    def path_of(self, model: str, commit: str, file: HubFile) -> Path | None:
        """Return the cached file, by its digest or by its commit, path and size; None where it is not cached."""
        model_folder = self._model_folder(model)
        in_snapshot = model_folder / "snapshots" / commit / file.path
        if _size_bytes(in_snapshot) == file.size_bytes and _linked_blob(in_snapshot) in (None, file.content_id):
            return in_snapshot
        blob = model_folder / "blobs" / file.content_id
        is_digest = file.version.partition(":")[0] in (SHA256, GIT)
        return blob if is_digest and _size_bytes(blob) == file.size_bytes else None

    def _model_folder(self, model: str) -> Path:
        folder, name = self.folder / f"models--{model.replace('/', '--')}", bare_name(model)
        return folder if name is None or folder.is_dir() else self.folder / f"models--{name}"


def _described(snapshot: Path, path: str) -> HubFile | None:
    """Describe a file of a snapshot; None where its blob is missing."""
    place = snapshot / path
    size_bytes = _size_bytes(place)
    if size_bytes is None:
        return None
    digest = _linked_blob(place) or ""
    kind = _KIND_OF_LENGTH.get(len(digest))
    if kind is None:  # a cache on a file system without links holds plain files
        return HubFile(path, size_bytes, f"file:{version_of(place, place.stat())}")
    return HubFile(path, size_bytes, f"{kind}:{digest}")


def _linked_blob(place: Path) -> str | None:
    """The name of the blob that a file of a snapshot links to; None for a plain file."""
    try:
        return place.readlink().name
    except OSError:
        return None


def _size_bytes(place: Path) -> int | None:
    """The size of a regular file, links followed; None where there is none."""
    try:
        return place.stat().st_size if place.is_file() else None
    except (OSError, ValueError):
        return None
