"""Measure the speed of reading a file past the page cache, with the requests that a merge makes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES, LOCAL_TERMS, LocalStore
from mergepipe.storage.ranges import read_exact

MOST_BYTES = 64 << 20
REQUEST_BYTES = 2 << 20
READERS = LOCAL_TERMS.most_requests


def measure_reading(store: LocalStore, path: Path, purpose: Purpose) -> float:
    """Bytes a second of one file, from at most its first 64 MiB in requests of 2 MiB by eight threads.

    Charged to `purpose`. Memory: 16 MiB.

    Raises:
        StorageError, NotFoundError, CorruptError: from the store.
    """
    file = store.open(path, direct=True, cached=False)
    size_bytes = min(MOST_BYTES, file.size_bytes) // DIRECT_ALIGNMENT_BYTES * DIRECT_ALIGNMENT_BYTES

    def read(offset: int) -> int:
        return len(read_exact(file, offset, min(offset + REQUEST_BYTES, size_bytes), purpose))

    try:
        with ThreadPoolExecutor(READERS) as readers:
            started = time.perf_counter()
            got = sum(readers.map(read, range(0, size_bytes, REQUEST_BYTES)))
            seconds = time.perf_counter() - started
    finally:
        file.close()
    return max(got, 1) / max(seconds, 1e-9)
