"""Copy the files that a delta store holds unchanged: read in parts, written durably."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from mergepipe.storage import owned
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import os_error
from mergepipe.storage.location import Location

_PART_BYTES = 8 << 20


def file_parts(store: Store, path: Location, size_bytes: int) -> Iterator[bytes]:
    """Read the first `size_bytes` of a file in parts of 8 MiB, charged as metadata.

    Raises:
        StorageError, CorruptError: it could not be read.
    """
    for start in range(0, size_bytes, _PART_BYTES):
        yield store.read_metadata(path, start, min(_PART_BYTES, size_bytes - start))


def write_kept(store: Store, target: Path, parts: Iterable[bytes], size_bytes: int, doing: str) -> None:
    """Write a new file durably, with its folders; `size_bytes` are charged as output, `doing` is for the error.

    Raises:
        StorageError: the operating system refused.
    """
    try:
        owned.make_folders(target.parent)
        descriptor = owned.create_file(target)
        try:
            for part in parts:
                owned.write_all(descriptor, part)
            owned.sync_file(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, target, doing) from error
    store.ledger.charge(str(target), Purpose.OUTPUT, size_bytes)
