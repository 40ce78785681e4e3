"""Kernels that turn the codes and residuals of one stream of a tile back into 16-bit values or deltas."""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.element_codes import (
    BF16_MANTISSA_BITS,
    F16_MANTISSA_BITS,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    N_CODES,
    ZERO_CELL,
    first_ordinal_past,
    float_value,
    ordinal_of,
    value_scale,
    value_shift,
    width_index,
)
from mergepipe.deltastore.codec.llvm_vectors import shift_left
from mergepipe.deltastore.codec.piece_headers import exception_positions, n_chunks_in, read_u16
from mergepipe.deltastore.codec.rans import Bits16
from mergepipe.kernels.compiled import Bytes, Floats, kernel, template


@template
def _band_edges_of(
    base: Bits16, mantissa_bits: int, codes: Bytes, cuts: Floats, top: np.int32, edges: Floats, slots: Bytes
) -> None:
    """`band_edges` with the bits of the mantissa as a constant."""
    cut0, cut1, cut2 = cuts[0], cuts[1], cuts[2]
    shift, scale = value_shift(mantissa_bits), value_scale(mantissa_bits)
    for i in range(len(base)):
        code = np.int32(codes[i])
        cut = cut1 if code < np.int32(FIRST_BODY_CODE) else cut2
        cut = cut0 if code < np.int32(3) else cut
        cut = cut if code & np.int32(1) else -cut
        edge = np.float32(float_value(np.int32(base[i]), shift, scale) + cut)
        edges[i] = edge
        slots[i] = np.uint8(width_index(code, edge.view(np.int32), top))


@kernel
def band_edges(
    base: Bits16, mantissa_bits: int, codes: Bytes, cuts: Floats, top: np.int32, edges: Floats, slots: Bytes
) -> None:
    """Write the values that residuals of bands are counted from, base plus or minus cut, and their `width_index`."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _band_edges_of(base, F16_MANTISSA_BITS, codes, cuts, top, edges, slots)
    else:
        _band_edges_of(base, BF16_MANTISSA_BITS, codes, cuts, top, edges, slots)


@kernel
def residual_masks(widths: Bytes, masks: Bits16) -> None:
    """Write masks with as many low ones as residuals have bits; masks beyond the widths are 0."""
    for i in range(len(widths)):
        masks[i] = np.uint16(shift_left(np.uint16(1), np.uint16(widths[i])) - np.uint16(1))
    for i in range(len(widths), len(masks)):
        masks[i] = np.uint16(0)


@template
def _value_at(ordinal: np.int32, base_bits: np.int32) -> np.int32:
    """The bits of the value of an ordinal: those of the base where it is the base's."""
    sign = np.int32(ordinal >> np.int32(31))
    magnitude = np.int32(np.int32(np.int32(ordinal ^ sign) - sign) & np.int32(0x7FFF))
    value = np.int32(magnitude | np.int32(sign & np.int32(0x8000)))
    return base_bits if ordinal == ordinal_of(base_bits) else value


@template
def _band_value(
    base_bits: np.int32, code: np.uint8, residual: np.uint16, edge: np.float32, shift: np.int32,
    inverse_scale: np.float32,
) -> np.int32:  # fmt: skip
    """The bits of the value that a band's residual leads to from its edge."""
    down = np.int32(np.int32(np.int32(code) & np.int32(1)) - np.int32(1))
    offset = np.int32(np.int32(np.int32(residual) ^ down) - down)
    return _value_at(np.int32(first_ordinal_past(edge, down, shift, inverse_scale) + offset), base_bits)


@template
def _cell_value(base_bits: np.int32, code: np.uint8, residual: np.uint16, width: np.uint8) -> np.int32:
    """The bits of the value that a cell's residual leads to."""
    cell = np.int32(np.int32(code) - np.int32(FIRST_CELL_CODE + ZERO_CELL))
    step = np.int32(shift_left(cell, np.int32(width)) + np.int32(residual))
    return _value_at(np.int32(ordinal_of(base_bits) + step), base_bits)


@template
def _band_values_of(
    base: Bits16, mantissa_bits: int, codes: Bytes, residuals: Bits16, edges: Floats, values: Bits16
) -> None:
    """`band_values` with the bits of the mantissa as a constant."""
    shift, inverse = value_shift(mantissa_bits), np.float32(np.float32(1.0) / value_scale(mantissa_bits))
    for i in range(len(base)):
        values[i] = np.uint16(_band_value(np.int32(base[i]), codes[i], residuals[i], edges[i], shift, inverse))


@kernel
def band_values(
    base: Bits16, mantissa_bits: int, codes: Bytes, residuals: Bits16, edges: Floats, values: Bits16
) -> None:
    """Write the values of elements in bands, from `band_edges` and residuals."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _band_values_of(base, F16_MANTISSA_BITS, codes, residuals, edges, values)
    else:
        _band_values_of(base, BF16_MANTISSA_BITS, codes, residuals, edges, values)


@kernel
def cell_values(base: Bits16, codes: Bytes, residuals: Bits16, widths: Bytes, values: Bits16) -> None:
    """Write the values of elements in cells."""
    for i in range(len(base)):
        values[i] = np.uint16(_cell_value(np.int32(base[i]), codes[i], residuals[i], widths[i]))


@template
def _difference(base_bits: np.int32, value: np.int32, shift: np.int32, scale: np.float32) -> np.float32:
    """The delta from the base's value; 0 where both are the same infinity."""
    base_value, expert_value = float_value(base_bits, shift, scale), float_value(value, shift, scale)
    return np.float32(0.0) if expert_value == base_value else np.float32(expert_value - base_value)


@template
def _band_deltas_of(
    base: Bits16, mantissa_bits: int, codes: Bytes, residuals: Bits16, edges: Floats, deltas: Floats
) -> None:
    """`band_deltas` with the bits of the mantissa as a constant."""
    shift, scale = value_shift(mantissa_bits), value_scale(mantissa_bits)
    inverse = np.float32(np.float32(1.0) / scale)
    for i in range(len(base)):
        base_bits = np.int32(base[i])
        value = _band_value(base_bits, codes[i], residuals[i], edges[i], shift, inverse)
        deltas[i] = _difference(base_bits, value, shift, scale)


@kernel
def band_deltas(
    base: Bits16, mantissa_bits: int, codes: Bytes, residuals: Bits16, edges: Floats, deltas: Floats
) -> None:
    """Write the deltas of elements in bands, from `band_edges` and residuals."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _band_deltas_of(base, F16_MANTISSA_BITS, codes, residuals, edges, deltas)
    else:
        _band_deltas_of(base, BF16_MANTISSA_BITS, codes, residuals, edges, deltas)


@template
def _clamped(difference: np.float32, limit: np.float32) -> np.float32:
    """The nearest delta that is not larger than `limit`."""
    nearest = limit if difference > np.float32(0.0) else np.float32(-limit)
    return difference if abs(difference) < limit else nearest


@template
def _cell_deltas_of(
    base: Bits16, mantissa_bits: int, codes: Bytes, residuals: Bits16, widths: Bytes, limit: np.float32, deltas: Floats
) -> None:
    """`cell_deltas` with the bits of the mantissa as a constant."""
    shift, scale = value_shift(mantissa_bits), value_scale(mantissa_bits)
    for i in range(len(base)):
        base_bits = np.int32(base[i])
        value = _cell_value(base_bits, codes[i], residuals[i], widths[i])
        deltas[i] = _clamped(_difference(base_bits, value, shift, scale), limit)


@kernel
def cell_deltas(
    base: Bits16, mantissa_bits: int, codes: Bytes, residuals: Bits16, widths: Bytes, limit: np.float32, deltas: Floats
) -> None:
    """Write the deltas of elements in cells, clamped to `limit`, which estimates may exceed."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _cell_deltas_of(base, F16_MANTISSA_BITS, codes, residuals, widths, limit, deltas)
    else:
        _cell_deltas_of(base, BF16_MANTISSA_BITS, codes, residuals, widths, limit, deltas)


@kernel
def cell_middles(widths: Bytes, residuals: Bits16) -> None:
    """Write the residuals of the middles of cells."""
    for i in range(len(widths)):
        residuals[i] = np.uint16(shift_left(np.uint16(1), np.uint16(widths[i])) >> np.uint16(1))


@kernel
def centroid_deltas(contexts: Bytes, codes: Bytes, centroids: Floats, deltas: Floats) -> None:
    """Write the centroids by context and code."""
    for i in range(len(codes)):
        deltas[i] = centroids[np.uint64(contexts[i]) * np.uint64(N_CODES) + np.uint64(codes[i])]


@kernel
def replace_exception_values(stored: Bytes, first: int, values: Bits16) -> None:
    """Replace the values of exceptions, which are stored from byte `first` on."""
    positions = exception_positions(stored, first, len(values))
    bits = first + 4 * n_chunks_in(len(values)) + 2 * len(positions)
    for e in range(len(positions)):
        values[np.uint64(positions[e])] = read_u16(stored, bits + 2 * e)


@kernel
def replace_exception_deltas(
    stored: Bytes, first: int, base: Bits16, mantissa_bits: int, codes: Bytes, exact_codes: Bytes, limit: np.float32,
    deltas: Floats,
) -> None:  # fmt: skip
    """Replace the deltas of exceptions among the elements whose delta is exact at this level."""
    positions = exception_positions(stored, first, len(base))
    first_bits = first + 4 * n_chunks_in(len(base)) + 2 * len(positions)
    shift, scale = value_shift(mantissa_bits), value_scale(mantissa_bits)
    for e in range(len(positions)):
        position = np.uint64(positions[e])
        code = codes[position]
        if exact_codes[np.uint64(code)]:
            expert_bits = np.int32(read_u16(stored, first_bits + 2 * e))
            difference = _difference(np.int32(base[position]), expert_bits, shift, scale)
            deltas[position] = difference if code < np.uint8(FIRST_CELL_CODE) else _clamped(difference, limit)
