"""The base's stored bytes of some elements, as they are shared by all that is encoded on them."""

from __future__ import annotations

import threading

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

_DIGEST_BYTES = 16


class BaseBytes:
    """Stored bytes (uint8) that do not change while this is used. Safe to use from many threads.

    Memory beside the bytes: a digest for each range that was asked for.
    """

    def __init__(self, stored: NDArray[np.uint8]) -> None:
        self.stored = stored
        self._lock = threading.Lock()
        self._digests: dict[tuple[int, int], bytes] = {}

    def digest(self, start: int, stop: int) -> bytes:
        """BLAKE3-128 of the bytes `[start, stop)`, taken once."""
        with self._lock:  # who comes meanwhile would else take the same digest
            digest = self._digests.get((start, stop))
            if digest is None:
                digest = self._digests[start, stop] = blake3(self.stored[start:stop].data).digest(_DIGEST_BYTES)
            return digest
