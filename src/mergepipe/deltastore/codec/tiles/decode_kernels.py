"""Kernels that turn the codes and residuals of one tile back into bf16 values and deltas.

Format: "BANDS" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.entropy.rans import SKIPPED, Bits16
from mergepipe.deltastore.codec.generic.byte_lookup import look_up
from mergepipe.deltastore.codec.piece_headers import NO_WIDTH_INDEX, exception_positions, n_chunks_in, read_u16
from mergepipe.deltastore.codec.residuals.bit_unpacking import count_ones, unpack_stream_by_4
from mergepipe.deltastore.codec.tiles.element_codes import (
    BF16_MANTISSA_BITS,
    F16_MANTISSA_BITS,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    N_CODES,
    ZERO_CELL,
    Integers,
    first_ordinal_past,
    float_value,
    ordinal_of,
    template,
    value_scale,
    value_shift,
    widen,
    width_index,
)
from mergepipe.kernels.compilation.compiled import Bits64, Bytes, Floats, kernel

STREAM_BITS = 21
"""Bits of a stream position inside one tile: one 64-bit word holds the positions of all three streams."""
N_STREAMS = 3


@template
def _tile_contexts_of(
    base: Bits16, mantissa_bits: int, lows: Bytes, cell_bits_C: Bytes, n_contexts: int, exponents: Bytes,
    contexts: Bytes, cell_bits: Bytes,
) -> None:  # fmt: skip
    """`tile_contexts` with the bits of the mantissa as a constant."""
    m, shift = len(base), np.uint16(mantissa_bits)
    for i in range(m):
        exponents[i] = np.uint8((base[i] & np.uint16(0x7FFF)) >> shift)
        contexts[i] = np.uint8(0)
        cell_bits[i] = cell_bits_C[0]
    for c in range(n_contexts - 1):
        low, step = lows[c], np.uint8(cell_bits_C[c + 1] - cell_bits_C[c])
        for i in range(m):
            is_below = np.uint8(-np.uint8(exponents[i] < low))
            contexts[i] -= is_below
            cell_bits[i] += step & is_below
    for i in range(m, len(contexts)):
        contexts[i] = np.uint8(SKIPPED)


@kernel
def tile_contexts(
    base: Bits16, mantissa_bits: int, lows: Bytes, cell_bits_C: Bytes, n_contexts: int, exponents: Bytes,
    contexts: Bytes, cell_bits: Bytes,
) -> None:  # fmt: skip
    """Write the context of each element, by its base's exponent, and its `cell_bits`; padding gets `SKIPPED`."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _tile_contexts_of(base, F16_MANTISSA_BITS, lows, cell_bits_C, n_contexts, exponents, contexts, cell_bits)
    else:
        _tile_contexts_of(base, BF16_MANTISSA_BITS, lows, cell_bits_C, n_contexts, exponents, contexts, cell_bits)


@template
def _tile_edges_of(base: Bits16, mantissa_bits: int, codes: Bytes, cuts: Floats, edges: Floats) -> None:
    """`tile_edges` with the bits of the mantissa as a constant."""
    cut0, cut1, cut2 = cuts[0], cuts[1], cuts[2]
    widen(base, mantissa_bits, edges)
    for i in range(len(base)):
        code = codes[i]
        cut = cut1 if code < np.uint8(FIRST_BODY_CODE) else cut2
        cut = cut0 if code < np.uint8(3) else cut
        cut = cut if code & np.uint8(1) else -cut
        edges[i] += cut if code < np.uint8(FIRST_CELL_CODE) else np.float32(0.0)


@kernel
def tile_edges(base: Bits16, mantissa_bits: int, codes: Bytes, cuts: Floats, edges: Floats) -> None:
    """Write the values that residuals are counted from: base plus or minus the band's cut; the base for cells."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _tile_edges_of(base, F16_MANTISSA_BITS, codes, cuts, edges)
    else:
        _tile_edges_of(base, BF16_MANTISSA_BITS, codes, cuts, edges)


@kernel
def tile_residual_masks(
    edges: Floats,
    codes: Bytes,
    cell_bits: Bytes,
    top: np.int32,
    table: Bytes,
    slots: Bytes,
    widths: Bytes,
    masks: Bits16,
) -> None:
    """Write a mask for each element with as many low ones as its residual has bits.

    Widths of bands are looked up in `table` (from `piece_headers.read_widths`) by `tile_edges`; those of cells are
    `cell_bits`. `slots` and `widths` are work arrays.
    """
    m, edge_bits = len(codes), edges.view(np.int32)
    for i in range(m):
        code = np.int32(codes[i])
        is_band = (code > np.int32(0)) & (code < np.int32(FIRST_CELL_CODE))
        slot = width_index(code, edge_bits[i], top)
        slots[i] = np.uint8(slot if is_band else np.int32(NO_WIDTH_INDEX))
    look_up(table, slots, m, widths)
    for i in range(m):
        cell_width = cell_bits[i] if codes[i] >= np.uint8(FIRST_CELL_CODE) else np.uint8(0)
        width = np.uint16(widths[i] | cell_width)
        masks[i] = np.uint16(np.uint16(np.uint16(1) << width) - np.uint16(1))


@kernel
def unpack_tile(stored: Bytes, positions: Bits64, codes: Bytes, masks: Bits16, residuals: Bits16) -> None:
    """Unpack the residuals of one tile from three streams, whose bit positions `positions` advance."""
    shifts, position_mask = np.zeros(N_CODES, np.uint64), np.uint64((1 << STREAM_BITS) - 1)
    shifts[FIRST_BODY_CODE:FIRST_CELL_CODE], shifts[FIRST_CELL_CODE:] = STREAM_BITS, 2 * STREAM_BITS
    starts = np.zeros(64, np.uint64)
    for stream in range(N_STREAMS):
        starts[stream * STREAM_BITS] = positions[stream]
    consumed = np.uint64(0)
    for i in range(len(masks)):
        mask, shift = np.uint64(masks[i]), shifts[np.uint64(codes[i])]
        position = starts[shift] + ((consumed >> shift) & position_mask)
        byte = position >> np.uint64(3)
        loaded = np.uint64(stored[byte]) | (np.uint64(stored[byte + np.uint64(1)]) << np.uint64(8))
        loaded |= np.uint64(stored[byte + np.uint64(2)]) << np.uint64(16)
        residuals[i] = np.uint16((loaded >> (position & np.uint64(7))) & mask)
        consumed += count_ones(mask) << shift
    for stream in range(N_STREAMS):
        positions[stream] += (consumed >> np.uint64(stream * STREAM_BITS)) & position_mask


@kernel
def _select_masks(codes: Bytes, masks: Bits16, first: np.uint8, last: np.uint8, selected: Bits16) -> None:
    """Select the masks of the codes from `first` to `last`; 0 for the others."""
    for i in range(len(masks)):
        selected[i] = masks[i] if (codes[i] >= first) & (codes[i] <= last) else np.uint16(0)


@kernel
def unpack_tile_by_4(
    stored: Bytes, positions: Bits64, is_empty: Bytes, codes: Bytes, masks: Bits16, selected: Bits16, residuals: Bits16
) -> None:
    """Unpack a tile like `unpack_tile`, four residuals at a time. `selected` is a work array as long as a tile.

    `is_empty` says which streams have no residuals.
    """
    m = len(masks)
    stop = -(-m // 4) * 4
    for i in range(stop):
        residuals[i] = np.uint16(0)
    for i in range(m, stop):
        selected[i] = np.uint16(0)
    for stream in range(N_STREAMS):
        if not is_empty[stream]:
            first = 1 if stream == 0 else FIRST_BODY_CODE if stream == 1 else FIRST_CELL_CODE
            last = FIRST_BODY_CODE - 1 if stream == 0 else FIRST_CELL_CODE - 1 if stream == 1 else N_CODES
            _select_masks(codes, masks, np.uint8(first), np.uint8(last), selected[:m])
            positions[stream] = unpack_stream_by_4(stored, positions[stream], selected[:stop], residuals[:stop])


@template
def _tile_values_of(
    base: Bits16, mantissa_bits: int, codes: Bytes, residuals: Bits16, cell_bits: Bytes, is_middle: int, edges: Floats,
    values: Bits16,
) -> None:  # fmt: skip
    """`tile_values` with the bits of the mantissa as a constant."""
    middle, shift = np.int32(is_middle), value_shift(mantissa_bits)
    scale = np.float32(np.float32(1.0) / value_scale(mantissa_bits))
    for i in range(len(base)):
        code, cell_width, base_bits = np.int32(codes[i]), np.int32(cell_bits[i]), np.int32(base[i])
        is_cell = code >= np.int32(FIRST_CELL_CODE)
        cell = np.int32(np.int32(code - np.int32(FIRST_CELL_CODE + ZERO_CELL)) << cell_width)
        cell = np.int32(cell + np.int32(np.int32(middle << cell_width) >> np.int32(1)))
        down = np.int32(0) if is_cell else np.int32(np.int32(code & np.int32(1)) - np.int32(1))
        offset = np.int32(np.int32(np.int32(residuals[i]) ^ down) - down)
        offset = np.int32(offset + cell) if is_cell else offset
        ordinal = np.int32(first_ordinal_past(edges[i], down, shift, scale) + offset)
        sign = np.int32(ordinal >> np.int32(31))
        magnitude = np.int32(np.int32(np.int32(ordinal ^ sign) - sign) & np.int32(0x7FFF))
        value = np.int32(magnitude | np.int32(sign & np.int32(0x8000)))
        is_base = (ordinal == ordinal_of(base_bits)) | (code == np.int32(0))
        values[i] = np.uint16(base_bits if is_base else value)


@kernel
def tile_values(
    base: Bits16, mantissa_bits: int, codes: Bytes, residuals: Bits16, cell_bits: Bytes, is_middle: int, edges: Floats,
    values: Bits16,
) -> None:  # fmt: skip
    """Write the values that codes and residuals give, relative to `tile_edges`; the base's for code 0.

    `is_middle` is 1 where cells have no residuals: the middle of the cell is taken. At the base's ordinal, the base's
    bits.
    """
    if mantissa_bits == F16_MANTISSA_BITS:
        _tile_values_of(base, F16_MANTISSA_BITS, codes, residuals, cell_bits, is_middle, edges, values)
    else:
        _tile_values_of(base, BF16_MANTISSA_BITS, codes, residuals, cell_bits, is_middle, edges, values)


@template
def _tile_deltas_of(
    base: Bits16,
    mantissa_bits: int,
    values: Bits16,
    codes: Bytes,
    limit: np.float32,
    base_values: Floats,
    expert_values: Floats,
    deltas: Floats,
) -> None:
    """`tile_deltas` with the bits of the mantissa as a constant."""
    widen(base, mantissa_bits, base_values)
    widen(values, mantissa_bits, expert_values)
    for i in range(len(base)):
        difference = expert_values[i] - base_values[i]
        difference = np.float32(0.0) if expert_values[i] == base_values[i] else difference
        nearest = limit if difference > np.float32(0.0) else -limit
        is_inside = (abs(difference) < limit) | (codes[i] < np.uint8(FIRST_CELL_CODE))
        deltas[i] = difference if is_inside else nearest


@kernel
def tile_deltas(
    base: Bits16,
    mantissa_bits: int,
    values: Bits16,
    codes: Bytes,
    limit: np.float32,
    base_values: Floats,
    expert_values: Floats,
    deltas: Floats,
) -> None:
    """Write the deltas from base to `values`; estimates from the middles of cells are clamped to `limit`."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _tile_deltas_of(base, F16_MANTISSA_BITS, values, codes, limit, base_values, expert_values, deltas)
    else:
        _tile_deltas_of(base, BF16_MANTISSA_BITS, values, codes, limit, base_values, expert_values, deltas)


@kernel
def apply_centroids(contexts: Bytes, codes: Bytes, exact_masks: Integers, centroids: Floats, deltas: Floats) -> None:
    """Add the centroid by context and code where `exact_masks` has no ones for the code, whose delta is 0 before.

    Centroids of codes with exact deltas are 0. Masks, not branches: exact and inexact elements alternate at random.
    """
    centroid_bits, bits = centroids.view(np.int32), deltas.view(np.int32)
    for i in range(len(codes)):
        code = np.uint64(codes[i])
        slot = np.uint64(contexts[i]) * np.uint64(N_CODES) + code
        bits[i] = np.int32(bits[i] & exact_masks[code]) | centroid_bits[slot]


@kernel
def replace_exception_values(stored: Bytes, first: int, values: Bits16) -> None:
    """Replace the values of exceptions, which are stored from byte `first` on."""
    positions = exception_positions(stored, first, len(values))
    bits = first + 4 * n_chunks_in(len(values)) + 2 * len(positions)
    for e in range(len(positions)):
        values[np.uint64(positions[e])] = read_u16(stored, bits + 2 * e)


@kernel
def replace_exception_deltas(
    stored: Bytes, first: int, base: Bits16, mantissa_bits: int, codes: Bytes, exact_masks: Integers, limit: np.float32,
    deltas: Floats,
) -> None:  # fmt: skip
    """Replace the deltas of exceptions among the elements whose delta is exact at this level."""
    positions = exception_positions(stored, first, len(base))
    first_bits = first + 4 * n_chunks_in(len(base)) + 2 * len(positions)
    shift, scale = value_shift(mantissa_bits), value_scale(mantissa_bits)
    for e in range(len(positions)):
        position = np.uint64(positions[e])
        base_value = float_value(np.int32(base[position]), shift, scale)
        expert_value = float_value(np.int32(read_u16(stored, first_bits + 2 * e)), shift, scale)
        code = codes[position]
        if exact_masks[np.uint64(code)] != 0:
            deltas[position] = _delta_of(base_value, expert_value, code, limit)


@kernel
def _delta_of(base_value: np.float32, expert_value: np.float32, code: np.uint8, limit: np.float32) -> np.float32:
    """The delta of one element, by the rules of `tile_deltas`."""
    difference = np.float32(0.0) if expert_value == base_value else np.float32(expert_value - base_value)
    nearest = limit if difference > np.float32(0.0) else np.float32(-limit)
    return difference if (abs(difference) < limit) | (code < np.uint8(FIRST_CELL_CODE)) else nearest
