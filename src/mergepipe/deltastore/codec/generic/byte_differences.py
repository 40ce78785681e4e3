"""Convert elements of any dtype to folded differences from the base, split these into byte planes, and back.

Format: "BYTES" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.kernels.compilation.compiled import Bytes, kernel

Words = NDArray[np.unsignedinteger]
_SYMBOLS = 256


@kernel
def fold_differences(base: Words, expert: Words, bits: int, is_float: int, folded: Words) -> None:
    """Write differences modulo 2**bits in value order, zigzag-folded so that small magnitudes are small numbers.

    With `is_float`, elements are the bit patterns of floats.
    """
    all_bits, sign = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits), np.uint64(1) << np.uint64(bits - 1)
    shift, one = np.uint64(bits - 1), np.uint64(1)
    positive_flip = sign if is_float else np.uint64(0)
    negative_flip = all_bits if is_float else np.uint64(0)
    for i in range(len(folded)):
        base_bits, expert_bits = np.uint64(base[i]), np.uint64(expert[i])
        base_bits ^= negative_flip if base_bits >> shift else positive_flip
        expert_bits ^= negative_flip if expert_bits >> shift else positive_flip
        difference = (expert_bits - base_bits) & all_bits
        folded[i] = (difference << one) ^ (all_bits if difference >> shift else np.uint64(0))


@kernel
def unfold_differences(base: Words, folded: Words, bits: int, is_float: int, expert: Words) -> None:
    """Restore the expert's elements: the inverse of `fold_differences`."""
    all_bits, sign = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits), np.uint64(1) << np.uint64(bits - 1)
    shift, one = np.uint64(bits - 1), np.uint64(1)
    positive_flip = sign if is_float else np.uint64(0)
    negative_flip = all_bits if is_float else np.uint64(0)
    for i in range(len(expert)):
        base_bits, folded_bits = np.uint64(base[i]), np.uint64(folded[i])
        base_bits ^= negative_flip if base_bits >> shift else positive_flip
        difference = (folded_bits >> one) ^ (all_bits if folded_bits & one else np.uint64(0))
        expert_bits = (base_bits + difference) & all_bits
        expert[i] = expert_bits ^ (positive_flip if expert_bits >> shift else negative_flip)


@kernel
def insert_plane(plane: Bytes, byte: int, folded: Words) -> None:
    """Set byte number `byte` of every word, which is 0 before."""
    shift = np.uint64(8 * byte)
    for i in range(len(folded)):
        folded[i] = np.uint64(folded[i]) | (np.uint64(plane[i]) << shift)


@kernel
def extract_plane(folded: Words, byte: int, plane: Bytes) -> None:
    """Extract byte number `byte` of every word."""
    shift = np.uint64(8 * byte)
    for i in range(len(plane)):
        plane[i] = np.uint8((np.uint64(folded[i]) >> shift) & np.uint64(0xFF))


@kernel
def count_bytes(plane: Bytes, counts: NDArray[np.int64]) -> None:
    """Add the number of occurrences of each byte to `counts`."""
    # Four counters for each byte: equal neighbours would otherwise depend on each other's store.
    partial_counts = np.zeros(4 * _SYMBOLS, np.uint32)
    for i in range(len(plane)):
        partial_counts[(np.uint64(i) & np.uint64(3)) * np.uint64(_SYMBOLS) + np.uint64(plane[i])] += np.uint32(1)
    for i in range(4 * _SYMBOLS):
        counts[i % _SYMBOLS] += np.int64(partial_counts[i])


@kernel
def count_pairs(first: Bytes, second: Bytes, counts: NDArray[np.uint32]) -> None:
    """Add the number of occurrences of each pair of bytes to `counts`, a row of 256 for each first byte."""
    for i in range(len(first)):
        counts[(np.uint64(first[i]) << np.uint64(8)) | np.uint64(second[i])] += np.uint32(1)
