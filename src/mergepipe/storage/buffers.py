"""A bounded pool of equal, page-aligned buffers: the memory a pipeline may hold, allocated once and reused."""

from __future__ import annotations

import mmap
import sys

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import StorageError

PAGE_BYTES = 4096


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is >= `value`."""
    return -(-value // step) * step


class BufferPool:
    """At most `capacity_bytes // buffer_bytes` buffers, created when first needed. Used from one thread.

    The memory bound is `capacity_bytes`, whatever is in flight.
    """

    def __init__(self, buffer_bytes: int, capacity_bytes: int) -> None:
        self._buffer_bytes = round_up(buffer_bytes, PAGE_BYTES)
        self._limit = capacity_bytes // self._buffer_bytes
        if self._limit < 1:
            raise ValueError(f"{capacity_bytes} bytes hold no buffer of {self._buffer_bytes}")
        self._free: list[NDArray[np.uint8]] = []
        self._made = 0

    @property
    def buffer_bytes(self) -> int:
        return self._buffer_bytes

    @property
    def limit(self) -> int:
        """The largest number of buffers."""
        return self._limit

    def take(self) -> NDArray[np.uint8] | None:
        """Return a buffer (uint8, page-aligned, contents undefined), or None when all are in use."""
        if self._free:
            return self._free.pop()
        if self._made == self._limit:
            return None
        self._made += 1
        return aligned_buffer(self._buffer_bytes)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer; its holder must not touch it afterwards."""
        self._free.append(buffer)


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """A page-aligned uint8 array outside the Python heap, freed with its last reference."""
    try:
        mapping = _anonymous_mapping(max(nbytes, 1))  # no mapping is empty
    except OSError as error:
        message = f"the system gives no {nbytes} bytes for a buffer: {error.strerror}"
        hint = "close other programs, or lower --memory or --threads"
        raise StorageError.of("storage.exhausted", "", message, hint) from error
    return np.frombuffer(mapping, np.uint8)[:nbytes]


def _anonymous_mapping(nbytes: int) -> mmap.mmap:
    """Map memory of this process alone where the system knows it: shared pages cost twice as much to make."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had resident."""
    import resource

    unit_bytes = {"darwin": 1}.get(sys.platform, 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
