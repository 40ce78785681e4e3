"""The storage contract: immutable files read by byte range, every byte metered by purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mergepipe.storage.ledger import Ledger, Purpose


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

    def open(self, path: Path, *, direct: bool = False) -> RangeFile:
        """Open `path` for positional reads; `direct` asks for reads that bypass the page cache where that pays.

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
