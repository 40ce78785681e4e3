"""Read arrays from untrusted bytes with every length checked, and concatenate arrays to bytes."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import CorruptError

T = TypeVar("T", bound=np.generic)


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

    def rest(self, dtype: type[T]) -> NDArray[T]:
        """Read all that is left."""
        left_bytes = len(self._content) - self._position
        itemsize = np.dtype(dtype).itemsize
        if left_bytes % itemsize:
            raise corrupt(self._where, f"{left_bytes} bytes are left, not a multiple of {itemsize}")
        return self.take(dtype, left_bytes // itemsize)

    def end(self) -> None:
        """Check that nothing is left."""
        if self._position != len(self._content):
            raise corrupt(self._where, f"{len(self._content) - self._position} bytes are left over")


def concatenate_bytes(*arrays: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Concatenate the bytes of arrays."""
    return np.frombuffer(bytearray().join([np.ascontiguousarray(array).data for array in arrays]), np.uint8)
