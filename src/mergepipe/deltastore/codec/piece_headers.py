"""Read the parts of a piece that precede its symbols and residuals, in compiled code that checks everything it reads.

Format: the table of pieces in "BANDS", docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from mergepipe.deltastore.codec.element_codes import (
    BODY_SYMBOLS,
    CHUNK_ELEMENTS,
    EDGE_CLASSES,
    MAX_CELL_BITS,
    N_CODES,
    WIDTHS_PER_CLASS,
)
from mergepipe.deltastore.codec.rans import LANES, MAX_CONTEXTS, TOTAL, Bits16, fill_decode_row
from mergepipe.deltastore.codec.vector_symbols import BODY_ROW, fill_starts
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, Floats, kernel

NO_WIDTH_INDEX = 255
"""An index of width tables that has width 0."""
_STATE_BYTES = LANES * 4


class Fault(IntEnum):
    """A contradiction to the format, reported with the numbers found and needed."""

    NONE = 0
    TOO_SHORT = 1
    CONTEXTS = 2
    EXPONENTS = 3
    FREQUENCIES = 4
    WORDS = 5
    SYMBOLS_END = 6
    CELL_BITS = 7
    EXCEPTION_POSITION = 8
    RESIDUALS = 9
    RESIDUALS_END = 10
    ODD_WORDS = 11


MESSAGES = {
    Fault.TOO_SHORT: "{needed} bytes are needed, {found} are left",
    Fault.CONTEXTS: f"{{found}} contexts; 1 to {MAX_CONTEXTS} are possible",
    Fault.EXPONENTS: "the exponents of the contexts are not descending to 0",
    Fault.FREQUENCIES: f"frequencies of symbols do not add up to {TOTAL}",
    Fault.WORDS: "{found} words of coded symbols where there can be 0 to {needed}",
    Fault.SYMBOLS_END: "coded symbols do not end where they should",
    Fault.CELL_BITS: "cells of 2**{found} values; at most 2**{needed} are possible",
    Fault.EXCEPTION_POSITION: "an exception past the {needed} elements of the block",
    Fault.RESIDUALS: "{found} bytes of residuals for {needed} elements",
    Fault.RESIDUALS_END: "residuals do not end where they should",
    Fault.ODD_WORDS: "{found} bytes are left, not a multiple of {needed}",
}

_TOO_SHORT, _CONTEXTS, _EXPONENTS = int(Fault.TOO_SHORT), int(Fault.CONTEXTS), int(Fault.EXPONENTS)
_FREQUENCIES, _WORDS, _ODD_WORDS = int(Fault.FREQUENCIES), int(Fault.WORDS), int(Fault.ODD_WORDS)
_CELL_BITS, _EXCEPTION_POSITION = int(Fault.CELL_BITS), int(Fault.EXCEPTION_POSITION)
_RESIDUALS = int(Fault.RESIDUALS)

# Fields of a cursor: position and end of one piece, its first fault and the two numbers of the message.
CURSOR_FIELDS = 5
POSITION, END, FAULT, FOUND, NEEDED = range(CURSOR_FIELDS)


@kernel
def set_fault(cursor: Counts, fault: int, actual: int, needed: int) -> None:
    """Record a fault, unless one was recorded before."""
    if cursor[FAULT] == 0:
        cursor[FAULT], cursor[FOUND], cursor[NEEDED] = fault, actual, needed


@kernel
def has_bytes(cursor: Counts, nbytes: int) -> bool:
    """Whether `nbytes` bytes are left and no fault is recorded; too few are a fault."""
    left = cursor[END] - cursor[POSITION]
    if left < nbytes:
        set_fault(cursor, _TOO_SHORT, left, nbytes)
    return bool(cursor[FAULT] == 0)


@kernel
def read_u16(stored: Bytes, offset: int) -> np.uint16:
    """Read 16 bits at any byte offset."""
    byte = np.uint64(offset)
    return np.uint16(np.uint16(stored[byte]) | np.uint16(np.uint16(stored[byte + np.uint64(1)]) << np.uint16(8)))


@kernel
def read_u32(stored: Bytes, offset: int) -> np.uint32:
    """Read 32 bits at any byte offset."""
    return np.uint32(read_u16(stored, offset)) | np.uint32(np.uint32(read_u16(stored, offset + 2)) << np.uint32(16))


@kernel
def read_contexts(stored: Bytes, cursor: Counts, lows: Bytes) -> int:
    """Read the contexts' lowest exponents into `lows` (uint8, at least 16); return their number, 0 on a fault."""
    if not has_bytes(cursor, 1):
        return 0
    count = int(stored[cursor[POSITION]])
    if not 1 <= count <= MAX_CONTEXTS:
        set_fault(cursor, _CONTEXTS, count, MAX_CONTEXTS)
        return 0
    cursor[POSITION] += 1
    if not has_bytes(cursor, count):
        return 0
    above = np.int64(256)
    for c in range(count):
        lows[c] = stored[cursor[POSITION] + c]
        if np.int64(lows[c]) >= above:
            set_fault(cursor, _EXPONENTS, 0, 0)
        above = np.int64(lows[c])
    if above != 0:
        set_fault(cursor, _EXPONENTS, 0, 0)
    cursor[POSITION] += count
    return count if cursor[FAULT] == 0 else 0


@kernel
def read_centroids(stored: Bytes, cursor: Counts, n_contexts: int, first: int, stop: int, centroids: Floats) -> None:
    """Read the centroids of the codes from `first` to below `stop` into `centroids`, by context and code."""
    if not has_bytes(cursor, n_contexts * (stop - first) * 4):
        return
    bits = centroids.view(np.uint32)
    for c in range(n_contexts):
        for code in range(first, stop):
            bits[c * N_CODES + code] = read_u32(stored, cursor[POSITION])
            cursor[POSITION] += 4


@kernel
def read_frequencies(
    stored: Bytes, cursor: Counts, n_contexts: int, n_symbols: int, is_vector: bool, table: Bits32, starts: Bits16
) -> None:
    """Read the frequencies of one stage: into `starts` for the vector decoder, else into a table of all slots."""
    if not has_bytes(cursor, n_contexts * n_symbols * 2):
        return
    row = np.empty(n_symbols, np.uint32)
    for c in range(n_contexts):
        total = 0
        for s in range(n_symbols):
            row[s] = read_u16(stored, cursor[POSITION])
            total += int(row[s])
            cursor[POSITION] += 2
        if total != 0 and total != TOTAL:
            set_fault(cursor, _FREQUENCIES, total, TOTAL)
            return
        if is_vector:
            fill_starts(row, c, BODY_ROW if n_symbols == BODY_SYMBOLS else 0, starts)
        else:
            fill_decode_row(row, table[c * TOTAL : (c + 1) * TOTAL])


@kernel
def read_states(stored: Bytes, cursor: Counts, n_padded: int, states: Bits32) -> int:
    """Read the coder's states; return the number of words, which fill the rest of the piece."""
    left = cursor[END] - cursor[POSITION]
    n_words = (left - _STATE_BYTES) // 2
    if left % 2:
        set_fault(cursor, _ODD_WORDS, left, 2)
    elif not 0 <= n_words <= n_padded:
        set_fault(cursor, _WORDS, n_words, n_padded)
    if cursor[FAULT] != 0:
        return 0
    for lane in range(LANES):
        states[lane] = read_u32(stored, cursor[POSITION] + 4 * lane)
    cursor[POSITION] += _STATE_BYTES
    return int(n_words)


@kernel
def read_cell_bits(stored: Bytes, cursor: Counts, n_contexts: int, cell_bits: Bytes) -> None:
    """Read the widths of residuals in cells, by context."""
    if not has_bytes(cursor, n_contexts):
        return
    for c in range(n_contexts):
        cell_bits[c] = stored[cursor[POSITION] + c]
        if cell_bits[c] > MAX_CELL_BITS:
            set_fault(cursor, _CELL_BITS, int(cell_bits[c]), MAX_CELL_BITS)
    cursor[POSITION] += n_contexts


@kernel
def read_widths(stored: Bytes, cursor: Counts, first: int, stop: int, widths: Bytes) -> int:
    """Read the widths of residuals for the codes from `first` to below `stop`; return the largest.

    Half a byte each, stored to `widths` by `width_index`.
    """
    n = stop - first
    if not has_bytes(cursor, EDGE_CLASSES * n // 2):
        return 0
    largest = 0
    for i in range(EDGE_CLASSES * n):
        width = (stored[cursor[POSITION] + i // 2] >> np.uint8(4 * (i % 2))) & np.uint8(15)
        widths[i // n * WIDTHS_PER_CLASS + first - 1 + i % n] = width
        largest = max(largest, int(width))
    cursor[POSITION] += EDGE_CLASSES * n // 2
    return largest


@kernel
def n_chunks_in(n: int) -> int:
    """The number of chunks that a block of `n` elements has for its exceptions."""
    return (n + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS


@kernel
def exception_positions(stored: Bytes, first: int, n: int) -> Counts:
    """Read the positions, in a block of `n` elements, of the exceptions stored from byte `first` on.

    The parts are: their number by chunk, all positions within chunks, all bits.
    """
    n_chunks, total = n_chunks_in(n), 0
    for chunk in range(n_chunks):
        total += int(read_u32(stored, first + 4 * chunk))
    positions = np.empty(total, np.int64)
    index = 0
    for chunk in range(n_chunks):
        for _ in range(int(read_u32(stored, first + 4 * chunk))):
            positions[index] = chunk * CHUNK_ELEMENTS + int(read_u16(stored, first + 4 * n_chunks + 2 * index))
            index += 1
    return positions


@kernel
def read_exceptions(stored: Bytes, cursor: Counts, n: int) -> int:
    """Check the exceptions and the length of the residuals after them; return how many exceptions there are.

    Without a fault, `exception_positions` can be called for them.
    """
    first, n_chunks, total = cursor[POSITION], n_chunks_in(n), 0
    if not has_bytes(cursor, 4 * n_chunks):
        return 0
    for chunk in range(n_chunks):
        total += int(read_u32(stored, first + 4 * chunk))
    cursor[POSITION] += 4 * n_chunks
    if not has_bytes(cursor, total * 4):
        return 0
    if (exception_positions(stored, first, n) >= n).any():
        set_fault(cursor, _EXCEPTION_POSITION, 0, n)
    cursor[POSITION] += total * 4
    if cursor[END] - cursor[POSITION] > 2 * n:
        set_fault(cursor, _RESIDUALS, cursor[END] - cursor[POSITION], n)
    return total if cursor[FAULT] == 0 else 0
