"""Encode one block of codec BANDS in two compiled calls: choose residual widths, then write all pieces tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe.deltastore.codec.element_codes import (
    BF16_MANTISSA_BITS,
    BODY_SYMBOLS,
    EDGE_CLASSES,
    ERROR_SUMS,
    EXCEPTION_BITS,
    F16_MANTISSA_BITS,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    HEAD_SYMBOLS,
    LAST_CELL_CODE,
    N_CODES,
    N_KEYS,
    N_SUMS,
    QUANTILE_BUCKETS,
    SLOT,
    TILE,
    WIDTH_COUNTS,
    WIDTHS_PER_CLASS,
    ZERO_CELL,
    Integers,
    first_ordinal_past,
    float_value,
    ordinal_of,
    sum_tile,
    top_edge_exponent,
    value_scale,
    value_shift,
    width_index,
)
from mergepipe.deltastore.codec.rans import LANES, MAX_CONTEXTS, Bits16, scale_rows
from mergepipe.deltastore.codec.residuals import (
    FIRST_STEP_COUNT,
    N_SAMPLE_COUNTS,
    choose_widths,
    pack_residuals,
    packed_capacity,
    write_residual_piece,
)
from mergepipe.deltastore.codec.symbol_stages import encode_stages
from mergepipe.deltastore.codec.vectors import copy_bytes, look_up
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, Doubles, Floats, kernel, template

# --- kernels that turn a bf16 block and its base into codes and residuals, tile by tile ---
#
# Format: ordinals, contexts, codes and "Widths of bands" in "BANDS", docs/internals/formats/delta-store.md.


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


# --- encode one block of codec BANDS in two compiled calls: choose the widths of residuals, then write all pieces ---
#
# Format: "BANDS" in docs/internals/formats/delta-store.md.


_TABLE_BYTES = 4096
"""More than the tables, states and widths of a block take."""
N_LOOKED_UP = 256
"""Entries of the tables of widths."""
COUNTS_SHAPE = (MAX_CONTEXTS, N_CODES)
_SUM, _SQUARE, _COUNT = range(3)


class WorkArrays(NamedTuple):
    """Parts of the work array: by element (`codes` padded), words of both stages, packed residuals, pieces."""

    codes: Bytes
    residual_widths: Bytes
    residuals: Bits16
    exceptions: Bits32
    words: Bits16
    packed: Bits64
    pieces: Bytes


class Sums(NamedTuple):
    """Sums over the elements, by context (C) and code (K), and the squared error of the middles of cells."""

    counts_CK: Counts
    deltas_CK: Doubles
    squares_CK: Doubles
    cell_error: float


def work_bytes(n: int) -> int:
    """The work array that `encode_pieces` needs for `n` elements; at worst a piece has ten bytes for each of them."""
    padded = -(-n // LANES) * LANES
    return 12 * padded + 4 * LANES + 24 * (padded * 15 // 64 + 3) + 10 * padded + _TABLE_BYTES + n // 5000


@kernel
def choose_tables(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, lows: Bytes, cuts: Integers, stride: int,
    cell_bits: Bytes, widths: Bytes,
) -> None:  # fmt: skip
    """Choose the widths of residuals from every `stride`th tile: of cells by context, of bands by `width_index`."""
    counts = np.zeros(N_SAMPLE_COUNTS, np.uint32)
    count_sample(base, expert, mantissa_bits, contexts, int(lows[0]), cuts, stride, counts)
    choose_widths(counts, len(lows), cell_bits, widths)


@kernel
def _added_up(sums: Doubles, errors: Doubles) -> Sums:
    """Add up what `encode_tiles` accumulated."""
    counts_CK, deltas_CK = np.empty((MAX_CONTEXTS, N_CODES), np.int64), np.empty((MAX_CONTEXTS, N_CODES))
    squares_CK = np.empty((MAX_CONTEXTS, N_CODES))
    for key in range(N_KEYS):
        even, odd = key * SLOT, (N_KEYS + key) * SLOT
        context, code = key // N_CODES, key % N_CODES
        deltas_CK[context, code] = sums[even + _SUM] + sums[odd + _SUM]
        squares_CK[context, code] = sums[even + _SQUARE] + sums[odd + _SQUARE]
        counts_CK[context, code] = np.int64(sums[even + _COUNT] + sums[odd + _COUNT])
    return Sums(counts_CK, deltas_CK, squares_CK, (errors[0] + errors[1]) + (errors[2] + errors[3]))


@kernel
def _record_errors(sums: Sums, recorded: Doubles) -> None:
    """Write the squared errors at NOTHING, HEAD, HEAD_EXACT, BODY, BODY_EXACT."""
    squares, spreads = np.zeros(3), np.zeros(3)
    for context in range(MAX_CONTEXTS):
        for code in range(1, N_CODES):
            stream = 0 if code < FIRST_BODY_CODE else 1 if code < FIRST_CELL_CODE else 2
            square, delta = sums.squares_CK[context, code], sums.deltas_CK[context, code]
            squares[stream] += square
            spreads[stream] += max(square - delta * delta / max(sums.counts_CK[context, code], 1), 0.0)
    unread = squares[1] + squares[2]
    recorded[0], recorded[1], recorded[2] = squares[0] + unread, spreads[0] + unread, unread
    recorded[3], recorded[4] = spreads[0] + spreads[1] + sums.cell_error, sums.cell_error


@kernel
def _record_counts(sums: Sums, counts: Counts) -> None:
    """Write how many deltas are at or above each of the three cuts."""
    n_above = 0
    for band in range(3):
        for context in range(MAX_CONTEXTS):
            n_above += sums.counts_CK[context, 2 * band + 1] + sums.counts_CK[context, 2 * band + 2]
        counts[band] = n_above


@kernel
def _put(out: Bytes, at: int, content: Bytes) -> int:
    """Copy bytes to `out`; return the position after them."""
    copy_bytes(content, len(content), out, at)
    return at + len(content)


@kernel
def _centroids(sums: Sums, n_contexts: int, first: int, stop: int) -> Floats:
    """The mean deltas of the codes from `first` to before `stop`, by context."""
    centroids = np.empty(n_contexts * (stop - first), np.float32)
    for i in range(len(centroids)):
        context, code = i // (stop - first), first + i % (stop - first)
        centroids[i] = np.float32(sums.deltas_CK[context, code] / max(sums.counts_CK[context, code], 1))
    return centroids


@kernel
def _frequencies(sums: Sums, n_contexts: int) -> tuple[Bits16, Bits16]:
    """The frequencies of the symbols of the head stage, and of the body stage, by context."""
    head_counts = np.zeros(n_contexts * HEAD_SYMBOLS, np.int64)
    body_counts = np.zeros(n_contexts * BODY_SYMBOLS, np.int64)
    for context in range(n_contexts):
        for code in range(1, FIRST_BODY_CODE + BODY_SYMBOLS):
            count, is_head = sums.counts_CK[context, code], code < FIRST_BODY_CODE
            head_counts[context * HEAD_SYMBOLS + (code if is_head else 0)] += count
            if not is_head:
                body_counts[context * BODY_SYMBOLS + code - FIRST_BODY_CODE] = count
    head, body = np.empty(len(head_counts), np.uint16), np.empty(len(body_counts), np.uint16)
    scale_rows(head_counts, HEAD_SYMBOLS, head)
    scale_rows(body_counts, BODY_SYMBOLS, body)
    return head, body


@kernel
def _work_arrays(work: Bytes, n: int) -> WorkArrays:
    """Divide the work array of a block of `n` elements."""
    padded = -(-n // LANES) * LANES
    widths, residuals, exceptions, words = padded, 2 * padded, 4 * padded, 8 * padded
    packed = words + 4 * (padded + LANES)
    pieces = packed + 24 * packed_capacity(padded)
    return WorkArrays(
        work[:widths],
        work[widths : widths + n],
        work[residuals : residuals + 2 * n].view(np.uint16),
        work[exceptions:words].view(np.uint32),
        work[words:packed].view(np.uint16),
        work[packed:pieces].view(np.uint64),
        work[pieces:],
    )


@kernel
def _put_stage(frequencies: Bits16, states: Bits32, words: Bits16, out: Bytes, at: int) -> int:
    """Write one stage of symbols; return the position after it."""
    at = _put(out, at, frequencies.view(np.uint8))
    at = _put(out, at, states.view(np.uint8))
    return _put(out, at, words.view(np.uint8))


@kernel
def _write_residuals(
    expert: Bits16, arrays: WorkArrays, n_exceptions: int, widths: Bytes, stream: int, n_bits: int, out: Bytes
) -> int:
    """Write the residual piece of one stream; return its length."""
    first = 1 if stream == 0 else FIRST_BODY_CODE if stream == 1 else FIRST_CELL_CODE
    stop = FIRST_BODY_CODE if stream == 0 else FIRST_CELL_CODE if stream == 1 else N_CODES
    positions, count = np.empty(n_exceptions + 1, np.uint32), 0
    for e in range(n_exceptions):
        code = arrays.codes[arrays.exceptions[e]]
        positions[count] = arrays.exceptions[e]
        count += int((code >= first) & (code < stop))
    n_columns = stop - first if stream < 2 else 0
    band_widths = np.empty(EDGE_CLASSES * n_columns, np.uint8)
    for i in range(len(band_widths)):
        band_widths[i] = widths[i // n_columns * WIDTHS_PER_CLASS + first - 1 + i % n_columns]
    third = len(arrays.packed) // 3
    packed = arrays.packed[stream * third : (stream + 1) * third].view(np.uint8)[: (n_bits + 7) // 8]
    return int(write_residual_piece(packed, band_widths, positions[:count], expert, out))


@kernel
def _encode_elements(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, lows: Bytes, cuts: Integers, cell_bits: Bytes,
    widths: Bytes, arrays: WorkArrays,
) -> tuple[int, Sums]:  # fmt: skip
    """Compute codes and residuals; return the number of exceptions, -1 where a delta is not finite, and the sums."""
    sums, cell_errors = np.zeros(N_SUMS), np.zeros(ERROR_SUMS)
    limit = np.int32(cuts[2] - np.int32(1)).view(np.float32)  # the largest float32 outside the bands
    arrays.codes[len(base) :] = 0
    n_exceptions = encode_tiles(
        base, expert, mantissa_bits, contexts, int(lows[0]), cuts, limit, cell_bits, widths, arrays.codes,
        arrays.residuals, arrays.residual_widths, arrays.exceptions, sums, cell_errors,
    )  # fmt: skip
    return n_exceptions, _added_up(sums, cell_errors)


@kernel
def count_bits(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, lows: Bytes, cuts: Integers, cell_bits: Bytes,
    widths: Bytes, work: Bytes, counts_CK: Counts,
) -> int:  # fmt: skip
    """Count the codes by context (`COUNTS_SHAPE`), and return the bits of residuals and exceptions.

    -1 where a delta is not finite. Arguments are those of `encode_pieces`, and the tables of `choose_tables`.
    """
    arrays, n_bits = _work_arrays(work, len(base)), 0
    n_exceptions, sums = _encode_elements(base, expert, mantissa_bits, contexts, lows, cuts, cell_bits, widths, arrays)
    if n_exceptions < 0:
        return -1
    for i in range(len(base)):
        n_bits += arrays.residual_widths[i]
    for context in range(MAX_CONTEXTS):
        for code in range(N_CODES):
            counts_CK[context, code] = sums.counts_CK[context, code]
    return n_bits + EXCEPTION_BITS * n_exceptions


@kernel
def encode_pieces(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, lows: Bytes, cuts: Integers, stride: int,
    work: Bytes, ends: Counts, errors: Doubles, counts: Counts,
) -> bool:  # fmt: skip
    """Write the pieces of a block to the end of `work`; return whether all deltas are finite, as is needed.

    `contexts` (padded) are those of the base, with the lowest exponents `lows`; every `stride`th tile is a sample for
    the widths of residuals; `work` has `work_bytes`. Sets the `ends` of the pieces (first the place where they begin),
    the squared `errors` at each recorded level, and the `counts` of deltas at or above each cut.
    """
    cell_bits, widths = np.empty(N_LOOKED_UP, np.uint8), np.empty(N_LOOKED_UP, np.uint8)
    choose_tables(base, expert, mantissa_bits, contexts, lows, cuts, stride, cell_bits, widths)
    arrays, n, n_contexts = _work_arrays(work, len(base)), len(base), len(lows)
    n_exceptions, totals = _encode_elements(
        base, expert, mantissa_bits, contexts, lows, cuts, cell_bits, widths, arrays
    )
    if n_exceptions < 0:
        return False
    _record_errors(totals, errors)
    _record_counts(totals, counts)
    head, body = _frequencies(totals, n_contexts)
    states, word_ends, n_bits = np.empty(2 * LANES, np.uint32), np.empty(2, np.int64), np.empty(3, np.int64)
    encode_stages(contexts, arrays.codes, len(contexts), head, body, arrays.words, states, word_ends)
    pack_residuals(arrays.codes[:n], arrays.residuals, arrays.residual_widths, arrays.packed, n_bits)
    out, half = arrays.pieces, len(arrays.words) // 2
    ends[0] = len(work) - len(out)
    out[0] = n_contexts
    at = _put(out, 1, lows)
    at = _put(out, at, _centroids(totals, n_contexts, 1, FIRST_BODY_CODE).view(np.uint8))
    at = _put_stage(head, states[:LANES], arrays.words[word_ends[0] : half], out, at)
    ends[1] = ends[0] + at
    at += _write_residuals(expert, arrays, n_exceptions, widths, 0, n_bits[0], out[at:])
    ends[2] = ends[0] + at
    at = _put(out, at, cell_bits[:n_contexts])
    at = _put(out, at, _centroids(totals, n_contexts, FIRST_BODY_CODE, FIRST_CELL_CODE).view(np.uint8))
    at = _put_stage(body, states[LANES:], arrays.words[word_ends[1] :], out, at)
    for stream in range(1, 3):
        ends[2 + stream] = ends[0] + at
        at += _write_residuals(expert, arrays, n_exceptions, widths, stream, n_bits[stream], out[at:])
    ends[5] = ends[0] + at
    return True
