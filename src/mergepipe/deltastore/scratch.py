"""Arrays that a thread works in, kept from block to block: fresh ones cost more page faults than the work on them."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import DTypeLike, NDArray


class _OwnArrays(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, NDArray[np.uint8]] = {}


_OWN = _OwnArrays()


def scratch(name: str, n: int, dtype: DTypeLike) -> NDArray[np.generic]:
    """This thread's array of `n` elements for one use; contents undefined.

    It is the caller's until the same thread asks for `name` again: never return it to who may keep it.
    """
    wanted = np.dtype(dtype)
    nbytes = n * wanted.itemsize
    own = _OWN.by_name.get(name)
    if own is None or len(own) < nbytes:
        own = _OWN.by_name[name] = np.empty(nbytes, np.uint8)
    return own[:nbytes].view(wanted)
