"""Arrays that a thread works in, kept from block to block: fresh ones cost more page faults than the work on them."""

from __future__ import annotations

import threading
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.storage.buffers import aligned_buffer, round_up

T = TypeVar("T", bound=np.generic)

KEPT_BYTES = 8 << 20
"""A longer array is not kept."""
_STEP_BYTES = 256 << 10


class _OwnArrays(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, NDArray[np.uint8]] = {}


_OWN = _OwnArrays()


def scratch(name: str, n: int, dtype: type[T]) -> NDArray[T]:
    """This thread's page-aligned array of `n` elements for one use; contents undefined.

    It is the caller's until the same thread asks for `name` again: never return it to who may keep it.
    """
    wanted = np.dtype(dtype)
    nbytes = n * wanted.itemsize
    own = _OWN.by_name.get(name)
    if own is None or len(own) < nbytes:
        own = aligned_buffer(max(round_up(nbytes, _STEP_BYTES), _STEP_BYTES))
        if nbytes <= KEPT_BYTES:
            _OWN.by_name[name] = own
    return own[:nbytes].view(wanted)
