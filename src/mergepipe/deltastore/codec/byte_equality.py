"""Compares bytes, up to the first that differ."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.compiled import Bytes, kernel

_AT_ONCE = 4096


@kernel
def are_equal(first: Bytes, second: Bytes) -> bool:
    """Whether two arrays hold the same bytes. They may not be written to meanwhile; nothing is allocated."""
    n = len(first)
    if len(second) != n:
        return False
    for start in range(0, n, _AT_ONCE):
        stop = min(start + _AT_ONCE, n)
        one, other = first[start:stop], second[start:stop]
        different = np.uint8(0)
        for i in range(stop - start):
            different |= one[i] ^ other[i]
        if different:
            return False
    return True
