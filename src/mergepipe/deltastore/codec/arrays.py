"""Arrays between kernels: work arrays that threads keep, checked reading of untrusted bytes."""

from __future__ import annotations

import threading
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import CorruptError
from mergepipe.storage.ranges import aligned_buffer, round_up

# --- work arrays that each thread keeps from block to block, as fresh ones cost page faults ---


T = TypeVar("T", bound=np.generic)

KEPT_BYTES = 8 << 20
"""Longer arrays are not kept."""
_STEP_BYTES = 256 << 10


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, NDArray[np.uint8]] = {}


_BUFFERS = _ThreadBuffers()


def scratch(name: str, n: int, dtype: type[T]) -> NDArray[T]:
    """Return this thread's page-aligned array of `n` elements for one use, `name`; contents are undefined.

    It is valid until the same thread asks for `name` again: never return it to callers that may keep it.
    """
    element_type = np.dtype(dtype)
    nbytes = n * element_type.itemsize
    buffer = _BUFFERS.by_name.get(name)
    if buffer is None or len(buffer) < nbytes:
        buffer = aligned_buffer(max(round_up(nbytes, _STEP_BYTES), _STEP_BYTES))
        if nbytes <= KEPT_BYTES:
            _BUFFERS.by_name[name] = buffer
    return buffer[:nbytes].view(element_type)


def in_layout(name: str, array: NDArray[T]) -> NDArray[T]:
    """Return the array, or `scratch` of its size if kernels do not take it: they are compiled for one array layout."""
    flags = array.flags
    if flags.aligned and flags.writeable and flags.c_contiguous:
        return array
    return scratch(name, len(array), array.dtype.type)


def copied_to_layout(name: str, array: NDArray[T]) -> NDArray[T]:
    """Return the array, or a copy of it in `scratch` if kernels do not take it."""
    taken = in_layout(name, array)
    if taken is not array:
        taken[:] = array
    return taken


# --- read arrays from untrusted bytes with every length checked, and concatenate arrays to bytes ---


def corrupt(where: object, message: str) -> CorruptError:
    """Make the error of a store whose content contradicts its format."""
    return CorruptError.of("store.damaged", where, message, "copy the store again, or pack the expert again")  # type: ignore[return-value]


class ByteReader:
    """Reads one piece of a block from its start; every length is checked against the bytes left."""

    def __init__(self, content: NDArray[np.uint8], where: str) -> None:
        self._content = content
        self._where = where
        self._position = 0

    def take(self, dtype: type[T], count: int) -> NDArray[T]:
        """Read the next `count` values as a copy: little-endian, at any alignment."""
        nbytes = np.dtype(dtype).itemsize * count
        left_bytes = len(self._content) - self._position
        if nbytes > left_bytes:
            raise corrupt(self._where, f"{nbytes} bytes are needed, {left_bytes} are left")
        part = self._content[self._position : self._position + nbytes]
        self._position += nbytes
        return part.copy().view(dtype)

    def end(self) -> None:
        """Check that nothing is left."""
        if self._position != len(self._content):
            raise corrupt(self._where, f"{len(self._content) - self._position} bytes are left over")


def concatenate_bytes(*arrays: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Concatenate the bytes of arrays."""
    return np.frombuffer(bytearray().join([np.ascontiguousarray(array).data for array in arrays]), np.uint8)
