"""Tensor-wide reductions over raw blocks: magnitude histograms of deltas, and inner products."""

from __future__ import annotations

import numpy as np

from mergepipe.kernels.codec import TILE_ELEMENTS, decode_tile, itemsize_of
from mergepipe.kernels.compiled import Bytes, Counts, Doubles, kernel
from mergepipe.kernels.merge import take_delta

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
        decode_tile(raw, base_offset + start * itemsize_of(base_code), base_code, m, base)
        decode_tile(raw, offset + start * itemsize_of(code), code, m, model)
        take_delta(model, base, m, delta)
        for i in range(m):
            counts[(bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(COARSE_SHIFT)] += 1
        start += m


@kernel
def count_fine(
    raw: Bytes, base_offset: int, base_code: int, offset: int, code: int, n: int, first_bin: int, counts_WB: Counts
) -> None:
    """Add to `counts_WB[w, b]` how many `|delta|` have upper bits `first_bin + w` and lower 16 bits `b`, for `b > 0`.

    Deltas of 16-bit formats have few significant bits, so most of a bin sits at `b == 0`. That count is left out: it is
    the bin's total less the others, and the search for the rest stays a comparison of whole vectors.
    """
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    delta = np.empty(_TILE, np.float32)
    bits = delta.view(np.uint32)
    hits = np.empty(_TILE, np.uint8)
    width = np.uint32(counts_WB.shape[0]) << np.uint32(COARSE_SHIFT)
    low = np.uint32(first_bin) << np.uint32(COARSE_SHIFT)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        decode_tile(raw, base_offset + start * itemsize_of(base_code), base_code, m, base)
        decode_tile(raw, offset + start * itemsize_of(code), code, m, model)
        take_delta(model, base, m, delta)
        for i in range(m):
            magnitude = bits[i] & np.uint32(0x7FFFFFFF)
            hits[i] = np.uint8((magnitude - low < width) & ((magnitude & np.uint32(0xFFFF)) != np.uint32(0)))
        words = hits.view(np.uint64)
        for w in range((m + 7) // 8):
            if words[w] != np.uint64(0):
                for i in range(8 * w, min(8 * w + 8, m)):
                    if hits[i]:
                        inside = (bits[i] & np.uint32(0x7FFFFFFF)) - low
                        counts_WB[inside >> np.uint32(COARSE_SHIFT), inside & np.uint32(0xFFFF)] += 1
        start += m


@kernel
def add_inner_products(
    raw: Bytes, base_offset: int, base_code: int, offset: int, code: int, n: int, cell_elements: int, cells_C3: Doubles
) -> None:
    """Add <base, base>, <model, model>, <base, model> of each cell of `cell_elements` elements to `cells_C3` (float64).

    Cells are fixed by the element index alone and each is summed in order, so the total over cells does not depend
    on how the tensor was cut for reading. `n` elements start on a cell boundary.
    """
    base = np.empty(_TILE, np.float32)
    model = np.empty(_TILE, np.float32)
    start = 0
    while start < n:
        m = min(_TILE, n - start)
        decode_tile(raw, base_offset + start * itemsize_of(base_code), base_code, m, base)
        decode_tile(raw, offset + start * itemsize_of(code), code, m, model)
        cell = cells_C3[start // cell_elements]
        for i in range(m):
            b = np.float64(base[i])
            x = np.float64(model[i])
            cell[0] += b * b
            cell[1] += x * x
            cell[2] += b * x
        start += m
