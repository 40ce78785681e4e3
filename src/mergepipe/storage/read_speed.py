"""Measure the speed of reading a file past the page cache, with the requests that a merge makes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES, LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact

MOST_BYTES = 64 << 20
REQUEST_BYTES = 2 << 20


def measure_reading(store: Store, location: Location, purpose: Purpose) -> float:
    """Bytes a second of one file, from at most its first 64 MiB in as many requests of 2 MiB as its store takes.

    Charged to `purpose`. Memory: 2 MiB a request.

    Raises:
        StorageError, NotFoundError, CorruptError: from the store.
    """
    if location.is_local:
        file: RangeFile = LocalStore(store.ledger).open(location, direct=True, cached=False)
    else:
        file = store.open(location, direct=True)
    size_bytes = min(MOST_BYTES, file.size_bytes) // DIRECT_ALIGNMENT_BYTES * DIRECT_ALIGNMENT_BYTES

    def read(offset: int) -> int:
        return len(read_exact(file, offset, min(offset + REQUEST_BYTES, size_bytes), purpose))

    try:
        with ThreadPoolExecutor(store.terms(location).most_requests) as readers:
            started = time.perf_counter()
            got = sum(readers.map(read, range(0, size_bytes, REQUEST_BYTES)))
            seconds = time.perf_counter() - started
    finally:
        file.close()
    return max(got, 1) / max(seconds, 1e-9)
