"""The loops over bf16 elements: deltas to codes and fine numbers, and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.rans import SKIPPED, Halves
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, Doubles, Floats, kernel

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
_LAST_CELL = LAST_REST_CODE - FIRST_REST_CODE
NEAR_CELLS = 2  # cells on either side that hold nearly all differences of the rest

MAX_LOW = 15
"""Bits of a difference that can be left to the fine number of a cell."""

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
def width_slot(context: np.uint8, code: np.uint8, base: np.uint16) -> np.uint16:
    """Where the width of a fine number stands: by context, code, and whether it leads towards zero."""
    own = np.uint16(code & np.uint8(N_CODES - 1))
    towards = np.uint16(np.uint16(own ^ np.uint16(base >> np.uint16(15)) ^ np.uint16(1)) & np.uint16(1))
    return np.uint16(np.uint16(np.uint16(context) << np.uint16(6)) | np.uint16(own << np.uint16(1)) | towards)


@kernel
def count_exponents(base: Halves, counts: Counts) -> None:
    """Add the exponents of `base` to `counts`."""
    for i in range(len(base)):
        counts[np.uint64((base[i] >> np.uint16(7)) & np.uint16(0xFF))] += 1


@kernel
def context_rows(base: Halves, n: int, context_of: Bytes, contexts: Bytes) -> None:
    """The context of every element, by the exponent of the base's; padding is skipped."""
    for i in range(n):
        contexts[i] = context_of[np.uint64((base[np.uint64(i)] >> np.uint16(7)) & np.uint16(0xFF))]
    for i in range(n, len(contexts)):
        contexts[i] = SKIPPED


@kernel
def widened(halves: Halves, wide: Floats) -> None:
    """The floats that bf16 bits stand for."""
    bits = wide.view(np.int32)
    for i in range(len(halves)):
        bits[i] = np.int32(np.int32(halves[i]) << np.int32(16))


@kernel
def _tile_bands(
    wide: Floats, other: Floats, cut0: np.int32, cut1: np.int32, cut2: np.int32, deltas: Floats, codes: Bytes
) -> np.int32:
    """Deltas and codes of one tile; the bits of the largest magnitude."""
    largest = np.int32(0)
    for i in range(len(deltas)):
        difference = other[i] - wide[i]
        deltas[i] = np.float32(0.0) if other[i] == wide[i] else difference
    bits = deltas.view(np.int32)
    for i in range(len(deltas)):
        magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))
        largest = magnitude if magnitude > largest else largest
        code = np.int32(5) if magnitude < cut1 else np.int32(3)
        code = np.int32(1) if magnitude >= cut0 else code
        code = np.int32(code - np.int32(bits[i] >> np.int32(31)))
        codes[i] = np.uint8(code if magnitude >= cut2 else np.int32(0))
    return largest


@kernel
def band_rows(base: Halves, expert: Halves, cuts: Integers, deltas: Floats, codes: Bytes) -> bool:
    """Deltas (as merges take them) and the code of the band that each is in, 0 for none.

    `cuts` are the bits of the three thresholds, descending. False if a delta is not finite.
    """
    n = len(base)
    wide, other = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    largest = np.int32(0)
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        widened(base[tile:stop], wide)
        widened(expert[tile:stop], other)
        found = _tile_bands(wide, other, cuts[0], cuts[1], cuts[2], deltas[tile:stop], codes[tile:stop])
        largest = found if found > largest else largest
    return bool(largest < np.int32(0x7F800000))


@kernel
def _tile_edges(base: Halves, codes: Bytes, cuts: Floats, edges: Floats) -> None:
    """The base plus the signed cut of each element's band; the base itself where it is in none."""
    cut0, cut1, cut2 = cuts[1], cuts[3], cuts[5]
    widened(base, edges)
    for i in range(len(base)):
        code = codes[i]
        cut = cut1 if code < np.uint8(5) else cut2
        cut = cut0 if code < np.uint8(3) else cut
        cut = cut if code & np.uint8(1) else -cut
        edges[i] += cut if code != np.uint8(0) else np.float32(0.0)


@kernel
def _tile_needs(base: Halves, expert: Halves, edges: Floats, codes: Bytes, needs: Integers) -> None:
    """For elements in bands the bits of their fine number, 16 where it cannot be stored; for others their bucket.

    A bucket says how far an element is from its base: exact up to 15, then eighths of octaves.
    """
    edge_bits = edges.view(np.int32)
    lengths = np.empty(len(base), np.float32)
    length_bits = lengths.view(np.int32)
    for i in range(len(base)):
        place = place_of(np.int32(expert[i]))
        down = np.int32(np.int32(codes[i] & np.uint8(1)) - np.int32(1))
        past = np.int32(np.int32(np.int32(place - past_place(edge_bits[i], down)) ^ down) - down)
        step = np.int32(place - place_of(np.int32(base[i])))
        needs[i] = abs(step) if codes[i] == np.uint8(0) else past
    for i in range(len(base)):
        lengths[i] = np.float32(needs[i]) + np.float32(0.5)  # from 0.5 on: its exponent is the number of bits
    for i in range(len(base)):
        number = needs[i]
        length = np.int32(np.int32(length_bits[i] >> np.int32(23)) - np.int32(126))
        width = length if (number >= np.int32(0)) & (length < np.int32(16)) else np.int32(16)
        shift = np.int32(length - np.int32(4)) if length > np.int32(4) else np.int32(0)
        bucket = np.int32(np.int32(shift << np.int32(3)) + np.int32(number >> shift))
        needs[i] = bucket if codes[i] == np.uint8(0) else width


@kernel
def sample_rows(
    base: Halves,
    expert: Halves,
    contexts: Bytes,
    codes: Bytes,
    cuts: Floats,
    stride: int,
    width_counts: Counts,
    step_counts: Counts,
) -> None:
    """Count what fine numbers would need, for every `stride`th tile.

    `width_counts`: bits of the fine numbers of bands, by `width_slot`, 16 for those that cannot be stored.
    `step_counts`: magnitudes of differences outside the bands, by context and bucket.
    """
    edges, needs = np.empty(TILE, np.float32), np.empty(TILE, np.int32)
    n = len(base)
    for tile in range(0, n, TILE * stride):
        stop = min(tile + TILE, n)
        own, rows, bands = base[tile:stop], contexts[tile:stop], codes[tile:stop]
        _tile_edges(own, bands, cuts, edges)
        _tile_needs(own, expert[tile:stop], edges, bands, needs)
        for i in range(stop - tile):
            if bands[i] == np.uint8(0):
                step_counts[np.uint64(rows[i]) * np.uint64(QUANTILE_BUCKETS) + np.uint64(needs[i])] += 1
            else:
                slot = np.uint64(width_slot(rows[i], bands[i], own[i]))
                width_counts[slot * np.uint64(17) + np.uint64(needs[i])] += 1


@kernel
def _tile_numbers(
    base: Halves, expert: Halves, lows: Bytes, edges: Floats, codes: Bytes, fines: Integers, is_odd: Bytes
) -> None:
    """Codes of cells for elements in no band, and what is left of every element's value.

    Masks, not branches: what is in a cell and what is in a band alternates at random.
    """
    edge_bits = edges.view(np.int32)
    for i in range(len(base)):
        bits, own, code = np.int32(expert[i]), np.int32(base[i]), np.int32(codes[i])
        low = np.int32(lows[i])
        place = place_of(bits)
        step = np.int32(place - place_of(own))
        cell = np.int32(np.int32(step >> low) + np.int32(ZERO_CELL))
        cell = np.int32(0) if cell < np.int32(0) else cell
        cell = np.int32(_LAST_CELL) if cell > np.int32(_LAST_CELL) else cell
        down = np.int32(np.int32(code & np.int32(1)) - np.int32(1))
        past = np.int32(np.int32(np.int32(place - past_place(edge_bits[i], down)) ^ down) - down)
        inside = np.int32(step - np.int32(np.int32(cell - np.int32(ZERO_CELL)) << low))
        is_cell = code == np.int32(0)
        codes[i] = np.uint8(np.int32(FIRST_REST_CODE) + cell if is_cell else code)
        fines[i] = inside if is_cell else past
        # The other zero: beside a zero it has the same place, elsewhere decoding gives the positive one.
        is_odd[i] = np.uint8(((bits == np.int32(0x8000)) | (step == np.int32(0))) & (bits != own))


@kernel
def _tile_cut_numbers(numbers: Integers, own_widths: Bytes, is_odd: Bytes, fines: Halves) -> None:
    """Numbers as stored; `is_odd` grows by those that do not fit."""
    for i in range(len(fines)):
        width = np.int32(own_widths[i])
        fines[i] = np.uint16(np.int32(numbers[i] & np.int32(np.int32(np.int32(1) << width) - np.int32(1))))
        is_odd[i] |= np.uint8(np.int32(numbers[i] >> width) != np.int32(0))


@kernel
def fine_rows(
    base: Halves,
    expert: Halves,
    contexts: Bytes,
    codes: Bytes,
    cuts: Floats,
    low_bits: Bytes,
    widths: Bytes,
    fines: Halves,
    own_widths: Bytes,
    wrong: Bits32,
) -> int:
    """Put elements that are in no band into cells (`codes`), and number all: `fines`, in `own_widths` bits.

    Returns how many positions were written to `wrong` (one more than there are elements): those whose value the
    numbers cannot give.
    """
    edges, numbers = np.empty(TILE, np.float32), np.empty(TILE, np.int32)
    lows, is_odd, slots = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8), np.empty(TILE, np.uint16)
    n = len(base)
    n_wrong = np.uint64(0)
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        own, rows, all_codes, all_widths = base[tile:stop], contexts[tile:stop], codes[tile:stop], own_widths[tile:stop]
        _tile_edges(own, all_codes, cuts, edges)
        for i in range(stop - tile):
            lows[i] = low_bits[np.uint64(rows[i])]
        _tile_numbers(own, expert[tile:stop], lows, edges, all_codes, numbers, is_odd)
        for i in range(stop - tile):
            slots[i] = width_slot(rows[i], all_codes[i], own[i])
        for i in range(stop - tile):
            all_widths[i] = widths[np.uint64(slots[i])]
        _tile_cut_numbers(numbers, all_widths, is_odd, fines[tile:stop])
        for i in range(stop - tile):
            wrong[n_wrong] = np.uint32(tile + i)
            n_wrong += np.uint64(is_odd[i])
    return int(n_wrong)


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


@kernel
def sum_codes(deltas: Floats, contexts: Bytes, codes: Bytes, sums: Doubles) -> None:
    """By context and code: numbers of elements, sums of the deltas, of their squares, and nothing.

    `sums` holds that twice, for even and odd elements: neighbours are often alike, and would wait for each other.
    """
    half = np.uint64(len(sums) // 2)
    for i in range(len(deltas)):
        slot = (np.uint64(contexts[i]) * np.uint64(N_CODES) + np.uint64(codes[i])) * np.uint64(4)
        slot += half * (np.uint64(i) & np.uint64(1))
        delta = np.float64(deltas[i])
        sums[slot] += 1.0
        sums[slot + np.uint64(1)] += delta
        sums[slot + np.uint64(2)] += delta * delta


@kernel
def _tile_cell_errors(
    base: Halves, deltas: Floats, codes: Bytes, lows: Bytes, limit: np.float32, wide: Floats, errors: Doubles
) -> None:
    middle = np.empty(len(base), np.float32)
    middle_bits = middle.view(np.int32)
    widened(base, wide)
    for i in range(len(base)):
        low = np.int32(lows[i])
        cell = np.int32(np.int32(codes[i]) - np.int32(FIRST_REST_CODE + ZERO_CELL))
        step = np.int32(np.int32(cell << low) + np.int32(np.int32(np.int32(1) << low) >> np.int32(1)))
        place = np.int32(place_of(np.int32(base[i])) + step)
        sign = np.int32(place >> np.int32(31))
        magnitude = np.int32(np.int32(np.int32(place ^ sign) - sign) & np.int32(0x7FFF))
        middle_bits[i] = np.int32(np.int32(magnitude | np.int32(sign & np.int32(0x8000))) << np.int32(16))
    for i in range(len(base)):
        estimate = middle[i] - wide[i]
        nearest = limit if estimate > np.float32(0.0) else -limit
        estimate = estimate if abs(estimate) < limit else nearest
        error = np.float64(deltas[i]) - np.float64(estimate)
        errors[i] = error * error if codes[i] >= np.uint8(FIRST_REST_CODE) else np.float64(0.0)


@kernel
def cell_error(
    base: Halves, deltas: Floats, contexts: Bytes, codes: Bytes, low_bits: Bytes, limit: np.float32
) -> float:
    """Sum of squared errors of the middles of cells, cut to `limit`, as `taking.difference_rows` takes them."""
    n = len(base)
    lows, wide, errors = np.empty(TILE, np.uint8), np.empty(TILE, np.float32), np.zeros(TILE, np.float64)
    sum0, sum1, sum2, sum3 = np.float64(0.0), np.float64(0.0), np.float64(0.0), np.float64(0.0)
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        rows = contexts[tile:stop]
        for i in range(stop - tile):
            lows[i] = low_bits[np.uint64(rows[i])]
        _tile_cell_errors(base[tile:stop], deltas[tile:stop], codes[tile:stop], lows, limit, wide, errors)
        errors[stop - tile :] = 0.0
        for i in range(0, TILE, 4):  # four sums, so that each need not wait for the one before
            sum0 += errors[i]
            sum1 += errors[i + 1]
            sum2 += errors[i + 2]
            sum3 += errors[i + 3]
    return (sum0 + sum1) + (sum2 + sum3)
