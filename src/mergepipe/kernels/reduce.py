"""Magnitude histograms of deltas, coarse over all elements and fine in chosen bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.kernels.codec import TILE_ELEMENTS
from mergepipe.kernels.compiled import Bytes, Counts, kernel
from mergepipe.kernels.merge import decode_delta

COARSE_SHIFT = 16
COARSE_BINS = 1 << 15
FINE_BINS = 1 << 16

_TILE = TILE_ELEMENTS


@kernel
def count_magnitudes(
    raw: Bytes, base_offset: int, base_code: int, offset: int, code: int, n: int, counts: Counts
) -> None:
    """Add to `counts` (int64, COARSE_BINS) how many `|delta|` of `n` elements have which upper 15 magnitude bits.

    The bit pattern of a non-negative float32 orders as its value does, so a histogram of the bits is one of values.
    """
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    bits = delta.view(np.uint32)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        decode_delta(raw, base_offset, base_code, offset, code, start, m, base, model, delta)
        for i in range(m):
            counts[(bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT)] += 1
        start += m


@kernel
def count_fine(
    raw: Bytes,
    base_offset: int,
    base_code: int,
    offset: int,
    code: int,
    n: int,
    row_of_bin_B: NDArray[np.int16],
    counts_RB: NDArray[np.int32],
) -> None:
    """Add to `counts_RB[r, b]` how many `|delta|` have upper bits of row `r` and lower 16 bits `b > 0`.

    `row_of_bin_B` maps upper bits to a row, or to -1. Deltas of 16-bit formats have
    few significant bits, so most of a bin sits at `b == 0`: that count is left out, being the bin's total less the
    others, and the search for the rest stays a comparison of whole vectors.
    """
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    bits = delta.view(np.uint32)
    hits = np.zeros(_TILE, np.uint8)
    words = hits.view(np.uint64)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        decode_delta(raw, base_offset, base_code, offset, code, start, m, base, model, delta)
        for i in range(m):
            hits[i] = np.uint8((bits[i] & np.uint32(0xFFFF)) != np.uint32(0))
        for w in range((m + 7) // 8):
            if words[w] != np.uint64(0):
                for i in range(8 * w, min(8 * w + 8, m)):
                    if hits[i]:
                        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
                        row = row_of_bin_B[magnitude >> np.uint32(COARSE_SHIFT)]
                        if row >= 0:
                            counts_RB[row, magnitude & np.uint32(0xFFFF)] += 1
        start += m


@kernel
def move_counts(counts_B: Counts, total_B: Counts) -> None:
    """Add a histogram to another and clear it."""
    for b in range(counts_B.shape[0]):
        total_B[b] += counts_B[b]
    for b in range(counts_B.shape[0]):
        counts_B[b] = 0


@kernel
def chunk_sums(counts_B: NDArray[np.int32], sums_C: Counts) -> None:
    """Sums of equal chunks of a histogram, one for each entry of `sums_C`."""
    width = counts_B.shape[0] // sums_C.shape[0]
    for c in range(sums_C.shape[0]):
        total = 0
        for b in range(c * width, (c + 1) * width):
            total += counts_B[b]
        sums_C[c] = total
