"""Packed experts as others read them: their format is registered here by name, and loaded with the first of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final, Protocol, cast

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import STORE_HEADER_NAME
from mergepipe.errors import CorruptError
from mergepipe.storage.contract import Entry, FileKind, FileStatus, RangeFile, Store, StoreTerms, is_file
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact

_OPENER: Final = "mergepipe.deltastore.checkpoint:open_store"
"""`module:function` of what opens a packed expert; see `open_packed_expert`."""
_ORIGINALS: Final = "mergepipe.deltastore.original_files:OriginalFiles"
"""`module:class` of the `Originals` of a store."""


def is_packed(store: Store, path: Location) -> bool:
    """Whether `path` is the folder of a packed expert."""
    return is_file(store, path / STORE_HEADER_NAME)


def open_packed_expert(store: Store, path: Location, base: Checkpoint | None) -> Checkpoint:
    """Open a packed expert as the full checkpoint that was packed, relative to `base` if any; reads its header."""
    opener = cast(Callable[[Store, Location, Checkpoint | None], Checkpoint], _loaded(_OPENER))
    return opener(store, path, base)


class OriginalFolder(Protocol):
    """The weight files that an expert was packed from, to be read: `sizes_bytes` by name."""

    sizes_bytes: Mapping[str, int]
    own_names: frozenset[str]
    """Names of files that belong to the packed form alone."""

    @property
    def version(self) -> str:
        """Changes with every file that the weights are decoded from."""
        ...

    @property
    def stored_files(self) -> tuple[Location, ...]:
        """The files that the weights are decoded from."""
        ...

    def open(self, location: Location) -> RangeFile:
        """Open one of the weight files."""
        ...


class Originals(Protocol):
    """The original folders of packed experts, which share what they keep in memory."""

    def folder(self, path: Location) -> OriginalFolder:
        """Open a packed expert with all that it is packed on."""
        ...


def _loaded(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


# --- a store in which packed experts are the folders that they were packed from; all else is as it is ---


class UnpackedView:
    """Serves the original weight files of packed experts, decoded as they are read; a chain with all stores below.

    The files of stores stay where they are and can be read too; listings leave them out. Safe to use from many
    threads. Memory: that of the `Originals`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._folders: dict[Location, OriginalFolder | None] = {}
        self._originals: Originals | None = None

    @property
    def has_packed(self) -> bool:
        """Whether a packed expert was opened."""
        return self._originals is not None

    def stored_files(self, location: Location) -> tuple[Location, ...]:
        """Return the files that a file's bytes come from: itself, or those of its store and of all that it is on."""
        folder = self._holder(location)
        return (location,) if folder is None else folder.stored_files

    def _folder(self, location: Location) -> OriginalFolder | None:
        """Open the packed expert in a folder, once; None where there is none."""
        with self._lock:
            if location not in self._folders:
                self._folders[location] = self._opened(location) if is_packed(self._store, location) else None
            return self._folders[location]

    def _opened(self, location: Location) -> OriginalFolder:
        if self._originals is None:
            self._originals = cast(Callable[[Store], Originals], _loaded(_ORIGINALS))(self._store)
        return self._originals.folder(location)

    def _holder(self, location: Location) -> OriginalFolder | None:
        """Return the packed expert whose original weight file this is."""
        folder = self._folder(location.parent)
        return folder if folder is not None and location.name in folder.sizes_bytes else None

    # --- the contract of stores

    @property
    def ledger(self) -> Ledger:
        return self._store.ledger

    def terms(self, location: Location) -> StoreTerms:
        return self._store.terms(location)

    def pin(self, location: Location) -> Location:
        return self._store.pin(location)

    def stat(self, location: Location) -> FileStatus | None:
        folder = self._holder(location)
        if folder is None:
            return self._store.stat(location)
        return FileStatus(FileKind.FILE, folder.sizes_bytes[location.name], folder.version)

    def list(self, location: Location) -> tuple[Entry, ...]:
        folder, entries = self._folder(location), self._store.list(location)
        if folder is None:
            return entries
        kept = [entry for entry in entries if entry.name not in {*folder.own_names, *folder.sizes_bytes}]
        weights = [Entry(name, FileKind.FILE) for name in folder.sizes_bytes]
        return tuple(sorted(kept + weights, key=lambda entry: entry.name))

    def real_path(self, location: Location) -> Location | None:
        if self._holder(location) is None:
            return self._store.real_path(location)
        folder = self._store.real_path(location.parent)
        return None if folder is None else folder / location.name

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        folder = self._holder(location)
        return self._store.open(location, direct=direct) if folder is None else folder.open(location)

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        folder = self._holder(location)
        if folder is None:
            return self._store.read_metadata(location, offset, nbytes)
        stop = min(offset + nbytes, folder.sizes_bytes[location.name])
        file = folder.open(location)
        try:
            return read_exact(file, offset, max(offset, stop), Purpose.METADATA).tobytes()
        finally:
            file.close()

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        folder = self._holder(location)
        if folder is None:
            return self._store.read_small(location, limit_bytes)
        size_bytes = folder.sizes_bytes[location.name]
        if size_bytes > limit_bytes:
            message = f"has {size_bytes} bytes, at most {limit_bytes} are read"
            raise CorruptError.of("storage.too-large", location, message)
        return self.read_metadata(location, 0, size_bytes)

    def size_bytes(self, location: Location) -> int:
        folder = self._holder(location)
        return self._store.size_bytes(location) if folder is None else folder.sizes_bytes[location.name]
