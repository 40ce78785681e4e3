"""Chooses, from a sample of a block, in how many bits fine numbers are stored."""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.rans import MAX_CONTEXTS
from mergepipe.deltastore.codec.residual_streams import EXCEPTION_BITS, WIDTH_COUNTS
from mergepipe.deltastore.codec.symbols import (
    EDGE_CLASSES,
    EDGE_WIDTHS,
    MAX_LOW,
    N_WIDTHS,
    NEAR_CELLS,
    QUANTILE_BUCKETS,
)
from mergepipe.kernels.compiled import Bits32, Bytes, kernel

_QUANTILE_PER_MILLE = 996
_UNSEEN = 255
FIRST_STEP_COUNT = N_WIDTHS * WIDTH_COUNTS
N_SAMPLE_COUNTS = FIRST_STEP_COUNT + MAX_CONTEXTS * QUANTILE_BUCKETS
"""Counts of a sample: of the bits that fine numbers of bands need (16 where none will do), by width; then, by context,
of how far elements outside the bands are from their base, by bucket: exact up to 15, then eighths of octaves."""


@kernel
def _cheapest_width(counts: Bits32) -> np.uint8:
    """The bits that cost least, with exceptions for what does not fit."""
    total = np.int64(0)
    for width in range(WIDTH_COUNTS):
        total += np.int64(counts[width])
    best, least, beyond = 0, np.int64(-1), total
    for width in range(WIDTH_COUNTS - 1):
        beyond -= np.int64(counts[width])
        cost = width * total + EXCEPTION_BITS * beyond
        if least < 0 or cost < least:
            best, least = width, cost
    return np.uint8(best)


@kernel
def _low_bits(counts: Bits32) -> np.uint8:
    """Bits of a difference that are left to the fine number, so that few cells hold nearly all."""
    total = np.int64(0)
    for bucket in range(QUANTILE_BUCKETS):
        total += np.int64(counts[bucket])
    wanted = (total * _QUANTILE_PER_MILLE + 999) // 1000
    passed, reached = 0, np.int64(counts[0])
    while reached < wanted:
        passed += 1
        reached += np.int64(counts[passed])
    shift = max(passed - 8, 0) // 8
    largest, low = (passed - shift * 8) << shift, 0
    while largest >> low > NEAR_CELLS:
        low += 1
    return np.uint8(min(low, MAX_LOW))


@kernel
def _fill_unseen(widths: Bytes) -> None:
    """A class that the sample has not gets the width of the next finer one that it has, else of the coarser one."""
    for column in range(EDGE_WIDTHS):
        nearest = np.uint8(0)
        for edge in range(EDGE_CLASSES):
            width = widths[edge * EDGE_WIDTHS + column]
            nearest = nearest if width == _UNSEEN else width
        for edge in range(EDGE_CLASSES - 1, -1, -1):
            index = edge * EDGE_WIDTHS + column
            nearest = nearest if widths[index] == _UNSEEN else widths[index]
            widths[index] = nearest


@kernel
def choose_widths(counts: Bits32, n_contexts: int, low_bits: Bytes, widths: Bytes) -> None:
    """From the counts of a sample: `low_bits` of cells by context, `widths` of bands; tables of 256 bytes."""
    widths[:] = 0
    for index in range(N_WIDTHS):
        own = counts[index * WIDTH_COUNTS : (index + 1) * WIDTH_COUNTS]
        widths[index] = _cheapest_width(own) if own.any() else np.uint8(_UNSEEN)
    _fill_unseen(widths)
    low_bits[:] = 0
    for context in range(n_contexts):
        first = FIRST_STEP_COUNT + context * QUANTILE_BUCKETS
        low_bits[context] = _low_bits(counts[first : first + QUANTILE_BUCKETS])
