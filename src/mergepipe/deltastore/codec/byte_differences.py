"""The loops that turn elements of any dtype beside the same dtype into bytes of small differences, and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.kernels.compiled import Bytes, kernel

Words = NDArray[np.unsignedinteger]
_SYMBOLS = 256


@kernel
def fold_differences(base: Words, expert: Words, bits: int, is_float: int, folded: Words) -> None:
    """Differences modulo 2**bits in the order of values (floats, if `is_float`, by their bits), small ones first."""
    every, sign = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits), np.uint64(1) << np.uint64(bits - 1)
    shift, one = np.uint64(bits - 1), np.uint64(1)
    low = sign if is_float else np.uint64(0)
    high = every if is_float else np.uint64(0)
    for i in range(len(folded)):
        own, other = np.uint64(base[i]), np.uint64(expert[i])
        own ^= high if own >> shift else low
        other ^= high if other >> shift else low
        difference = (other - own) & every
        folded[i] = (difference << one) ^ (every if difference >> shift else np.uint64(0))


@kernel
def unfold_differences(base: Words, folded: Words, bits: int, is_float: int, expert: Words) -> None:
    """What `fold_differences` was given as expert."""
    every, sign = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits), np.uint64(1) << np.uint64(bits - 1)
    shift, one = np.uint64(bits - 1), np.uint64(1)
    low = sign if is_float else np.uint64(0)
    high = every if is_float else np.uint64(0)
    for i in range(len(expert)):
        own, found = np.uint64(base[i]), np.uint64(folded[i])
        own ^= high if own >> shift else low
        difference = (found >> one) ^ (every if found & one else np.uint64(0))
        other = (own + difference) & every
        expert[i] = other ^ (low if other >> shift else high)


@kernel
def put_plane(plane: Bytes, byte: int, folded: Words) -> None:
    """Add one byte to every word."""
    shift = np.uint64(8 * byte)
    for i in range(len(folded)):
        folded[i] = np.uint64(folded[i]) | (np.uint64(plane[i]) << shift)


@kernel
def take_plane(folded: Words, byte: int, plane: Bytes) -> None:
    """One byte of every word."""
    shift = np.uint64(8 * byte)
    for i in range(len(plane)):
        plane[i] = np.uint8((np.uint64(folded[i]) >> shift) & np.uint64(0xFF))


@kernel
def count_bytes(plane: Bytes, counts: NDArray[np.int64]) -> None:
    """Add how often each byte occurs to `counts`."""
    # Four counts of each: neighbours are often alike, and would wait for each other.
    own = np.zeros(4 * _SYMBOLS, np.uint32)
    for i in range(len(plane)):
        own[(np.uint64(i) & np.uint64(3)) * np.uint64(_SYMBOLS) + np.uint64(plane[i])] += np.uint32(1)
    for i in range(4 * _SYMBOLS):
        counts[i % _SYMBOLS] += np.int64(own[i])
