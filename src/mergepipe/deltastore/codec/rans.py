"""Entropy-code small symbols with rANS: 64 interleaved states, frequencies by context."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, kernel

# Format: "Coded symbols" in docs/internals/formats/delta-store.md.


Bits16 = NDArray[np.uint16]

PRECISION_BITS = 11
TOTAL = 1 << PRECISION_BITS
LANES = 64
LOWEST_STATE = 1 << 15
"""States are below 2**31; a decoder state that falls below this is refilled with a word of 16 bits."""
MAX_CONTEXTS = 16
SKIPPED = MAX_CONTEXTS
"""Context of an element that has no symbol."""


def padded_length(n: int) -> int:
    """Round `n` up to a whole number of rounds of the coder; elements added as padding must be `SKIPPED`."""
    return -(-n // LANES) * LANES


@kernel
def _scale_row(counts: Counts, frequencies: Bits16) -> None:
    """Scale the counts of the symbols of one context to frequencies."""
    total, excess = np.int64(0), np.int64(-TOTAL)
    for s in range(len(counts)):
        total += counts[s]
    scaled = np.zeros(len(counts), np.int64)
    if total:
        for s in range(len(counts)):
            if counts[s] > 0:
                scaled[s] = max(counts[s] * TOTAL // total, 1)
            excess += scaled[s]
        while excess > 0:
            largest = scaled.argmax()
            decrease = min(excess, max(scaled[largest] // 2, 1))
            scaled[largest] -= decrease
            excess -= decrease
        scaled[scaled.argmax()] -= excess
    for s in range(len(counts)):
        frequencies[s] = scaled[s]


@kernel
def scale_rows(counts: Counts, n_symbols: int, frequencies: Bits16) -> None:
    """Scale counts by context and symbol to frequencies: rows of `n_symbols` that add up to `TOTAL`, or are all 0.

    A symbol that occurs has a frequency of at least 1.
    """
    for first in range(0, len(counts), n_symbols):
        _scale_row(counts[first : first + n_symbols], frequencies[first : first + n_symbols])


@kernel
def _fill_divisors(frequencies: Bits16, n_symbols: int, divisors: Bits64) -> None:
    """Fill a table of reciprocals that replace divisions by frequencies; the row of `SKIPPED` keeps states unchanged.

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
            # The reciprocal of 1 would have 33 bits: its quotient is one too small, which `added` corrects.
            if frequency > np.uint64(1):
                while frequency > np.uint64(1) << bits:
                    bits += np.uint64(1)
                unit = np.uint64(1) << (bits + np.uint64(31))
                reciprocal, added = (unit + frequency - np.uint64(1)) // frequency, start
            upper = frequency | (added << np.uint64(12)) | ((bits - np.uint64(1)) << np.uint64(24))
            divisors[slot] = reciprocal | (upper << np.uint64(32))
            start += frequency


@kernel
def _encode_round(divisors: Bits64, states: Bits32, emitted: Bits16, is_emitted: Bytes) -> None:
    """Encode one symbol into each state; a state that would overflow emits a word first."""
    low, bits12 = np.uint64(0xFFFFFFFF), np.uint64(0xFFF)
    for lane in range(LANES):
        divisor, state = divisors[lane], np.uint64(states[lane])
        frequency = (divisor >> np.uint64(32)) & bits12
        is_full = state >= frequency << np.uint64(31 - PRECISION_BITS)
        emitted[lane] = np.uint16(state & np.uint64(0xFFFF))
        is_emitted[lane] = np.uint8(is_full)
        state = state >> np.uint64(16) if is_full else state
        quotient = ((state * (divisor & low)) >> np.uint64(32)) >> (divisor >> np.uint64(56))
        added = (divisor >> np.uint64(44)) & bits12
        states[lane] = np.uint32(state + added + quotient * (np.uint64(TOTAL) - frequency))


@kernel
def encode_symbols(
    symbols: Bytes, contexts: Bytes, n: int, frequencies: Bits16, n_symbols: int, words: Bits16, states: Bits32
) -> int:
    """Encode from the last element to the first; `words` (at least `n + 1` long) is filled from its end.

    `n` is padded. Returns the index of the first word; `states` (`LANES`) are set to the decoder's initial states.
    """
    table = np.zeros((SKIPPED + 1) * n_symbols, np.uint64)
    _fill_divisors(frequencies, n_symbols, table)
    divisors, emitted, is_emitted = np.empty(LANES, np.uint64), np.empty(LANES, np.uint16), np.empty(LANES, np.uint8)
    states[:] = LOWEST_STATE
    word = np.uint64(len(words) - 1)
    for i in range(n - LANES, -1, -LANES):
        round_contexts, round_symbols = contexts[i : i + LANES], symbols[i : i + LANES]
        for lane in range(LANES):
            slot = np.uint64(round_contexts[lane]) * np.uint64(n_symbols) + np.uint64(round_symbols[lane])
            divisors[lane] = table[slot]
        _encode_round(divisors, states, emitted, is_emitted)
        for lane in range(LANES - 1, -1, -1):
            words[word] = emitted[lane]  # overwritten by the next unless it is emitted
            word -= np.uint64(is_emitted[lane])
    return int(word) + 1


@kernel
def fill_decode_row(frequencies: Bits32, row: Bits32) -> None:
    """Fill the `TOTAL` entries of one context: frequency << 20, offset inside the symbol << 8, symbol.

    Frequencies add up to `TOTAL`, or are all 0: then every entry decodes symbol 0 and keeps the state unchanged.
    """
    slot = 0
    for s in range(len(frequencies)):
        frequency = frequencies[s]
        entries = row[slot : slot + np.int64(frequency)]
        for offset in range(len(entries)):
            entries[offset] = (frequency << np.uint32(20)) | (np.uint32(offset) << np.uint32(8)) | np.uint32(s)
        slot += len(entries)
    for offset in range(slot, TOTAL):
        row[offset] = np.uint32(TOTAL << 20) | (np.uint32(offset) << np.uint32(8))


@kernel
def fill_skipped_row(table: Bits32) -> None:
    """Fill the row of `SKIPPED`, which keeps states unchanged."""
    for offset in range(TOTAL):
        table[SKIPPED * TOTAL + offset] = np.uint32(TOTAL << 20) | (np.uint32(offset) << np.uint32(8))


@kernel
def decode_symbols(
    stored: Bytes, first: int, states: Bits32, contexts: Bytes, n: int, table: Bits32, symbols: Bytes
) -> int:
    """Decode `n` (padded) elements; a skipped one gets symbol 0. Return the words consumed; `states` are updated.

    Words begin at byte `first` of `stored`, which is readable for `n + 1` words: an element consumes at most one, so
    that no content makes it read outside. Contexts are at most `SKIPPED`.
    """
    mask, lowest = np.uint32(TOTAL - 1), np.uint32(LOWEST_STATE)
    shift, row_bits = np.uint32(16), np.uint32(PRECISION_BITS)
    position = np.uint64(first)
    for i in range(0, n, LANES):
        for lane in range(LANES):
            j = np.uint64(i + lane)
            state = states[lane]
            entry = table[(np.uint64(contexts[j]) << np.uint64(PRECISION_BITS)) + np.uint64(state & mask)]
            symbols[j] = np.uint8(entry)
            offset = (entry >> np.uint32(8)) & np.uint32(0xFFF)
            state = np.uint32((entry >> np.uint32(20)) * (state >> row_bits) + offset)
            is_low = state < lowest
            word = np.uint32(stored[position]) | (np.uint32(stored[position + np.uint64(1)]) << np.uint32(8))
            states[lane] = np.uint32((state << shift) | word) if is_low else state
            position += np.uint64(is_low) << np.uint64(1)
    return (int(position) - first) // 2
