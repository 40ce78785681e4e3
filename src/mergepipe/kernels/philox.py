"""Generate random bits with Philox4x32-10, a counter-based generator: those of element `i` depend on (key, i) only.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants and the
known-answer vectors in the tests are those of the paper's Random123 library.
"""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.compilation.compiled import Bits32, kernel

# Elements are numbered in groups: element `e` owns word `(e % 64) // 16` of counter `16 * (e // 64) + e % 16`, so that
# sixteen counters at a time fill four whole vectors in element order.
GROUP_LANES = 16
GROUP_ELEMENTS = 4 * GROUP_LANES


@kernel
def fill_random_words(key: np.uint64 | int, first_group: int, n_groups: int, out: Bits32) -> None:
    """Write the random words (uint32) of the `64 * n_groups` elements from group `first_group` on to `out`.

    `key` is 64 bits; the upper 64 bits of every counter are zero.
    """
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    key0 = np.uint64(key) & low
    key1 = np.uint64(key) >> shift
    for g in range(n_groups):
        group = out[GROUP_ELEMENTS * g : GROUP_ELEMENTS * (g + 1)]
        first_counter = np.uint64(GROUP_LANES) * (np.uint64(first_group) + np.uint64(g))
        for lane in range(GROUP_LANES):
            counter = first_counter + np.uint64(lane)
            c0 = counter & low
            c1 = counter >> shift
            c2 = np.uint64(0)
            c3 = np.uint64(0)
            k0 = key0
            k1 = key1
            for _ in range(10):
                p0 = np.uint64(0xD2511F53) * c0
                p1 = np.uint64(0xCD9E8D57) * c2
                c0 = (p1 >> shift) ^ c1 ^ k0
                c1 = p1 & low
                c2 = (p0 >> shift) ^ c3 ^ k1
                c3 = p0 & low
                k0 = (k0 + np.uint64(0x9E3779B9)) & low
                k1 = (k1 + np.uint64(0xBB67AE85)) & low
            group[lane] = np.uint32(c0)
            group[lane + GROUP_LANES] = np.uint32(c1)
            group[lane + 2 * GROUP_LANES] = np.uint32(c2)
            group[lane + 3 * GROUP_LANES] = np.uint32(c3)
