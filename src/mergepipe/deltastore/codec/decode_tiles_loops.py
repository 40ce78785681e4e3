"""The loops that turn the codes and fine numbers of one tile back into bf16 values and deltas."""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.bit_spread import add_numbers, count_ones
from mergepipe.deltastore.codec.byte_lookup import look_up
from mergepipe.deltastore.codec.piece_headers import NO_SLOT, exception_places, half_at, n_chunks_of
from mergepipe.deltastore.codec.rans import SKIPPED, Halves
from mergepipe.deltastore.codec.symbols import (
    FIRST_BODY_CODE,
    FIRST_REST_CODE,
    N_CODES,
    ZERO_CELL,
    Integers,
    past_place,
    place_of,
    widened,
    width_slot,
)
from mergepipe.kernels.compiled import Bits64, Bytes, Floats, kernel

STREAM_BITS = 21
"""Bits of a position inside one tile: three streams move on in one word."""
N_STREAMS = 3


@kernel
def tile_contexts(
    base: Halves, lows: Bytes, low_bits: Bytes, n_contexts: int, exponents: Bytes, contexts: Bytes, cells: Bytes
) -> None:
    """The context of each element, by the exponent of its base's, and its `low_bits`; what pads it is skipped."""
    m = len(base)
    for i in range(m):
        exponents[i] = np.uint8((base[i] >> np.uint16(7)) & np.uint16(0xFF))
        contexts[i] = np.uint8(0)
        cells[i] = low_bits[0]
    for c in range(n_contexts - 1):
        low, step = lows[c], np.uint8(low_bits[c + 1] - low_bits[c])
        for i in range(m):
            is_below = np.uint8(-np.uint8(exponents[i] < low))
            contexts[i] -= is_below
            cells[i] += step & is_below
    for i in range(m, len(contexts)):
        contexts[i] = np.uint8(SKIPPED)


@kernel
def tile_edges(base: Halves, codes: Bytes, cuts: Floats, edges: Floats) -> None:
    """What numbers are counted from: the base plus or minus the cut of the band, or the base. `cuts` of the bands."""
    cut0, cut1, cut2 = cuts[0], cuts[1], cuts[2]
    widened(base, edges)
    for i in range(len(base)):
        code = codes[i]
        cut = cut1 if code < np.uint8(FIRST_BODY_CODE) else cut2
        cut = cut0 if code < np.uint8(3) else cut
        cut = cut if code & np.uint8(1) else -cut
        edges[i] += cut if code < np.uint8(FIRST_REST_CODE) else np.float32(0.0)


@kernel
def tile_ones(
    edges: Floats, codes: Bytes, cells: Bytes, top: np.int32, table: Bytes, slots: Bytes, widths: Bytes, ones: Halves
) -> None:
    """As many ones, from the lowest bit, as the fine number of each element has bits.

    Those of bands by `table`, as `tables.take_widths` fills it, from their `tile_edges`; those of cells from `cells`.
    `slots` and `widths` are room to work in.
    """
    m, edge_bits = len(codes), edges.view(np.int32)
    for i in range(m):
        code = np.int32(codes[i])
        is_band = (code > np.int32(0)) & (code < np.int32(FIRST_REST_CODE))
        slot = width_slot(code, edge_bits[i], top)
        slots[i] = np.uint8(slot if is_band else np.int32(NO_SLOT))
    look_up(table, slots, m, widths)
    for i in range(m):
        low = cells[i] if codes[i] >= np.uint8(FIRST_REST_CODE) else np.uint8(0)
        width = np.uint16(widths[i] | low)
        ones[i] = np.uint16(np.uint16(np.uint16(1) << width) - np.uint16(1))


@kernel
def numbers_one_by_one(stored: Bytes, at: Bits64, codes: Bytes, ones: Halves, numbers: Halves) -> None:
    """The fine numbers of one tile, from the bits `at` of `stored` on in three streams: `at` moves on over them."""
    shifts, bits = np.zeros(N_CODES, np.uint64), np.uint64((1 << STREAM_BITS) - 1)
    shifts[FIRST_BODY_CODE:FIRST_REST_CODE], shifts[FIRST_REST_CODE:] = STREAM_BITS, 2 * STREAM_BITS
    starts = np.zeros(64, np.uint64)
    for stream in range(N_STREAMS):
        starts[stream * STREAM_BITS] = at[stream]
    passed = np.uint64(0)
    for i in range(len(ones)):
        mask, shift = np.uint64(ones[i]), shifts[np.uint64(codes[i])]
        position = starts[shift] + ((passed >> shift) & bits)
        place = position >> np.uint64(3)
        found = np.uint64(stored[place]) | (np.uint64(stored[place + np.uint64(1)]) << np.uint64(8))
        found |= np.uint64(stored[place + np.uint64(2)]) << np.uint64(16)
        numbers[i] = np.uint16((found >> (position & np.uint64(7))) & mask)
        passed += count_ones(mask) << shift
    for stream in range(N_STREAMS):
        at[stream] += (passed >> np.uint64(stream * STREAM_BITS)) & bits


@kernel
def _own_ones(codes: Bytes, ones: Halves, first: np.uint8, last: np.uint8, own: Halves) -> None:
    for i in range(len(ones)):
        own[i] = ones[i] if (codes[i] >= first) & (codes[i] <= last) else np.uint16(0)


@kernel
def numbers_by_four(
    stored: Bytes, at: Bits64, is_empty: Bytes, codes: Bytes, ones: Halves, own: Halves, numbers: Halves
) -> None:
    """`numbers_one_by_one`, four at a time. `own` is room to work in, as long as a tile.

    `is_empty` says which of the streams have no numbers.
    """
    m = len(ones)
    stop = -(-m // 4) * 4
    for i in range(stop):
        numbers[i] = np.uint16(0)
    for i in range(m, stop):
        own[i] = np.uint16(0)
    for stream in range(N_STREAMS):
        if not is_empty[stream]:
            first = 1 if stream == 0 else FIRST_BODY_CODE if stream == 1 else FIRST_REST_CODE
            last = FIRST_BODY_CODE - 1 if stream == 0 else FIRST_REST_CODE - 1 if stream == 1 else N_CODES
            _own_ones(codes, ones, np.uint8(first), np.uint8(last), own[:m])
            at[stream] = add_numbers(stored, at[stream], own[:stop], numbers[:stop])


@kernel
def tile_values(
    base: Halves, codes: Bytes, numbers: Halves, cells: Bytes, half: int, edges: Floats, values: Halves
) -> None:
    """The bf16 that codes and fine numbers say, counted from their `tile_edges`; the base's for code 0.

    `half` is 1 where cells have no numbers: then the one in their middle. At the base's place, the base's own bits.
    """
    edge_bits, middle = edges.view(np.int32), np.int32(half)
    for i in range(len(base)):
        code, low, own = np.int32(codes[i]), np.int32(cells[i]), np.int32(base[i])
        is_cell = code >= np.int32(FIRST_REST_CODE)
        cell = np.int32(np.int32(code - np.int32(FIRST_REST_CODE + ZERO_CELL)) << low)
        cell = np.int32(cell + np.int32(np.int32(middle << low) >> np.int32(1)))
        down = np.int32(0) if is_cell else np.int32(np.int32(code & np.int32(1)) - np.int32(1))
        offset = np.int32(np.int32(np.int32(numbers[i]) ^ down) - down)
        offset = np.int32(offset + cell) if is_cell else offset
        place = np.int32(past_place(edge_bits[i], down) + offset)
        sign = np.int32(place >> np.int32(31))
        magnitude = np.int32(np.int32(np.int32(place ^ sign) - sign) & np.int32(0x7FFF))
        value = np.int32(magnitude | np.int32(sign & np.int32(0x8000)))
        is_own = (place == place_of(own)) | (code == np.int32(0))
        values[i] = np.uint16(own if is_own else value)


@kernel
def tile_differences(
    base: Halves, values: Halves, codes: Bytes, limit: np.float32, wide: Floats, other: Floats, deltas: Floats
) -> None:
    """Deltas to `values`. Cells only hold deltas below `limit`: what their middles say beyond it is cut to it."""
    widened(base, wide)
    widened(values, other)
    for i in range(len(base)):
        difference = other[i] - wide[i]
        difference = np.float32(0.0) if other[i] == wide[i] else difference
        nearest = limit if difference > np.float32(0.0) else -limit
        is_inside = (abs(difference) < limit) | (codes[i] < np.uint8(FIRST_REST_CODE))
        deltas[i] = difference if is_inside else nearest


@kernel
def tile_centroids(contexts: Bytes, codes: Bytes, kept: Integers, centroids: Floats, deltas: Floats) -> None:
    """Put the centroid by context and code where `kept` has no ones for the code: its value is not known.

    `centroids` of the others are 0. Masks, not branches: what is known alternates at random.
    """
    centroid_bits, bits = centroids.view(np.int32), deltas.view(np.int32)
    for i in range(len(codes)):
        code = np.uint64(codes[i])
        slot = np.uint64(contexts[i]) * np.uint64(N_CODES) + code
        bits[i] = np.int32(bits[i] & kept[code]) | centroid_bits[slot]


@kernel
def put_exceptions(stored: Bytes, first: int, values: Halves) -> None:
    """Put the bits of exceptions, which are described from byte `first` on, in their places."""
    places = exception_places(stored, first, len(values))
    bits = first + 4 * n_chunks_of(len(values)) + 2 * len(places)
    for e in range(len(places)):
        values[np.uint64(places[e])] = half_at(stored, bits + 2 * e)


@kernel
def except_deltas(
    stored: Bytes, first: int, base: Halves, codes: Bytes, kept: Integers, limit: np.float32, deltas: Floats
) -> None:
    """`put_exceptions` for deltas: of elements whose value is known."""
    places = exception_places(stored, first, len(base))
    own_bits = first + 4 * n_chunks_of(len(base)) + 2 * len(places)
    pair = np.empty(2, np.float32)
    bits = pair.view(np.int32)
    for e in range(len(places)):
        position = np.uint64(places[e])
        bits[0] = np.int32(np.int32(base[position]) << np.int32(16))
        bits[1] = np.int32(np.int32(half_at(stored, own_bits + 2 * e)) << np.int32(16))
        code = codes[position]
        if kept[np.uint64(code)] != 0:
            deltas[position] = _limited(pair[0], pair[1], code, limit)


@kernel
def _limited(own: np.float32, other: np.float32, code: np.uint8, limit: np.float32) -> np.float32:
    """What `tile_differences` says of one element."""
    difference = np.float32(0.0) if other == own else np.float32(other - own)
    nearest = limit if difference > np.float32(0.0) else np.float32(-limit)
    return difference if (abs(difference) < limit) | (code < np.uint8(FIRST_REST_CODE)) else nearest
