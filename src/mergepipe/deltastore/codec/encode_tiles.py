"""The loops that turn bf16 beside bf16 into codes and fine numbers, tile by tile."""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.byte_lookup import look_up
from mergepipe.deltastore.codec.error_sums import sum_tile
from mergepipe.deltastore.codec.rans import Halves
from mergepipe.deltastore.codec.residual_streams import WIDTH_COUNTS
from mergepipe.deltastore.codec.residual_widths import FIRST_STEP_COUNT
from mergepipe.deltastore.codec.symbols import (
    FIRST_REST_CODE,
    LAST_REST_CODE,
    QUANTILE_BUCKETS,
    TILE,
    ZERO_CELL,
    Integers,
    past_place,
    place_of,
    top_exponent,
    width_slot,
)
from mergepipe.kernels.compiled import Bits32, Bytes, Doubles, Floats, kernel

_LAST_CELL = LAST_REST_CODE - FIRST_REST_CODE
_INFINITY = 0x7F800000


@kernel
def _as_float(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


@kernel
def _as_bits(value: np.float32) -> np.int32:
    return np.float32(value).view(np.int32)


@kernel
def _widened(bits: np.int32) -> np.float32:
    """The float32 that a bf16 (its bits) stands for."""
    return _as_float(np.int32(bits << np.int32(16)))


@kernel
def _delta(own: np.int32, other: np.int32) -> np.float32:
    """The delta as merges take it: 0 where both are the same infinity."""
    wide, wide_other = _widened(own), _widened(other)
    difference = np.float32(wide_other - wide)
    return np.float32(0.0) if wide_other == wide else difference


@kernel
def _magnitude(bits: np.int32) -> np.int32:
    return np.int32(bits & np.int32(0x7FFFFFFF))


@kernel
def _band_code(bits: np.int32, first: np.int32, second: np.int32) -> np.int32:
    """The code of a delta (its bits) that is in a band."""
    magnitude = _magnitude(bits)
    code = np.int32(5) if magnitude < second else np.int32(3)
    code = np.int32(1) if magnitude >= first else code
    return np.int32(code - np.int32(bits >> np.int32(31)))


@kernel
def _band_edge(own: np.int32, bits: np.int32, first: np.int32, second: np.int32, third: np.int32) -> np.int32:
    """The edge (its bits) of the band that a delta (its bits) is in: the base plus or minus the cut."""
    magnitude = _magnitude(bits)
    cut = second if magnitude >= second else third
    cut = first if magnitude >= first else cut
    signed = _as_float(np.int32(cut | np.int32(bits & np.int32(-0x80000000))))
    return _as_bits(np.float32(_widened(own) + signed))


@kernel
def _band_number(other: np.int32, edge: np.int32, bits: np.int32) -> np.int32:
    """The fine number of an element in a band: how many places it lies past the band's edge."""
    down = np.int32(bits >> np.int32(31))
    return np.int32(np.int32(np.int32(place_of(other) - past_place(edge, down)) ^ down) - down)


@kernel
def _sample_indices(
    base: Halves, expert: Halves, contexts: Bytes, cuts: Integers, top: np.int32, indices: Integers
) -> None:
    """Which of the sample's counts each element adds to."""
    first, second, third = cuts[0], cuts[1], cuts[2]
    for i in range(len(base)):
        own, other = np.int32(base[i]), np.int32(expert[i])
        bits = _as_bits(_delta(own, other))
        is_band = _magnitude(bits) >= third
        step = abs(np.int32(place_of(other) - place_of(own)))
        edge = _band_edge(own, bits, first, second, third)
        number = _band_number(other, edge, bits) if is_band else step
        # from 0.5 on, the exponent is the number of bits
        exponent = np.int32(_as_bits(np.float32(np.float32(number) + np.float32(0.5))) >> np.int32(23))
        length = np.int32(exponent - np.int32(126))
        width = length if (number >= np.int32(0)) & (length < np.int32(16)) else np.int32(16)
        index = width_slot(_band_code(bits, first, second), edge, top)
        own_width = np.int32(np.int32(index * np.int32(WIDTH_COUNTS)) + width)
        shift = np.int32(length - np.int32(4)) if length > np.int32(4) else np.int32(0)
        bucket = np.int32(np.int32(shift << np.int32(3)) + np.int32(number >> np.int32(shift & np.int32(31))))
        own_step = np.int32(np.int32(np.int32(contexts[i]) * np.int32(QUANTILE_BUCKETS)) + bucket)
        indices[i] = own_width if is_band else np.int32(np.int32(FIRST_STEP_COUNT) + own_step)


@kernel
def sample_tiles(
    base: Halves, expert: Halves, contexts: Bytes, first_low: int, cuts: Integers, stride: int, counts: Bits32
) -> None:
    """Add what every `stride`th tile would need to `counts` (`N_SAMPLE_COUNTS`). `cuts` are bits of float32."""
    indices, top = np.empty(TILE, np.int32), top_exponent(first_low, cuts[0])
    n = len(base)
    for tile in range(0, n, TILE * stride):
        stop = min(tile + TILE, n)
        _sample_indices(base[tile:stop], expert[tile:stop], contexts[tile:stop], cuts, top, indices)
        for i in range(stop - tile):
            counts[np.uint64(indices[i])] += np.uint32(1)


@kernel
def _tile_numbers(
    base: Halves, expert: Halves, lows: Bytes, cuts: Integers, top: np.int32, codes: Bytes, numbers: Integers,
    width_indices: Bytes, is_odd: Bytes, deltas: Floats,
) -> np.int32:  # fmt: skip
    """Codes, and what they leave of every element's value; the bits of the largest |delta|.

    Masks, not branches: what is in a cell and what is in a band alternates at random.
    """
    first, second, third = cuts[0], cuts[1], cuts[2]
    largest = np.int32(0)
    for i in range(len(base)):
        own, other, low = np.int32(base[i]), np.int32(expert[i]), np.int32(lows[i] & np.uint8(15))
        delta = _delta(own, other)
        bits = _as_bits(delta)
        magnitude = _magnitude(bits)
        largest = magnitude if magnitude > largest else largest
        step = np.int32(place_of(other) - place_of(own))
        cell = np.int32(np.int32(step >> low) + np.int32(ZERO_CELL))
        cell = np.int32(0) if cell < np.int32(0) else cell
        cell = np.int32(_LAST_CELL) if cell > np.int32(_LAST_CELL) else cell
        inside = np.int32(step - np.int32(np.int32(cell - np.int32(ZERO_CELL)) << low))
        code = _band_code(bits, first, second)
        edge = _band_edge(own, bits, first, second, third)
        past = _band_number(other, edge, bits)
        codes[i] = np.uint8(code if magnitude >= third else np.int32(cell + np.int32(FIRST_REST_CODE)))
        numbers[i] = past if magnitude >= third else inside
        width_indices[i] = np.uint8(width_slot(code, edge, top))
        # The other zero: beside a zero it has the same place, elsewhere decoding gives the positive one.
        is_odd[i] = np.uint8(((other == np.int32(0x8000)) | (step == np.int32(0))) & (other != own))
        deltas[i] = delta
    return largest


@kernel
def _tile_middles(base: Halves, codes: Bytes, lows: Bytes, limit: np.float32, deltas: Floats, middles: Floats) -> None:
    """Deltas of the middles of cells, cut to `limit`, as decoding takes them; of elements in bands the delta itself."""
    for i in range(len(base)):
        own, low = np.int32(base[i]), np.int32(lows[i] & np.uint8(15))
        cell = np.int32(np.int32(codes[i]) - np.int32(FIRST_REST_CODE + ZERO_CELL))
        step = np.int32(np.int32(cell << low) + np.int32(np.int32(np.int32(1) << low) >> np.int32(1)))
        place = np.int32(place_of(own) + step)
        sign = np.int32(place >> np.int32(31))
        magnitude = np.int32(np.int32(np.int32(place ^ sign) - sign) & np.int32(0x7FFF))
        value = np.int32(magnitude | np.int32(sign & np.int32(0x8000)))
        estimate = np.float32(_widened(value) - _widened(own))
        nearest = limit if estimate > np.float32(0.0) else -limit
        estimate = estimate if abs(estimate) < limit else nearest
        middles[i] = estimate if codes[i] >= np.uint8(FIRST_REST_CODE) else deltas[i]


@kernel
def _cut_numbers(
    numbers: Integers, codes: Bytes, lows: Bytes, band_widths: Bytes, is_odd: Bytes, own_widths: Bytes, fines: Halves
) -> bool:
    """Numbers as stored, and their widths; `is_odd` grows by those that do not fit. Returns whether any is odd."""
    for i in range(len(fines)):
        low, band_width = lows[i], band_widths[i]  # taken before it is known which: without a branch
        own_widths[i] = low if codes[i] >= np.uint8(FIRST_REST_CODE) else band_width
    for i in range(len(fines)):
        width = np.int32(own_widths[i] & np.uint8(15))
        fines[i] = np.uint16(np.int32(numbers[i] & np.int32(np.int32(np.int32(1) << width) - np.int32(1))))
        is_odd[i] |= np.uint8(np.int32(numbers[i] >> width) != np.int32(0))
    any_odd = np.uint8(0)
    for i in range(len(fines)):
        any_odd |= is_odd[i]
    return bool(any_odd)


@kernel
def number_tiles(
    base: Halves, expert: Halves, contexts: Bytes, first_low: int, cuts: Integers, limit: np.float32, low_bits: Bytes,
    widths: Bytes, codes: Bytes, fines: Halves, own_widths: Bytes, wrong: Bits32, sums: Doubles, errors: Doubles,
) -> int:  # fmt: skip
    """Give every element its code, its fine number and the bits that this is stored in.

    Tables have 256 bytes: `low_bits` by context, `widths` by `width_slot`. `sums` and `errors` (of the middles of
    cells) grow as `sum_tile` says. Returns how many positions were written to `wrong` (those whose
    value the numbers cannot give), or -1 where a delta is not finite.
    """
    lows, width_indices = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    band_widths, is_odd = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    numbers, deltas = np.empty(TILE, np.int32), np.empty(TILE, np.float32)
    middles, keys = np.empty(TILE, np.float32), np.empty(TILE, np.uint16)
    pairs = np.empty(2 * TILE, np.float64)
    n, n_wrong, largest = len(base), 0, np.int32(0)
    top = top_exponent(first_low, cuts[0])
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        m = stop - tile
        own, rows, own_codes = base[tile:stop], contexts[tile:stop], codes[tile:stop]
        look_up(low_bits, rows, m, lows)
        found = _tile_numbers(
            own, expert[tile:stop], lows, cuts, top, own_codes, numbers, width_indices, is_odd, deltas
        )
        largest = found if found > largest else largest
        look_up(widths, width_indices, m, band_widths)
        if _cut_numbers(numbers, own_codes, lows, band_widths, is_odd, own_widths[tile:stop], fines[tile:stop]):
            for i in range(m):
                if is_odd[i]:
                    wrong[n_wrong] = np.uint32(tile + i)
                    n_wrong += 1
        _tile_middles(own, own_codes, lows, limit, deltas, middles)
        sum_tile(deltas, middles, rows, own_codes, keys, pairs, sums, errors)
    return n_wrong if largest < np.int32(_INFINITY) else -1
