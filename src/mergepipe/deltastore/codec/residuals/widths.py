"""Choose the widths of residuals, in bits, from a sample of a block.

Format: `bits` and "Widths of bands" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.entropy.rans import MAX_CONTEXTS
from mergepipe.deltastore.codec.residuals.streams import EXCEPTION_BITS, WIDTH_COUNTS
from mergepipe.deltastore.codec.tiles.element_codes import (
    EDGE_CLASSES,
    MAX_CELL_BITS,
    N_WIDTHS,
    NEAR_CELLS,
    QUANTILE_BUCKETS,
    WIDTHS_PER_CLASS,
)
from mergepipe.kernels.compilation.compiled import Bits32, Bytes, kernel

_QUANTILE_PER_MILLE = 996
_UNSEEN = 255
FIRST_STEP_COUNT = N_WIDTHS * WIDTH_COUNTS
N_SAMPLE_COUNTS = FIRST_STEP_COUNT + MAX_CONTEXTS * QUANTILE_BUCKETS
"""Counts of a sample: first of residuals in bands, by `width_index` and the bits they need (16: more than any width);
then of ordinal differences outside the bands, by context and bucket: exact up to 15, then eighths of octaves."""


@kernel
def _cheapest_width(counts: Bits32) -> np.uint8:
    """The width with the least cost in bits, counting an exception for each residual that does not fit."""
    total = np.int64(0)
    for width in range(WIDTH_COUNTS):
        total += np.int64(counts[width])
    best_width, least_cost, exceptions = 0, np.int64(-1), total
    for width in range(WIDTH_COUNTS - 1):
        exceptions -= np.int64(counts[width])
        cost = width * total + EXCEPTION_BITS * exceptions
        if least_cost < 0 or cost < least_cost:
            best_width, least_cost = width, cost
    return np.uint8(best_width)


@kernel
def _cell_bits_of(counts: Bits32) -> np.uint8:
    """The width of residuals in cells with which few cells hold nearly all differences."""
    total = np.int64(0)
    for bucket in range(QUANTILE_BUCKETS):
        total += np.int64(counts[bucket])
    needed = (total * _QUANTILE_PER_MILLE + 999) // 1000
    quantile_bucket, reached = 0, np.int64(counts[0])
    while reached < needed:
        quantile_bucket += 1
        reached += np.int64(counts[quantile_bucket])
    shift = max(quantile_bucket - 8, 0) // 8
    largest, bits = (quantile_bucket - shift * 8) << shift, 0
    while largest >> bits > NEAR_CELLS:
        bits += 1
    return np.uint8(min(bits, MAX_CELL_BITS))


@kernel
def _fill_unseen(widths: Bytes) -> None:
    """Give an edge class that the sample lacks the width of the next finer class it has, else of the coarser one."""
    for column in range(WIDTHS_PER_CLASS):
        nearest = np.uint8(0)
        for edge in range(EDGE_CLASSES):
            width = widths[edge * WIDTHS_PER_CLASS + column]
            nearest = nearest if width == _UNSEEN else width
        for edge in range(EDGE_CLASSES - 1, -1, -1):
            index = edge * WIDTHS_PER_CLASS + column
            nearest = nearest if widths[index] == _UNSEEN else widths[index]
            widths[index] = nearest


@kernel
def choose_widths(counts: Bits32, n_contexts: int, cell_bits: Bytes, widths: Bytes) -> None:
    """Choose `cell_bits` by context and `widths` of bands from the counts of a sample; tables of 256 bytes."""
    widths[:] = 0
    for index in range(N_WIDTHS):
        width_counts = counts[index * WIDTH_COUNTS : (index + 1) * WIDTH_COUNTS]
        widths[index] = _cheapest_width(width_counts) if width_counts.any() else np.uint8(_UNSEEN)
    _fill_unseen(widths)
    cell_bits[:] = 0
    for context in range(n_contexts):
        first = FIRST_STEP_COUNT + context * QUANTILE_BUCKETS
        cell_bits[context] = _cell_bits_of(counts[first : first + QUANTILE_BUCKETS])
