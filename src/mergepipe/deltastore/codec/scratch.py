"""Work arrays that each thread keeps from block to block, as fresh ones cost page faults."""

from __future__ import annotations

import threading
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.storage.buffers import aligned_buffer, round_up

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
