"""Kernels that turn a bf16 block and its base into codes and residuals, tile by tile.

Format: ordinals, contexts, codes and "Widths of bands" in "BANDS", docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.entropy.rans import Bits16
from mergepipe.deltastore.codec.error_sums import sum_tile
from mergepipe.deltastore.codec.generic.byte_lookup import look_up
from mergepipe.deltastore.codec.residuals.streams import WIDTH_COUNTS
from mergepipe.deltastore.codec.residuals.widths import FIRST_STEP_COUNT
from mergepipe.deltastore.codec.tiles.element_codes import (
    BF16_MANTISSA_BITS,
    F16_MANTISSA_BITS,
    FIRST_CELL_CODE,
    LAST_CELL_CODE,
    QUANTILE_BUCKETS,
    TILE,
    ZERO_CELL,
    Integers,
    first_ordinal_past,
    float_value,
    ordinal_of,
    top_edge_exponent,
    value_scale,
    value_shift,
    width_index,
)
from mergepipe.kernels.compilation.compiled import Bits32, Bytes, Doubles, Floats, kernel, template

_LAST_CELL = LAST_CELL_CODE - FIRST_CELL_CODE
_INFINITY = 0x7F800000


@kernel
def _as_float(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


@kernel
def _as_bits(value: np.float32) -> np.int32:
    return np.float32(value).view(np.int32)


@kernel
def _delta(base_value: np.float32, expert_value: np.float32) -> np.float32:
    """The delta as merges define it: 0 where both are the same infinity."""
    difference = np.float32(expert_value - base_value)
    return np.float32(0.0) if expert_value == base_value else difference


@kernel
def _magnitude(bits: np.int32) -> np.int32:
    return np.int32(bits & np.int32(0x7FFFFFFF))


@kernel
def _band_code(bits: np.int32, first: np.int32, second: np.int32) -> np.int32:
    """The code of a delta (its bits) inside a band."""
    magnitude = _magnitude(bits)
    code = np.int32(5) if magnitude < second else np.int32(3)
    code = np.int32(1) if magnitude >= first else code
    return np.int32(code - np.int32(bits >> np.int32(31)))


@kernel
def _band_edge(base: np.float32, bits: np.int32, first: np.int32, second: np.int32, third: np.int32) -> np.float32:
    """The edge of the band of a delta (its bits): base plus or minus the cut."""
    magnitude = _magnitude(bits)
    cut = second if magnitude >= second else third
    cut = first if magnitude >= first else cut
    signed = _as_float(np.int32(cut | np.int32(bits & np.int32(-0x80000000))))
    return np.float32(base + signed)


@kernel
def _band_residual(
    expert: np.int32, edge: np.float32, bits: np.int32, shift: np.int32, inverse_scale: np.float32
) -> np.int32:
    """The residual of an element in a band: its ordinal counted from the band's edge, away from the base."""
    down = np.int32(bits >> np.int32(31))
    first = first_ordinal_past(edge, down, shift, inverse_scale)
    return np.int32(np.int32(np.int32(ordinal_of(expert) - first) ^ down) - down)


@template
def _sample_indices_of(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, cuts: Integers, top: np.int32, indices: Integers
) -> None:
    """`sample_indices` with the bits of the mantissa as a constant."""
    first, second, third = cuts[0], cuts[1], cuts[2]
    value_bits, scale = value_shift(mantissa_bits), value_scale(mantissa_bits)
    inverse_scale = np.float32(np.float32(1.0) / scale)
    for i in range(len(base)):
        base_bits, expert_bits = np.int32(base[i]), np.int32(expert[i])
        base_value = float_value(base_bits, value_bits, scale)
        bits = _as_bits(_delta(base_value, float_value(expert_bits, value_bits, scale)))
        is_band = _magnitude(bits) >= third
        step = abs(np.int32(ordinal_of(expert_bits) - ordinal_of(base_bits)))
        edge = _band_edge(base_value, bits, first, second, third)
        residual = _band_residual(expert_bits, edge, bits, value_bits, inverse_scale) if is_band else step
        # the exponent of residual + 0.5, less its bias, is the number of bits
        exponent = np.int32(_as_bits(np.float32(np.float32(residual) + np.float32(0.5))) >> np.int32(23))
        length = np.int32(exponent - np.int32(126))
        width = length if (residual >= np.int32(0)) & (length < np.int32(16)) else np.int32(16)
        index = width_index(_band_code(bits, first, second), _as_bits(edge), top)
        width_count = np.int32(np.int32(index * np.int32(WIDTH_COUNTS)) + width)
        shift = np.int32(length - np.int32(4)) if length > np.int32(4) else np.int32(0)
        bucket = np.int32(np.int32(shift << np.int32(3)) + np.int32(residual >> np.int32(shift & np.int32(31))))
        step_count = np.int32(np.int32(np.int32(contexts[i]) * np.int32(QUANTILE_BUCKETS)) + bucket)
        indices[i] = width_count if is_band else np.int32(np.int32(FIRST_STEP_COUNT) + step_count)


@kernel
def _sample_indices(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, cuts: Integers, top: np.int32, indices: Integers
) -> None:
    """Write the index of the sample count that each element adds to."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _sample_indices_of(base, expert, F16_MANTISSA_BITS, contexts, cuts, top, indices)
    else:
        _sample_indices_of(base, expert, BF16_MANTISSA_BITS, contexts, cuts, top, indices)


@kernel
def count_sample(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, first_low: int, cuts: Integers, stride: int,
    counts: Bits32,
) -> None:  # fmt: skip
    """Add the elements of every `stride`th tile to the sample counts (`N_SAMPLE_COUNTS`). `cuts` are float32 bits."""
    indices, top = np.empty(TILE, np.int32), top_edge_exponent(first_low, cuts[0], mantissa_bits)
    n = len(base)
    for tile in range(0, n, TILE * stride):
        stop = min(tile + TILE, n)
        _sample_indices(base[tile:stop], expert[tile:stop], mantissa_bits, contexts[tile:stop], cuts, top, indices)
        for i in range(stop - tile):
            counts[np.uint64(indices[i])] += np.uint32(1)


@template
def _tile_residuals_of(
    base: Bits16, expert: Bits16, mantissa_bits: int, cell_bits: Bytes, cuts: Integers, top: np.int32, codes: Bytes,
    residuals: Integers, width_indices: Bytes, is_exception: Bytes, deltas: Floats,
) -> np.int32:  # fmt: skip
    """`tile_residuals` with the bits of the mantissa as a constant."""
    first, second, third = cuts[0], cuts[1], cuts[2]
    shift, scale = value_shift(mantissa_bits), value_scale(mantissa_bits)
    inverse_scale = np.float32(np.float32(1.0) / scale)
    largest = np.int32(0)
    for i in range(len(base)):
        base_bits, expert_bits = np.int32(base[i]), np.int32(expert[i])
        cell_width = np.int32(cell_bits[i] & np.uint8(15))
        base_value = float_value(base_bits, shift, scale)
        delta = _delta(base_value, float_value(expert_bits, shift, scale))
        bits = _as_bits(delta)
        magnitude = _magnitude(bits)
        largest = magnitude if magnitude > largest else largest
        step = np.int32(ordinal_of(expert_bits) - ordinal_of(base_bits))
        cell = np.int32(np.int32(step >> cell_width) + np.int32(ZERO_CELL))
        cell = np.int32(0) if cell < np.int32(0) else cell
        cell = np.int32(_LAST_CELL) if cell > np.int32(_LAST_CELL) else cell
        cell_residual = np.int32(step - np.int32(np.int32(cell - np.int32(ZERO_CELL)) << cell_width))
        code = _band_code(bits, first, second)
        edge = _band_edge(base_value, bits, first, second, third)
        band_residual = _band_residual(expert_bits, edge, bits, shift, inverse_scale)
        codes[i] = np.uint8(code if magnitude >= third else np.int32(cell + np.int32(FIRST_CELL_CODE)))
        residuals[i] = band_residual if magnitude >= third else cell_residual
        width_indices[i] = np.uint8(width_index(code, _as_bits(edge), top))
        # The other zero: beside a zero it has the base's ordinal, elsewhere decoding gives the positive zero.
        is_exception[i] = np.uint8(
            ((expert_bits == np.int32(0x8000)) | (step == np.int32(0))) & (expert_bits != base_bits)
        )
        deltas[i] = delta
    return largest


@kernel
def _tile_residuals(
    base: Bits16, expert: Bits16, mantissa_bits: int, cell_bits: Bytes, cuts: Integers, top: np.int32, codes: Bytes,
    residuals: Integers, width_indices: Bytes, is_exception: Bytes, deltas: Floats,
) -> np.int32:  # fmt: skip
    """Write codes and residuals of all elements; return the bits of the largest |delta|.

    Masks, not branches: elements in cells and in bands alternate at random.
    """
    if mantissa_bits == F16_MANTISSA_BITS:
        return _tile_residuals_of(
            base, expert, F16_MANTISSA_BITS, cell_bits, cuts, top, codes, residuals, width_indices, is_exception, deltas
        )
    return _tile_residuals_of(
        base, expert, BF16_MANTISSA_BITS, cell_bits, cuts, top, codes, residuals, width_indices, is_exception, deltas
    )


@template
def _tile_middles_of(
    base: Bits16, mantissa_bits: int, codes: Bytes, cell_bits: Bytes, limit: np.float32, deltas: Floats, middles: Floats
) -> None:
    """`tile_middles` with the bits of the mantissa as a constant."""
    shift, scale = value_shift(mantissa_bits), value_scale(mantissa_bits)
    for i in range(len(base)):
        base_bits, cell_width = np.int32(base[i]), np.int32(cell_bits[i] & np.uint8(15))
        cell = np.int32(np.int32(codes[i]) - np.int32(FIRST_CELL_CODE + ZERO_CELL))
        step = np.int32(np.int32(cell << cell_width) + np.int32(np.int32(np.int32(1) << cell_width) >> np.int32(1)))
        ordinal = np.int32(ordinal_of(base_bits) + step)
        sign = np.int32(ordinal >> np.int32(31))
        magnitude = np.int32(np.int32(np.int32(ordinal ^ sign) - sign) & np.int32(0x7FFF))
        value = np.int32(magnitude | np.int32(sign & np.int32(0x8000)))
        estimate = np.float32(float_value(value, shift, scale) - float_value(base_bits, shift, scale))
        nearest = limit if estimate > np.float32(0.0) else -limit
        estimate = estimate if abs(estimate) < limit else nearest
        middles[i] = estimate if codes[i] >= np.uint8(FIRST_CELL_CODE) else deltas[i]


@kernel
def _tile_middles(
    base: Bits16, mantissa_bits: int, codes: Bytes, cell_bits: Bytes, limit: np.float32, deltas: Floats, middles: Floats
) -> None:
    """Write the decoded deltas of the middles of cells, clamped to `limit`; of elements in bands the delta itself."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _tile_middles_of(base, F16_MANTISSA_BITS, codes, cell_bits, limit, deltas, middles)
    else:
        _tile_middles_of(base, BF16_MANTISSA_BITS, codes, cell_bits, limit, deltas, middles)


@kernel
def _cut_residuals(
    residuals: Integers,
    codes: Bytes,
    cell_bits: Bytes,
    band_widths: Bytes,
    is_exception: Bytes,
    residual_widths: Bytes,
    stored_residuals: Bits16,
) -> bool:
    """Cut residuals to their widths, and mark those that do not fit as exceptions; return whether there is any."""
    for i in range(len(stored_residuals)):
        cell_width, band_width = cell_bits[i], band_widths[i]  # both loaded, so that the selection needs no branch
        residual_widths[i] = cell_width if codes[i] >= np.uint8(FIRST_CELL_CODE) else band_width
    for i in range(len(stored_residuals)):
        width = np.int32(residual_widths[i] & np.uint8(15))
        stored_residuals[i] = np.uint16(np.int32(residuals[i] & np.int32(np.int32(np.int32(1) << width) - np.int32(1))))
        is_exception[i] |= np.uint8(np.int32(residuals[i] >> width) != np.int32(0))
    any_exception = np.uint8(0)
    for i in range(len(stored_residuals)):
        any_exception |= is_exception[i]
    return bool(any_exception)


@kernel
def _append_positions(is_exception: Bytes, first: int, n: int, exceptions: Bits32, n_exceptions: int) -> int:
    """Append the positions of the marked elements of a tile, which are few; return how many there are in all."""
    words = is_exception.view(np.uint64)
    for word in range((n + 7) // 8):
        if words[word]:
            for i in range(8 * word, min(8 * word + 8, n)):
                if is_exception[i]:
                    exceptions[n_exceptions] = np.uint32(first + i)
                    n_exceptions += 1
    return n_exceptions


@kernel
def encode_tiles(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, first_low: int, cuts: Integers,
    limit: np.float32, cell_bits_C: Bytes, widths: Bytes, codes: Bytes, residuals: Bits16, residual_widths: Bytes,
    exceptions: Bits32, sums: Doubles, errors: Doubles,
) -> int:  # fmt: skip
    """Compute the code, the residual and the residual's width of every element.

    Tables have 256 bytes: `cell_bits_C` by context, `widths` by `width_index`. `sums`, and `errors` of the middles of
    cells, accumulate as in `sum_tile`. Returns how many positions were written to `exceptions`, the elements that code
    and residual cannot express, or -1 where a delta is not finite.
    """
    cell_bits, width_indices = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    band_widths, is_exception = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    full_residuals, deltas = np.empty(TILE, np.int32), np.empty(TILE, np.float32)
    middles, keys = np.empty(TILE, np.float32), np.empty(TILE, np.uint16)
    pairs = np.empty(2 * TILE, np.float64)
    n, n_exceptions, largest = len(base), 0, np.int32(0)
    top = top_edge_exponent(first_low, cuts[0], mantissa_bits)
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        m = stop - tile
        tile_base, tile_contexts, tile_codes = base[tile:stop], contexts[tile:stop], codes[tile:stop]
        look_up(cell_bits_C, tile_contexts, m, cell_bits)
        tile_largest = _tile_residuals(
            tile_base, expert[tile:stop], mantissa_bits, cell_bits, cuts, top, tile_codes, full_residuals,
            width_indices, is_exception, deltas,
        )  # fmt: skip
        largest = tile_largest if tile_largest > largest else largest
        look_up(widths, width_indices, m, band_widths)
        has_exceptions = _cut_residuals(
            full_residuals, tile_codes, cell_bits, band_widths, is_exception, residual_widths[tile:stop],
            residuals[tile:stop],
        )  # fmt: skip
        if has_exceptions:
            n_exceptions = _append_positions(is_exception, tile, m, exceptions, n_exceptions)
        _tile_middles(tile_base, mantissa_bits, tile_codes, cell_bits, limit, deltas, middles)
        sum_tile(deltas, middles, tile_contexts, tile_codes, keys, pairs, sums, errors)
    return n_exceptions if largest < np.int32(_INFINITY) else -1
