"""Byte strings put together from arrays, and taken apart again without trust."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.errors import CorruptError

T = TypeVar("T", bound=np.generic)


def corrupt(where: object, message: str) -> CorruptError:
    """The error of a store whose content contradicts its format."""
    return CorruptError.of("store.content", where, message, "copy the store again, or pack the expert again")  # type: ignore[return-value]


class Parts:
    """Reads one piece of a block from its start; every length is held against what is left."""

    def __init__(self, content: NDArray[np.uint8], where: str) -> None:
        self._content = content
        self._where = where
        self._at = 0

    def take(self, dtype: type[T], count: int) -> NDArray[T]:
        """The next `count` values, copied: little-endian, of any alignment.

        Raises:
            CorruptError: there are not so many.
        """
        nbytes = np.dtype(dtype).itemsize * count
        left = len(self._content) - self._at
        if nbytes > left:
            raise corrupt(self._where, f"a part of {nbytes} bytes is needed, {left} are left")
        raw = self._content[self._at : self._at + nbytes]
        self._at += nbytes
        return raw.copy().view(dtype)

    def rest(self, dtype: type[T]) -> NDArray[T]:
        """All that is left.

        Raises:
            CorruptError: it is no whole number of values.
        """
        left = len(self._content) - self._at
        itemsize = np.dtype(dtype).itemsize
        if left % itemsize:
            raise corrupt(self._where, f"{left} bytes are left, not a multiple of {itemsize}")
        return self.take(dtype, left // itemsize)

    def end(self) -> None:
        """Check that nothing is left.

        Raises:
            CorruptError: something is.
        """
        if self._at != len(self._content):
            raise corrupt(self._where, f"{len(self._content) - self._at} bytes are left over")


def joined(*arrays: NDArray[np.generic]) -> NDArray[np.uint8]:
    """The bytes of arrays, one after another."""
    return np.frombuffer(bytearray().join([np.ascontiguousarray(array).data for array in arrays]), np.uint8)
