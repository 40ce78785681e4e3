"""The storage contract: immutable files read by byte range, every byte metered by purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mergepipe.errors import StorageError
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location


class FileKind(Enum):
    """The kind of thing at a location, links followed: only files are read, only folders are listed."""

    FILE = "file"
    FOLDER = "folder"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The state of a location, told without reading it.

    `version` is an opaque text that changes whenever a file's bytes do.
    """

    kind: FileKind
    size_bytes: int
    version: str

    @property
    def is_file(self) -> bool:
        return self.kind is FileKind.FILE

    @property
    def is_folder(self) -> bool:
        return self.kind is FileKind.FOLDER


@dataclass(frozen=True, slots=True)
class Entry:
    """A name directly below a folder; a link that leads nowhere is `OTHER`."""

    name: str
    kind: FileKind


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """Terms of reading a store: requests in multiples of `granularity_bytes`, `most_requests` of them at once.

    A request costs as much as `request_cost_bytes` more bytes would: ranges that lie closer are cheaper read together.
    """

    granularity_bytes: int
    most_requests: int
    request_cost_bytes: int

    def __post_init__(self) -> None:
        if self.granularity_bytes < 1 or self.most_requests < 1 or self.request_cost_bytes < 0:
            raise ValueError(f"not the terms of a store: {self}")


class RangeFile(Protocol):
    """One immutable file, open for positional reads from many threads.

    `alignment` is the granularity of requests in bytes (1: any): an engine that plans a read rounds it outwards
    itself, so that what is charged is what the operating system is asked for.
    """

    @property
    def location(self) -> Location: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def alignment(self) -> int: ...

    @property
    def version(self) -> str:
        """The version of what was opened, whatever its location leads to by now (see `storage.file_version`)."""
        ...

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; return the bytes read, fewer only where the file ends inside the buffer.

        `offset`, `len(buffer)` and the buffer's address must be multiples of `alignment`.

        Raises:
            StorageError: the read failed.
            ConflictError: `input.changed`, another version of the file is in its place.
        """
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """Opens files. The only place that reads checkpoint bytes, so the only place that meters them."""

    @property
    def ledger(self) -> Ledger: ...

    def terms(self, location: Location) -> StoreTerms:
        """Return the terms of reading a location. Asks no other machine."""
        ...

    def pin(self, location: Location) -> Location:
        """The location with the version of its whole folder fixed, where its store has such: a commit for a branch.

        Itself elsewhere.

        Raises:
            NotFoundError: there is no such repository or revision.
            StorageError: the store cannot be reached.
        """
        ...

    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up, links followed; None where there is nothing.

        Raises:
            StorageError: `storage.answer`, the store refused to look.
        """
        ...

    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder, by name.

        Raises:
            NotFoundError: there is no such folder.
            StorageError: `storage.answer`, the store refused to list it.
        """
        ...

    def real_path(self, location: Location) -> Location | None:
        """Return the target of a location, all links followed, itself where there are none; None where nothing is.

        Raises:
            StorageError: `storage.answer`, the store refused to look.
        """
        ...

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        """Open `location` for positional reads; `direct` asks for reads that bypass the page cache where that pays.

        Without `direct`, the file's alignment is 1.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it cannot be opened, or is not a regular file.
        """
        ...

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset` (fewer only at the end of the file), charged as metadata."""
        ...

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it cannot be read, or is not a regular file.
            CorruptError: `storage.too-large`, it is larger; nothing was read.
        """
        ...

    def size_bytes(self, location: Location) -> int:
        """Size of the file.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it is not a regular file.
        """
        ...


def files_below(store: Store, folder: Location) -> Iterator[str]:
    """The names of all files below a folder, relative to it, at any depth. Raises as `Store.list` does."""
    for entry in store.list(folder):
        if entry.kind is FileKind.FILE:
            yield entry.name
        elif entry.kind is FileKind.FOLDER:
            yield from (f"{entry.name}/{name}" for name in files_below(store, folder / entry.name))


def is_file(store: Store, location: Location) -> bool:
    """Whether a location leads to a regular file. Raises as `Store.stat` does."""
    status = store.stat(location)
    return status is not None and status.is_file


def is_folder(store: Store, location: Location) -> bool:
    """Whether a location leads to a folder. Raises as `Store.stat` does."""
    status = store.stat(location)
    return status is not None and status.is_folder


def resolved(store: Store, location: Location) -> Location:
    """Follow the links in a location; of one that cannot be looked at, those in the folders above it that can.

    Locations of other machines have none.
    """
    if not location.is_local:
        return location
    try:
        real = store.real_path(location)
    except StorageError:
        real = None
    if real is not None or location.parent == location:
        return location if real is None else real
    return resolved(store, location.parent) / location.name
