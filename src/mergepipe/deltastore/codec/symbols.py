"""What encoding and decoding of bf16 beside bf16 have in common: codes, places, contexts, stages of symbols."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.byte_lookup import look_up
from mergepipe.deltastore.codec.rans import SKIPPED, Halves
from mergepipe.kernels.compiled import Bytes, Counts, Floats, kernel

Integers = NDArray[np.int32]

# Codes of an element. 1 ... 4: first and second band; 5, 6: third band; each up, then down. 7 ... 20: cells of
# 2**low differences in the order of bf16 values; the difference 0 is the first of the cell in the middle.
N_CODES = 32
HEAD_SYMBOLS = 5
FIRST_BODY_CODE = 5
FIRST_REST_CODE = 7
BODY_SYMBOLS = 16
ZERO_CELL = 7
LAST_REST_CODE = FIRST_BODY_CODE + BODY_SYMBOLS - 1
NEAR_CELLS = 2  # cells on either side that hold nearly all differences of the rest

MAX_LOW = 15
"""Bits of a difference that can be left to the fine number of a cell."""

EDGE_CLASSES = 40
"""Exponents of edges that are told apart; lower ones are one class with the last."""
EDGE_WIDTHS = FIRST_REST_CODE - 1
"""Widths of one class: by band, and whether the number leads towards zero."""
N_WIDTHS = EDGE_CLASSES * EDGE_WIDTHS

N_EXPONENTS = 256
TILE = 2048
QUANTILE_BUCKETS = 128


@kernel
def place_of(bits: np.int32) -> np.int32:
    """Where a bf16 (its bits) stands among all: monotonous in its value; both zeros stand at 0."""
    sign = np.int32(-np.int32(bits >> np.int32(15)))
    return np.int32(np.int32(np.int32(bits & np.int32(0x7FFF)) ^ sign) - sign)


@kernel
def past_place(bits: np.int32, down: np.int32) -> np.int32:
    """Place of the first bf16 at or past a float32 (its bits, signed), upwards, or downwards where `down` is -1."""
    sign = np.int32(bits >> np.int32(31))
    whole = np.int32(np.int32(np.int32(bits & np.int32(0x7FFFFFFF)) ^ sign) - sign)
    return np.int32(np.int32(whole + np.int32(np.int32(0xFFFF) & np.int32(~down))) >> np.int32(16))


@kernel
def top_exponent(first_low: int, largest_cut: int) -> np.int32:
    """The exponent of the first class of edges: those above are few, or none.

    `first_low` is where the context of the largest exponents begins, `largest_cut` the bits of the first band's cut.
    """
    own, cut = np.int32(first_low) + np.int32(2), (np.int32(largest_cut) >> np.int32(23)) + np.int32(1)
    return np.int32(own if own > cut else cut)


@kernel
def width_slot(code: np.int32, edge: np.int32, top: np.int32) -> np.int32:
    """Where the width of a band's fine number stands: by exponent of the band's edge (its bits), band, and direction.

    That exponent fixes how many values the band has; numbers that lead towards zero may reach finer ones.
    """
    steps = np.int32(top - np.int32(np.int32(edge >> np.int32(23)) & np.int32(0xFF)))
    steps = np.int32(0) if steps < np.int32(0) else steps
    steps = np.int32(EDGE_CLASSES - 1) if steps > np.int32(EDGE_CLASSES - 1) else steps
    towards = np.int32(np.int32(np.int32(code ^ edge >> np.int32(31)) ^ np.int32(1)) & np.int32(1))
    pair = np.int32(np.int32(code - np.int32(1)) & np.int32(-2))
    return np.int32(np.int32(np.int32(steps * np.int32(EDGE_WIDTHS)) + pair) + towards)


@kernel
def count_exponents(base: Halves, stride: int, counts: Counts) -> None:
    """Add the exponents of every `stride`th element of `base` to `counts`."""
    # Four counts of each: neighbours are often alike, and would wait for each other.
    own = np.zeros(4 * N_EXPONENTS, np.uint32)
    n = (len(base) + stride - 1) // stride
    for i in range(n):
        exponent = np.uint64((base[np.uint64(i) * np.uint64(stride)] >> np.uint16(7)) & np.uint16(0xFF))
        own[(np.uint64(i) & np.uint64(3)) * np.uint64(N_EXPONENTS) + exponent] += np.uint32(1)
    for i in range(4 * N_EXPONENTS):
        counts[i % N_EXPONENTS] += np.int64(own[i])


@kernel
def choose_lows(counts: Counts, enough: int, lows: Bytes) -> int:
    """Merge neighbouring exponents, from the largest down, until each context has `enough`: the lowest of each.

    Returns how many there are: at most as many as `lows` has room for. The last is 0.
    """
    found, gathered = 0, 0
    for exponent in range(N_EXPONENTS - 1, 0, -1):
        gathered += counts[exponent]
        if gathered >= enough and found < len(lows) - 1:
            lows[found] = exponent
            found, gathered = found + 1, 0
    lows[found] = 0
    return found + 1


@kernel
def context_rows(base: Halves, n: int, context_of: Bytes, contexts: Bytes) -> None:
    """The context of every element, by the exponent of the base's; padding is skipped."""
    for i in range(n):
        contexts[i] = np.uint8((base[i] >> np.uint16(7)) & np.uint16(0xFF))
    look_up(context_of, contexts, n, contexts)
    for i in range(n, len(contexts)):
        contexts[i] = SKIPPED


@kernel
def widened(halves: Halves, wide: Floats) -> None:
    """The floats that bf16 bits stand for."""
    bits = wide.view(np.int32)
    for i in range(len(halves)):
        bits[i] = np.int32(np.int32(halves[i]) << np.int32(16))


@kernel
def body_contexts(contexts: Bytes, head_symbols: Bytes, n: int, rows: Bytes) -> None:
    """Contexts of the second stage: elements that the first has placed are skipped."""
    for i in range(n):
        rows[i] = contexts[i] if head_symbols[i] == np.uint8(0) else np.uint8(SKIPPED)


@kernel
def split_codes(codes: Bytes, n: int, head_symbols: Bytes, body_symbols: Bytes) -> None:
    """The symbols of both stages; 0 in the second for elements that the first has placed."""
    for i in range(n):
        is_head = codes[i] < np.uint8(FIRST_BODY_CODE)
        head_symbols[i] = codes[i] if is_head else np.uint8(0)
        body_symbols[i] = np.uint8(0) if is_head else np.uint8(codes[i] - np.uint8(FIRST_BODY_CODE))


@kernel
def join_codes(head_symbols: Bytes, body_symbols: Bytes, n: int, codes: Bytes) -> None:
    """Codes from the symbols of both stages."""
    for i in range(n):
        head = head_symbols[i]
        codes[i] = head if head != np.uint8(0) else np.uint8(body_symbols[i] + np.uint8(FIRST_BODY_CODE))
