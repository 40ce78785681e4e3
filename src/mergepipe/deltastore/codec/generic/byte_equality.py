"""Compare byte arrays without allocating, stopping at the first difference."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.compilation.compiled import Bytes, kernel

_PART_BYTES = 4096


@kernel
def bytes_equal(first: Bytes, second: Bytes) -> bool:
    """Whether two arrays hold the same bytes; neither may be written to meanwhile."""
    n = len(first)
    if len(second) != n:
        return False
    for start in range(0, n, _PART_BYTES):
        stop = min(start + _PART_BYTES, n)
        first_part, second_part = first[start:stop], second[start:stop]
        difference = np.uint8(0)
        for i in range(stop - start):
            difference |= first_part[i] ^ second_part[i]
        if difference:
            return False
    return True
