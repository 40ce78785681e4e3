"""What the pieces of a block say before their symbols and numbers, taken apart by compiled code that trusts nothing."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from mergepipe.deltastore.codec.rans import LANES, MAX_CONTEXTS, TOTAL, fill_row, fill_starts
from mergepipe.deltastore.codec.residual_streams import CHUNK_ELEMENTS
from mergepipe.deltastore.codec.symbols import EDGE_CLASSES, EDGE_WIDTHS, MAX_LOW, N_CODES
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, Floats, kernel

NO_SLOT = 255
"""Where a table of widths has 0."""
_STATE_BYTES = LANES * 4


class Fault(IntEnum):
    """What contradicts the format; reported with two numbers: found and needed."""

    NONE = 0
    TOO_SHORT = 1
    CONTEXTS = 2
    EXPONENTS = 3
    FREQUENCIES = 4
    WORDS = 5
    SYMBOLS_END = 6
    CELLS = 7
    EXCEPTION_PLACE = 8
    NUMBERS = 9
    NUMBERS_END = 10
    ODD_WORDS = 11


MESSAGES = {
    Fault.TOO_SHORT: "a part of {needed} bytes is needed, {found} are left",
    Fault.CONTEXTS: f"{{found}} contexts; 1 to {MAX_CONTEXTS} are possible",
    Fault.EXPONENTS: "the contexts do not divide the exponents",
    Fault.FREQUENCIES: f"frequencies of symbols do not add up to {TOTAL}",
    Fault.WORDS: "{found} words of coded symbols where there can be 0 to {needed}",
    Fault.SYMBOLS_END: "coded symbols do not end where they should",
    Fault.CELLS: "cells of 2**{found} values",
    Fault.EXCEPTION_PLACE: "an exception past the {needed} elements of the block",
    Fault.NUMBERS: "{found} bytes of fine numbers for {needed} elements",
    Fault.NUMBERS_END: "fine numbers do not end where they should",
    Fault.ODD_WORDS: "{found} bytes are left, not a multiple of {needed}",
}

_TOO_SHORT, _CONTEXTS, _EXPONENTS = int(Fault.TOO_SHORT), int(Fault.CONTEXTS), int(Fault.EXPONENTS)
_FREQUENCIES, _WORDS, _ODD_WORDS = int(Fault.FREQUENCIES), int(Fault.WORDS), int(Fault.ODD_WORDS)
_CELLS, _EXCEPTION_PLACE = int(Fault.CELLS), int(Fault.EXCEPTION_PLACE)
_NUMBERS = int(Fault.NUMBERS)

# A cursor is where one piece is read, where it ends, and its first fault with the two numbers of the message.
CURSOR_FIELDS = 5
AT, STOP, FAULT, FOUND, NEEDED = range(CURSOR_FIELDS)


@kernel
def fail(cursor: Counts, fault: int, found: int, needed: int) -> None:
    """Report a fault, unless there was one before."""
    if cursor[FAULT] == 0:
        cursor[FAULT], cursor[FOUND], cursor[NEEDED] = fault, found, needed


@kernel
def has_left(cursor: Counts, nbytes: int) -> bool:
    """Whether there are so many bytes, and no fault; too few are one."""
    left = cursor[STOP] - cursor[AT]
    if left < nbytes:
        fail(cursor, _TOO_SHORT, left, nbytes)
    return bool(cursor[FAULT] == 0)


@kernel
def half_at(stored: Bytes, at: int) -> np.uint16:
    """16 bits, wherever they are."""
    place = np.uint64(at)
    return np.uint16(np.uint16(stored[place]) | np.uint16(np.uint16(stored[place + np.uint64(1)]) << np.uint16(8)))


@kernel
def word_at(stored: Bytes, at: int) -> np.uint32:
    """32 bits, wherever they are."""
    return np.uint32(half_at(stored, at)) | np.uint32(np.uint32(half_at(stored, at + 2)) << np.uint32(16))


@kernel
def take_contexts(stored: Bytes, cursor: Counts, lows: Bytes) -> int:
    """The number of contexts, 0 where there is a fault; `lows` (uint8, at least 16) are the exponents they begin at."""
    if not has_left(cursor, 1):
        return 0
    count = int(stored[cursor[AT]])
    if not 1 <= count <= MAX_CONTEXTS:
        fail(cursor, _CONTEXTS, count, MAX_CONTEXTS)
        return 0
    cursor[AT] += 1
    if not has_left(cursor, count):
        return 0
    above = np.int64(256)
    for c in range(count):
        lows[c] = stored[cursor[AT] + c]
        if np.int64(lows[c]) >= above:
            fail(cursor, _EXPONENTS, 0, 0)
        above = np.int64(lows[c])
    if above != 0:
        fail(cursor, _EXPONENTS, 0, 0)
    cursor[AT] += count
    return count if cursor[FAULT] == 0 else 0


@kernel
def take_centroids(stored: Bytes, cursor: Counts, n_contexts: int, first: int, stop: int, centroids: Floats) -> None:
    """Centroids of the codes from `first` to `stop`, put in their places by context and code."""
    if not has_left(cursor, n_contexts * (stop - first) * 4):
        return
    bits = centroids.view(np.uint32)
    for c in range(n_contexts):
        for code in range(first, stop):
            bits[c * N_CODES + code] = word_at(stored, cursor[AT])
            cursor[AT] += 4


@kernel
def take_frequencies(
    stored: Bytes, cursor: Counts, n_contexts: int, n_symbols: int, by_starts: bool, table: Bits32
) -> None:
    """The frequencies of one stage, as a table to decode with: of all slots, or of where symbols start."""
    if not has_left(cursor, n_contexts * n_symbols * 2):
        return
    row = np.empty(n_symbols, np.uint32)
    for c in range(n_contexts):
        total = 0
        for s in range(n_symbols):
            row[s] = half_at(stored, cursor[AT])
            total += int(row[s])
            cursor[AT] += 2
        if total != 0 and total != TOTAL:
            fail(cursor, _FREQUENCIES, total, TOTAL)
            return
        if by_starts:
            fill_starts(row, c, table)
        else:
            fill_row(row, table[c * TOTAL : (c + 1) * TOTAL])


@kernel
def take_states(stored: Bytes, cursor: Counts, n_padded: int, states: Bits32) -> int:
    """The coder's states; returns how many words follow, which is all that is left of the piece."""
    left = cursor[STOP] - cursor[AT]
    n_words = (left - _STATE_BYTES) // 2
    if left % 2:
        fail(cursor, _ODD_WORDS, left, 2)
    elif not 0 <= n_words <= n_padded:
        fail(cursor, _WORDS, n_words, n_padded)
    if cursor[FAULT] != 0:
        return 0
    for lane in range(LANES):
        states[lane] = word_at(stored, cursor[AT] + 4 * lane)
    cursor[AT] += _STATE_BYTES
    return int(n_words)


@kernel
def take_low_bits(stored: Bytes, cursor: Counts, n_contexts: int, low_bits: Bytes) -> None:
    """Bits of a difference that cells leave to the fine number, by context."""
    if not has_left(cursor, n_contexts):
        return
    for c in range(n_contexts):
        low_bits[c] = stored[cursor[AT] + c]
        if low_bits[c] > MAX_LOW:
            fail(cursor, _CELLS, int(low_bits[c]), MAX_LOW)
    cursor[AT] += n_contexts


@kernel
def take_widths(stored: Bytes, cursor: Counts, first: int, stop: int, widths: Bytes) -> int:
    """Widths of the fine numbers of the bands' codes from `first` to `stop`, put in their places. Returns the largest.

    Half a byte each, by `width_slot`.
    """
    n = stop - first
    if not has_left(cursor, EDGE_CLASSES * n // 2):
        return 0
    most = 0
    for i in range(EDGE_CLASSES * n):
        width = (stored[cursor[AT] + i // 2] >> np.uint8(4 * (i % 2))) & np.uint8(15)
        widths[i // n * EDGE_WIDTHS + first - 1 + i % n] = width
        most = max(most, int(width))
    cursor[AT] += EDGE_CLASSES * n // 2
    return most


@kernel
def n_chunks_of(n: int) -> int:
    """Into how many chunks a block of `n` elements is cut for its exceptions."""
    return (n + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS


@kernel
def exception_places(stored: Bytes, first: int, n: int) -> Counts:
    """Where in a block of `n` elements the exceptions are that are described from byte `first` on.

    By chunk of the block how many there are, then all places in their chunks, then all bits.
    """
    n_chunks, total = n_chunks_of(n), 0
    for chunk in range(n_chunks):
        total += int(word_at(stored, first + 4 * chunk))
    places = np.empty(total, np.int64)
    at = 0
    for chunk in range(n_chunks):
        for _ in range(int(word_at(stored, first + 4 * chunk))):
            places[at] = chunk * CHUNK_ELEMENTS + int(half_at(stored, first + 4 * n_chunks + 2 * at))
            at += 1
    return places


@kernel
def take_exceptions(stored: Bytes, cursor: Counts, n: int) -> int:
    """How many exceptions there are; `exception_places` can be asked where, if there is no fault."""
    first, n_chunks, total = cursor[AT], n_chunks_of(n), 0
    if not has_left(cursor, 4 * n_chunks):
        return 0
    for chunk in range(n_chunks):
        total += int(word_at(stored, first + 4 * chunk))
    cursor[AT] += 4 * n_chunks
    if not has_left(cursor, total * 4):
        return 0
    if (exception_places(stored, first, n) >= n).any():
        fail(cursor, _EXCEPTION_PLACE, 0, n)
    cursor[AT] += total * 4
    if cursor[STOP] - cursor[AT] > 2 * n:
        fail(cursor, _NUMBERS, cursor[STOP] - cursor[AT], n)
    return total if cursor[FAULT] == 0 else 0
