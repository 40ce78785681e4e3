"""The loops that turn codes and fine numbers back into bf16 values and deltas."""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.loops import (
    FIRST_REST_CODE,
    N_CODES,
    TILE,
    Integers,
    past_place,
    place_of,
    widened,
    width_slot,
)
from mergepipe.deltastore.rans import Halves
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, Floats, kernel

STREAM_BITS = 21
"""Bits of a position inside one tile: three streams move on in one word."""


@kernel
def _choose(base: Halves, contexts: Bytes, codes: Bytes, chosen: Integers, slots: Halves) -> int:
    """Which elements of a tile have a code that is not 0, how many, and the `width_slot` of each."""
    m = len(base)
    has_zero = np.uint8(0)
    for i in range(m):
        has_zero |= np.uint8(codes[i] == np.uint8(0))
    if not has_zero:
        for i in range(m):
            slots[i] = width_slot(contexts[i], codes[i], base[i])
        return m
    count = np.uint64(0)
    for i in range(m):
        chosen[count] = np.int32(i)
        count += np.uint64(codes[i] != np.uint8(0))
    for k in range(np.int64(count)):
        j = np.uint64(chosen[k])
        slots[k] = width_slot(contexts[j], codes[j], base[j])
    return int(count)


@kernel
def _take_offsets(
    slots: Halves, count: int, entries: Bits64, slot_starts: Integers, words: Bits32, at: Counts, offsets: Integers
) -> None:
    """Places from a band's edge, or from the base: the fine numbers of one tile, which `at` moves on over."""
    five, low5, bits = np.uint64(5), np.uint64(31), np.uint64((1 << STREAM_BITS) - 1)
    passed = np.uint64(0)
    for i in range(count):
        slot = np.uint64(slots[i])
        entry = entries[slot]
        width, shift = entry & np.uint64(63), (entry >> np.uint64(8)) & np.uint64(63)
        position = np.uint64(at[shift]) + ((passed >> shift) & bits)
        word = position >> five
        both = np.uint64(words[word]) | (np.uint64(words[word + np.uint64(1)]) << np.uint64(32))
        fine = (both >> (position & low5)) & ((np.uint64(1) << width) - np.uint64(1))
        down = np.int64(entry) >> 63
        offsets[i] = np.int32(((np.int64(fine) ^ down) - down) + np.int64(slot_starts[slot]))
        passed += width << shift
    for stream in range(3):
        shift = np.uint64(stream * STREAM_BITS)
        at[shift] += np.int64((passed >> shift) & bits)


@kernel
def _values_past(base: Halves, cuts: Floats, offsets: Integers, edges: Floats, values: Halves) -> None:
    """The bf16 `offsets` places past the first one at or past base + cut, downwards where the cut is negative.

    At the base's place, the base's own bits. `edges` is room to work in.
    """
    m = len(base)
    edge_bits = edges.view(np.int32)
    widened(base, edges)
    for i in range(m):
        edges[i] += cuts[i]
    for i in range(m):
        down = np.int32(-1) if cuts[i] < np.float32(0.0) else np.int32(0)
        place = np.int32(past_place(edge_bits[i], down) + offsets[i])
        own = np.int32(base[i])
        sign = np.int32(place >> np.int32(31))
        magnitude = np.int32(np.int32(np.int32(place ^ sign) - sign) & np.int32(0x7FFF))
        value = np.int32(magnitude | np.int32(sign & np.int32(0x8000)))
        values[i] = np.uint16(own if place == place_of(own) else value)


@kernel
def take_values(
    base: Halves,
    contexts: Bytes,
    codes: Bytes,
    entries: Bits64,
    slot_cuts: Floats,
    slot_starts: Integers,
    words: Bits32,
    starts: Counts,
    n: int,
    values: Halves,
) -> None:
    """The bf16 that codes and fine numbers say: counted from the band's edge, or from the base; none for code 0.

    Fine numbers come in three streams (head, body, rest) that begin at the bits `starts` of `words`; `starts` becomes
    where they end. Tables are by `width_slot`: `entries` as `fines.slot_entries` makes them, `slot_cuts` signed, 0 for
    cells, `slot_starts` differences of place, 0 for bands. Never reads outside its arrays: `words` has room for 16 bits
    an element after the last start.
    """
    chosen, offsets = np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    slots, some, found = np.empty(TILE, np.uint16), np.empty(TILE, np.uint16), np.empty(TILE, np.uint16)
    cuts, edges = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    at = np.zeros(64, np.int64)
    for stream in range(3):
        at[stream * STREAM_BITS] = starts[stream]
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        own, out = base[tile:stop], values[tile:stop]
        count = _choose(own, contexts[tile:stop], codes[tile:stop], chosen, slots)
        _take_offsets(slots, count, entries, slot_starts, words, at, offsets)
        for i in range(count):
            cuts[i] = slot_cuts[np.uint64(slots[i])]
        if count == stop - tile:
            _values_past(own, cuts[:count], offsets, edges, out)
        else:
            for i in range(count):
                some[i] = own[np.uint64(chosen[i])]
            _values_past(some[:count], cuts[:count], offsets, edges, found)
            for i in range(count):
                out[np.uint64(chosen[i])] = found[i]
    for stream in range(3):
        starts[stream] = at[stream * STREAM_BITS]


@kernel
def difference_rows(base: Halves, values: Halves, codes: Bytes, limit: np.float32, n: int, deltas: Floats) -> None:
    """Deltas to `values`. Cells only hold deltas below `limit`: what their middles say beyond it is cut to it."""
    wide, other = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        _tile_differences(base[tile:stop], values[tile:stop], codes[tile:stop], limit, wide, other, deltas[tile:stop])


@kernel
def _tile_differences(
    base: Halves, values: Halves, codes: Bytes, limit: np.float32, wide: Floats, other: Floats, deltas: Floats
) -> None:
    widened(base, wide)
    widened(values, other)
    for i in range(len(base)):
        difference = other[i] - wide[i]
        difference = np.float32(0.0) if other[i] == wide[i] else difference
        nearest = limit if difference > np.float32(0.0) else -limit
        is_inside = (abs(difference) < limit) | (codes[i] < np.uint8(FIRST_REST_CODE))
        deltas[i] = difference if is_inside else nearest


@kernel
def centroid_rows(contexts: Bytes, codes: Bytes, is_value: Bytes, centroids: Floats, n: int, deltas: Floats) -> None:
    """Put the centroid by context and code where `is_value` says of the code that its value is not known."""
    # Masks, not branches: what is known alternates at random.
    kept, centroid_bits, bits = np.empty(N_CODES, np.uint32), centroids.copy().view(np.uint32), deltas.view(np.uint32)
    for known in range(N_CODES):
        kept[known] = np.uint32(0xFFFFFFFF) if is_value[known] else np.uint32(0)
        if is_value[known]:
            centroid_bits[known::N_CODES] = 0
    for i in range(n):
        code = np.uint64(codes[i] & np.uint8(N_CODES - 1))
        slot = np.uint64(contexts[i]) * np.uint64(N_CODES) + code
        bits[i] = np.uint32(bits[i] & kept[code]) | centroid_bits[slot]
