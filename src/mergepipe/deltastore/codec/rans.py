"""Range coding of small symbols (rANS, 64 interleaved states) under a context for each element."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, kernel

Halves = NDArray[np.uint16]

PRECISION_BITS = 11
TOTAL = 1 << PRECISION_BITS
LANES = 64
LOWEST_STATE = 1 << 15
"""States are below 2**31; one that falls below this takes in a word of 16 bits."""
MAX_CONTEXTS = 16
SKIPPED = MAX_CONTEXTS
"""Context of an element that has no symbol."""


def padded(n: int) -> int:
    """Elements the coder walks over for `n`: a whole number of rounds; the added ones must be `SKIPPED`."""
    return -(-n // LANES) * LANES


@kernel
def _scale_row(counts: Counts, frequencies: Halves) -> None:
    """Counts of the symbols under one context to frequencies."""
    total, excess = np.int64(0), np.int64(-TOTAL)
    for s in range(len(counts)):
        total += counts[s]
    own = np.zeros(len(counts), np.int64)
    if total:
        for s in range(len(counts)):
            if counts[s] > 0:
                own[s] = max(counts[s] * TOTAL // total, 1)
            excess += own[s]
        while excess > 0:
            largest = own.argmax()
            less = min(excess, max(own[largest] // 2, 1))
            own[largest] -= less
            excess -= less
        own[own.argmax()] -= excess
    for s in range(len(counts)):
        frequencies[s] = own[s]


@kernel
def _scale_rows(counts: Counts, n_symbols: int, frequencies: Halves) -> None:
    for first in range(0, len(counts), n_symbols):
        _scale_row(counts[first : first + n_symbols], frequencies[first : first + n_symbols])


def scale_counts(counts_CS: Counts) -> Halves:
    """Counts of symbols by context (int64) to frequencies: rows that add up to `TOTAL`, or are all 0.

    A symbol that occurs has a frequency of at least 1.
    """
    frequencies_CS = np.empty(counts_CS.shape, np.uint16)
    own_CS = np.ascontiguousarray(counts_CS)
    _scale_rows(own_CS.reshape(-1), own_CS.shape[1], frequencies_CS.reshape(-1))
    return frequencies_CS


def are_frequencies(frequencies_CS: Halves) -> bool:
    """Whether every row adds up to `TOTAL` or is all 0."""
    sums_C = frequencies_CS.astype(np.int64).sum(axis=1)
    return bool(((sums_C == TOTAL) | (sums_C == 0)).all())


@kernel
def _fill_divisors(frequencies: Halves, n_symbols: int, divisors: Bits64) -> None:
    """What stands in for a division by each frequency; the row of `SKIPPED` leaves states alone.

    From the lowest bit: 32 bits of reciprocal, 12 of frequency, 12 of what is added to a state, the shift after the
    product. Exact for states below 2**31. Source: Alverson 1991, "Integer Division Using Reciprocals".
    """
    for row in range(SKIPPED + 1):
        start = np.uint64(0)
        for s in range(n_symbols):
            slot = row * n_symbols + s
            frequency = np.uint64(frequencies[slot]) if slot < len(frequencies) else np.uint64(0)
            frequency = np.uint64(TOTAL) if row == SKIPPED else frequency
            if frequency == np.uint64(0):
                continue
            bits, reciprocal, added = np.uint64(1), np.uint64(0xFFFFFFFF), start + np.uint64(TOTAL - 1)
            if frequency > np.uint64(1):  # the reciprocal of 1 has 33 bits: its quotient is one less, and made good
                while frequency > np.uint64(1) << bits:
                    bits += np.uint64(1)
                unit = np.uint64(1) << (bits + np.uint64(31))
                reciprocal, added = (unit + frequency - np.uint64(1)) // frequency, start
            upper = frequency | (added << np.uint64(12)) | ((bits - np.uint64(1)) << np.uint64(24))
            divisors[slot] = reciprocal | (upper << np.uint64(32))
            start += frequency


@kernel
def _push_round(divisors: Bits64, states: Bits32, given: Halves, is_given: Bytes) -> None:
    """Push one symbol on each state; first it gives off a word where it would become too large."""
    low, bits12 = np.uint64(0xFFFFFFFF), np.uint64(0xFFF)
    for lane in range(LANES):
        divisor, state = divisors[lane], np.uint64(states[lane])
        frequency = (divisor >> np.uint64(32)) & bits12
        is_full = state >= frequency << np.uint64(31 - PRECISION_BITS)
        given[lane] = np.uint16(state & np.uint64(0xFFFF))
        is_given[lane] = np.uint8(is_full)
        state = state >> np.uint64(16) if is_full else state
        quotient = ((state * (divisor & low)) >> np.uint64(32)) >> (divisor >> np.uint64(56))
        added = (divisor >> np.uint64(44)) & bits12
        states[lane] = np.uint32(state + added + quotient * (np.uint64(TOTAL) - frequency))


@kernel
def encode_symbols(
    symbols: Bytes, contexts: Bytes, n: int, frequencies: Halves, n_symbols: int, words: Halves, states: Bits32
) -> int:
    """Encode from the last element to the first; `words` (at least `n + 1` long) is filled from its end.

    `n` is padded. Returns the index of the first word; `states` (`LANES`) are what a decoder starts with.
    """
    table = np.zeros((SKIPPED + 1) * n_symbols, np.uint64)
    _fill_divisors(frequencies, n_symbols, table)
    divisors, given, is_given = np.empty(LANES, np.uint64), np.empty(LANES, np.uint16), np.empty(LANES, np.uint8)
    states[:] = LOWEST_STATE
    at = np.uint64(len(words) - 1)
    for i in range(n - LANES, -1, -LANES):
        own_contexts, own_symbols = contexts[i : i + LANES], symbols[i : i + LANES]
        for lane in range(LANES):
            slot = np.uint64(own_contexts[lane]) * np.uint64(n_symbols) + np.uint64(own_symbols[lane])
            divisors[lane] = table[slot]
        _push_round(divisors, states, given, is_given)
        for lane in range(LANES - 1, -1, -1):
            words[at] = given[lane]  # overwritten unless it is given off
            at -= np.uint64(is_given[lane])
    return int(at) + 1


@kernel
def fill_row(frequencies: Bits32, row: Bits32) -> None:
    """Fill the `TOTAL` entries of one context: frequency << 20, offset inside the symbol << 8, symbol.

    Frequencies add up to `TOTAL`, or are all 0: then every entry says symbol 0, and leaves a state as it is.
    """
    slot = 0
    for s in range(len(frequencies)):
        frequency = frequencies[s]
        own = row[slot : slot + np.int64(frequency)]
        for offset in range(len(own)):
            own[offset] = (frequency << np.uint32(20)) | (np.uint32(offset) << np.uint32(8)) | np.uint32(s)
        slot += len(own)
    for offset in range(slot, TOTAL):
        row[offset] = np.uint32(TOTAL << 20) | (np.uint32(offset) << np.uint32(8))


@kernel
def fill_starts(frequencies: Bits32, context: int, starts: Bits32) -> None:
    """By symbol and context (16): what `fill_row` says as start << 20, frequency << 8, symbol."""
    start = np.uint32(0)
    for s in range(len(frequencies)):
        starts[s * MAX_CONTEXTS + context] = (start << np.uint32(20)) | (frequencies[s] << np.uint32(8)) | np.uint32(s)
        start += frequencies[s]
    if start == np.uint32(0):
        starts[context] = np.uint32(TOTAL << 8)
        for s in range(1, len(frequencies)):
            starts[s * MAX_CONTEXTS + context] = np.uint32(TOTAL << 20)


@kernel
def fill_skipped(table: Bits32) -> None:
    """Fill the row of `SKIPPED`, which leaves a state as it is."""
    for offset in range(TOTAL):
        table[SKIPPED * TOTAL + offset] = np.uint32(TOTAL << 20) | (np.uint32(offset) << np.uint32(8))


@kernel
def fill_table(frequencies: Halves, n_symbols: int, table: Bits32) -> None:
    """Fill `TOTAL` entries a context, and those of `SKIPPED`."""
    for row in range(len(frequencies) // n_symbols):
        own = frequencies[row * n_symbols : (row + 1) * n_symbols].astype(np.uint32)
        fill_row(own, table[row * TOTAL : (row + 1) * TOTAL])
    fill_skipped(table)


@kernel
def decode_symbols(
    stored: Bytes, first: int, states: Bits32, contexts: Bytes, n: int, table: Bits32, symbols: Bytes
) -> int:
    """Decode `n` (padded) elements; a skipped one gets symbol 0. Returns the words taken; `states` become what is left.

    Words begin at byte `first` of `stored`, where there is room for `n + 1`: no more than one is taken for an element,
    so that nothing outside of it is read, whatever it holds. Contexts are at most `SKIPPED`.
    """
    mask, lowest = np.uint32(TOTAL - 1), np.uint32(LOWEST_STATE)
    shift, row_bits = np.uint32(16), np.uint32(PRECISION_BITS)
    at = np.uint64(first)
    for i in range(0, n, LANES):
        for lane in range(LANES):
            j = np.uint64(i + lane)
            state = states[lane]
            entry = table[(np.uint64(contexts[j]) << np.uint64(PRECISION_BITS)) + np.uint64(state & mask)]
            symbols[j] = np.uint8(entry)
            offset = (entry >> np.uint32(8)) & np.uint32(0xFFF)
            state = np.uint32((entry >> np.uint32(20)) * (state >> row_bits) + offset)
            is_low = state < lowest
            word = np.uint32(stored[at]) | (np.uint32(stored[at + np.uint64(1)]) << np.uint32(8))
            states[lane] = np.uint32((state << shift) | word) if is_low else state
            at += np.uint64(is_low) << np.uint64(1)
    return (int(at) - first) // 2
