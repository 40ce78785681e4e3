"""Small stores for tests: they record every call, and the metadata store refuses to serve tensor bytes."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from mergepipe.errors import NotFoundError, StorageError
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.regular import too_large


@dataclass(frozen=True, slots=True)
class MetadataRead:
    """One recorded request for `nbytes` bytes at `offset`."""

    path: Path
    offset: int
    nbytes: int


@dataclass(slots=True)
class MetadataStore:
    """Serves headers and sidecars of real files; fails the test that opens a file for its tensor bytes."""

    ledger: Ledger = field(default_factory=Ledger)
    reads: list[MetadataRead] = field(default_factory=list)

    def open(self, path: Path, *, direct: bool = False) -> NoReturn:
        raise AssertionError(f"{path} was opened for tensor bytes (direct={direct})")

    def size_bytes(self, path: Path) -> int:
        found = _stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError.of("storage.not_regular", path, "is not a regular file")
        return found.st_size

    def read_metadata(self, path: Path, offset: int, nbytes: int) -> bytes:
        self.size_bytes(path)
        self.reads.append(MetadataRead(path, offset, nbytes))
        descriptor = os.open(path, os.O_RDONLY)
        try:
            content = os.pread(descriptor, nbytes, offset)
        finally:
            os.close(descriptor)
        self.ledger.charge(str(path), Purpose.METADATA, len(content))
        return content

    def read_small(self, path: Path, limit_bytes: int) -> bytes:
        return _read_small(self, path, limit_bytes)


@dataclass(frozen=True, slots=True)
class InMemoryFile:
    """One file of an `InMemoryStore`."""

    path: Path
    content: bytes
    ledger: Ledger
    alignment: int = 1
    version: str = ""

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        piece = self.content[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        self.ledger.charge(str(self.path), purpose, len(buffer))
        return len(piece)

    def close(self) -> None:
        """Nothing to release."""


@dataclass(slots=True)
class InMemoryStore:
    """Serves files from a mapping of path to content."""

    files: Mapping[Path, bytes]
    ledger: Ledger = field(default_factory=Ledger)
    reads: list[MetadataRead] = field(default_factory=list)

    def open(self, path: Path, *, direct: bool = False) -> InMemoryFile:
        return InMemoryFile(path, self._content(path), self.ledger)

    def size_bytes(self, path: Path) -> int:
        return len(self._content(path))

    def read_metadata(self, path: Path, offset: int, nbytes: int) -> bytes:
        content = self._content(path)[offset : offset + nbytes]
        self.reads.append(MetadataRead(path, offset, nbytes))
        self.ledger.charge(str(path), Purpose.METADATA, len(content))
        return content

    def read_small(self, path: Path, limit_bytes: int) -> bytes:
        return _read_small(self, path, limit_bytes)

    def _content(self, path: Path) -> bytes:
        if path not in self.files:
            raise NotFoundError.of("storage.not_found", path, "there is no such file")
        return self.files[path]


def _read_small(store: MetadataStore | InMemoryStore, path: Path, limit_bytes: int) -> bytes:
    size_bytes = store.size_bytes(path)
    if size_bytes > limit_bytes:
        raise too_large(path, size_bytes, limit_bytes)
    return store.read_metadata(path, 0, size_bytes)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise NotFoundError.of("storage.not_found", path, "there is no such file") from error
    except OSError as error:
        raise StorageError.of("storage.stat", path, f"cannot be looked at: {error.strerror}") from error
