"""Count magnitude histograms of deltas: coarse over all elements, fine within selected bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.kernels.codec import TILE_ELEMENTS
from mergepipe.kernels.compilation.compiled import Bits32, Bytes, Counts, Floats, kernel
from mergepipe.kernels.merge import decode_delta

COARSE_SHIFT = 16
COARSE_BINS = 1 << 15
FINE_BINS = 1 << 16

_TILE = TILE_ELEMENTS


@kernel
def count_magnitudes(
    raw: Bytes, base_offset: int, base_code: int, offset: int, code: int, n: int, counts: Counts
) -> None:
    """Add to `counts` (int64, COARSE_BINS) the number of deltas by their upper 15 magnitude bits.

    The bit pattern of a non-negative float32 orders as its value does, so a histogram of bits is one of values.
    """
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    bits = delta.view(np.uint32)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        decode_delta(raw, base_offset, base_code, offset, code, start, m, base, model, delta)
        count_bits(bits, m, counts)
        start += m


@kernel
def count_bits(bits: Bits32, n: int, counts: Counts) -> None:
    """Add to `counts` (COARSE_BINS) the number of float32 bit patterns by their upper 15 magnitude bits."""
    for i in range(n):
        counts[(bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT)] += 1


@kernel
def count_fine(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    offset: int,
    code: int,
    n: int,
    bin_R: Bits32,
    row_of_bin_B: NDArray[np.int16],
    counts_RB: NDArray[np.int32],
) -> None:
    """Add to `counts_RB[r, b]` the number of `|delta|` with the upper bits of row `r` and lower 16 bits `b > 0`.

    `bin_R` lists the upper bits of the rows, `row_of_bin_B` maps them to a row, or to -1. Deltas of 16-bit formats have
    few significant bits, so most of a bin has `b == 0`: that count is omitted, as it is the bin's total minus the
    others, and the search for the rest vectorises.
    """
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    bits = delta.view(np.uint32)
    hits_2N = np.zeros((2, _TILE), np.uint8)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        decode_delta(raw, base_offset, base_code, offset, code, start, m, base, model, delta)
        count_fine_bits(bits, m, hits_2N, bin_R, row_of_bin_B, counts_RB)
        start += m


@kernel
def count_fine_bits(
    bits: Bits32,
    n: int,
    hits_2N: Bytes,
    bin_R: Bits32,
    row_of_bin_B: NDArray[np.int16],
    counts_RB: NDArray[np.int32],
) -> None:
    """Count like `count_fine`, for `n` bit patterns, at most a tile; `hits_2N` (uint8, two rows) is a work array."""
    hits = hits_2N[0]
    words = hits.view(np.uint64)
    for i in range(n):
        hits[i] = np.uint8((bits[i] & np.uint32(0xFFFF)) != np.uint32(0))
    dense = 0
    for w in range((n + 7) // 8):
        dense += 1 if words[w] != np.uint64(0) else 0
    if dense > n // 16:  # full-precision values: restrict the search to the watched bins
        _clear_unwatched(bits, n, hits, hits_2N[1], bin_R)
    for w in range((n + 7) // 8):
        if words[w] != np.uint64(0):
            for i in range(8 * w, min(8 * w + 8, n)):
                if hits[i]:
                    magnitude = bits[i] & np.uint32(0x7FFFFFFF)
                    row = row_of_bin_B[magnitude >> np.uint32(COARSE_SHIFT)]
                    if row >= 0:
                        counts_RB[row, magnitude & np.uint32(0xFFFF)] += 1


@kernel
def _clear_unwatched(bits: Bits32, n: int, hits: Bytes, watched: Bytes, bin_R: Bits32) -> None:
    """Clear the hits outside the watched bins."""
    for i in range(n):
        watched[i] = np.uint8(0)
    for r in range(bin_R.shape[0]):
        watched_bin = bin_R[r]
        for i in range(n):
            watched[i] |= np.uint8((bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT) == watched_bin)
    for i in range(n):
        hits[i] &= watched[i]


@kernel
def count_fine_scores(
    scores_N: Floats, bin_R: Bits32, row_of_bin_B: NDArray[np.int16], counts_RB: NDArray[np.int32]
) -> None:
    """Count like `count_fine`, for scores that are not negative."""
    bits = scores_N.view(np.uint32)
    hits_2N = np.zeros((2, _TILE), np.uint8)
    for start in range(0, len(bits), _TILE):
        m = min(_TILE, len(bits) - start)
        count_fine_bits(bits[start : start + m], m, hits_2N, bin_R, row_of_bin_B, counts_RB)


@kernel
def move_counts(counts_B: Counts, total_B: Counts) -> None:
    """Add a histogram to another and clear it."""
    for b in range(counts_B.shape[0]):
        total_B[b] += counts_B[b]
    for b in range(counts_B.shape[0]):
        counts_B[b] = 0


@kernel
def chunk_sums(counts_B: NDArray[np.int32], sums_C: Counts) -> None:
    """Sum equal chunks of a histogram, one for each entry of `sums_C`."""
    width = counts_B.shape[0] // sums_C.shape[0]
    for c in range(sums_C.shape[0]):
        total = 0
        for b in range(c * width, (c + 1) * width):
            total += counts_B[b]
        sums_C[c] = total
