"""The storage contract: immutable files read by byte range, every byte metered by purpose."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from mergepipe.storage.ledger import Ledger, Purpose


class FileKind(Enum):
    """What a path leads to, links followed: only files are read, only folders are listed."""

    FILE = "file"
    FOLDER = "folder"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What a store says of a path without reading it.

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
    """How a store is best read: requests in multiples of `granularity_bytes`, `most_requests` of them at once.

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
    def path(self) -> Path: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def alignment(self) -> int: ...

    @property
    def version(self) -> str:
        """The version of what was opened, whatever its path leads to by now (see `storage.file_version`)."""
        ...

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; return the bytes read, fewer only where the file ends inside the buffer.

        `offset`, `len(buffer)` and the buffer's address must be multiples of `alignment`.

        Raises:
            StorageError: the operating system failed the read.
        """
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """Opens files. The only place that reads checkpoint bytes, so the only place that meters them."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def terms(self) -> StoreTerms: ...

    def stat(self, path: Path) -> FileStatus | None:
        """Look a path up, links followed; None where there is nothing.

        Raises:
            StorageError: `storage.stat`, the store refused to look.
        """
        ...

    def list(self, path: Path) -> tuple[Entry, ...]:
        """What is directly below a folder, by name.

        Raises:
            NotFoundError: there is no such folder.
            StorageError: `storage.list`, the store refused to list it.
        """
        ...

    def real_path(self, path: Path) -> Path | None:
        """Where a path leads once all links in it are followed, itself where there are none; None where to nothing.

        Raises:
            StorageError: `storage.stat`, the store refused to look.
        """
        ...

    def open(self, path: Path, *, direct: bool = False) -> RangeFile:
        """Open `path` for positional reads; `direct` asks for reads that bypass the page cache where that pays.

        Without `direct`, the file's alignment is 1.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it cannot be opened, or is not a regular file.
        """
        ...

    def read_metadata(self, path: Path, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset` (fewer only at the end of the file), charged as metadata."""
        ...

    def read_small(self, path: Path, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it cannot be read, or is not a regular file.
            CorruptError: `storage.too-large`, it is larger; nothing was read.
        """
        ...

    def size_bytes(self, path: Path) -> int:
        """Size of the file.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it is not a regular file.
        """
        ...


def is_file(store: Store, path: Path) -> bool:
    """Whether a path leads to a regular file. Raises as `Store.stat` does."""
    status = store.stat(path)
    return status is not None and status.is_file


def is_folder(store: Store, path: Path) -> bool:
    """Whether a path leads to a folder. Raises as `Store.stat` does."""
    status = store.stat(path)
    return status is not None and status.is_folder
