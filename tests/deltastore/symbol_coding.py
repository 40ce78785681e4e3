"""For the tests of the coder of symbols: frequencies and decode tables as arrays by context and symbol."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.rans import SKIPPED, TOTAL, fill_decode_row, fill_skipped_row, scale_rows
from mergepipe.kernels.compiled import Counts


def scaled(counts_CS: Counts) -> NDArray[np.uint16]:
    """Scale counts by context and symbol to frequencies."""
    frequencies_CS = np.empty(counts_CS.shape, np.uint16)
    scale_rows(np.ascontiguousarray(counts_CS).reshape(-1), counts_CS.shape[1], frequencies_CS.reshape(-1))
    return frequencies_CS


def decode_table(frequencies_CS: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Make the table of all contexts, and of skipped elements."""
    table = np.zeros((SKIPPED + 1) * TOTAL, np.uint32)
    for context, row_S in enumerate(frequencies_CS.astype(np.uint32)):
        fill_decode_row(row_S, table[context * TOTAL : (context + 1) * TOTAL])
    fill_skipped_row(table)
    return table
