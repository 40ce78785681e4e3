"""Kernels that turn the codes and residuals of one stream of a tile back into 16-bit values or deltas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe.deltastore.codec.element_codes import (
    BF16_MANTISSA_BITS,
    BODY_SYMBOLS,
    F16_MANTISSA_BITS,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    HEAD_SYMBOLS,
    N_CODES,
    N_EXPONENTS,
    ZERO_CELL,
    fill_contexts,
    first_ordinal_past,
    float_value,
    ordinal_of,
    top_edge_exponent,
    value_scale,
    value_shift,
    width_index,
)
from mergepipe.deltastore.codec.levels import Piece
from mergepipe.deltastore.codec.piece_headers import (
    END,
    FAULT,
    NO_WIDTH_INDEX,
    POSITION,
    Fault,
    exception_positions,
    n_chunks_in,
    read_cell_bits,
    read_centroids,
    read_contexts,
    read_exceptions,
    read_frequencies,
    read_states,
    read_u16,
    read_widths,
    set_fault,
)
from mergepipe.deltastore.codec.rans import (
    LANES,
    LOWEST_STATE,
    MAX_CONTEXTS,
    TOTAL,
    Bits16,
    decode_symbols,
    fill_skipped_row,
    padded_length,
)
from mergepipe.deltastore.codec.residuals import unpack_stream, unpack_stream_by_4
from mergepipe.deltastore.codec.stream_elements import ALL_ROOM, DECODED_TILE, STREAM_ROOM, collect_streams, place
from mergepipe.deltastore.codec.symbol_stages import decode_codes_scalar
from mergepipe.deltastore.codec.vector_symbols import N_STARTS, decode_codes_vector
from mergepipe.deltastore.codec.vectors import look_up, shift_left
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, Floats, kernel, template

# --- kernels that turn the codes and residuals of one stream of a tile back into 16-bit values or deltas ---


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


# --- decode one block of codec BANDS in one compiled call, tile by tile: intermediate arrays stay in the cache ---


HEAD, HEAD_FINE, BODY, BODY_FINE, REST = (int(piece) for piece in list(Piece)[:5])
_FAULT_SYMBOLS_END, _FAULT_RESIDUALS_END = int(Fault.SYMBOLS_END), int(Fault.RESIDUALS_END)
_padded = kernel(padded_length)

# Instructions to use, as bits of `features`.
VECTOR_SYMBOLS, VECTOR_RESIDUALS = 1, 2


class Stages(NamedTuple):
    """Decoder state of both stages of symbols: byte offsets of the next words, and where the words must end.

    Symbols are found in `starts` by the vector decoder, else in a table of each stage.
    """

    head_table: Bits32
    body_table: Bits32
    starts: Bits16
    states: Bits32
    positions: Bits64
    ends: Bits64


class ResidualStreams(NamedTuple):
    """Reader state of the residual streams, by stream: next bit, start of the exceptions, number of exceptions.

    `widths` are those of the bands; all residuals of an `is_empty` stream have 0 bits.
    """

    widths: Bytes
    is_empty: Bytes
    position: Bits64
    exceptions: Counts
    counts: Counts


class BlockTables(NamedTuple):
    """Tables of a whole block: by exponent of the base, and centroids by context and code.

    `exact_codes`: 1 for codes with exact deltas, as residuals are read or need not be.
    """

    contexts: Bytes
    cell_bits: Bytes
    centroids: Floats
    exact_codes: Bytes
    cuts: Floats
    limit: np.float32
    top: np.int32


class TileArrays(NamedTuple):
    """Work arrays: of one tile, and of the elements of one of its streams; results by stream."""

    base: Bits16
    contexts: Bytes
    stream_base: Bits16
    stream_codes: Bytes
    stream_counts: Counts
    stream_bytes: Bytes
    widths: Bytes
    masks: Bits16
    residuals: Bits16
    edges: Floats
    values: Bits16
    deltas: Floats
    placed_values: Bits16
    placed_deltas: Floats


@kernel
def _read_stage(
    stored: Bytes, cursor: Counts, stage: int, n_contexts: int, is_vector: bool, n_padded: int, stages: Stages
) -> None:
    """Read frequencies and states of one stage (0 or 1), up to its words."""
    table = stages.body_table if stage else stages.head_table
    n_symbols = BODY_SYMBOLS if stage else HEAD_SYMBOLS
    read_frequencies(stored, cursor, n_contexts, n_symbols, is_vector, table, stages.starts)
    if not is_vector:
        fill_skipped_row(table)
    n_words = read_states(stored, cursor, n_padded, stages.states[stage * LANES : (stage + 1) * LANES])
    stages.positions[stage] = np.uint64(cursor[POSITION])
    stages.ends[stage] = stages.positions[stage] + np.uint64(2 * n_words)


@kernel
def _read_residual_streams(
    stored: Bytes, cursors_PF: Counts, requested_P: Bytes, n: int, cell_bits: Bytes
) -> ResidualStreams:
    """Read the residual pieces up to their residuals; an empty piece has neither widths nor exceptions."""
    widths, position, is_empty = np.zeros(NO_WIDTH_INDEX + 1, np.uint8), np.zeros(3, np.uint64), np.ones(3, np.uint8)
    exceptions, counts = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for stream in range(3):
        cursor = cursors_PF[HEAD_FINE if stream == 0 else BODY_FINE if stream == 1 else REST]
        if cursor[POSITION] < cursor[END]:
            if stream < 2:
                first, stop = (1, FIRST_BODY_CODE) if stream == 0 else (FIRST_BODY_CODE, FIRST_CELL_CODE)
                is_empty[stream] = read_widths(stored, cursor, first, stop, widths) == 0
            exceptions[stream] = cursor[POSITION]
            counts[stream] = read_exceptions(stored, cursor, n)
        position[stream] = np.uint64(8 * cursor[POSITION])
    is_empty[2] = not (requested_P[REST] and cell_bits.any())
    return ResidualStreams(widths, is_empty, position, exceptions, counts)


@kernel
def _exact_codes(requested_P: Bytes) -> Bytes:
    """Mark the codes whose deltas are exact.

    Code 0 (not in the head, body not read) gives the base's value, cells their middle: no centroid replaces these.
    """
    exact_codes = np.ones(N_CODES, np.uint8)
    exact_codes[1:FIRST_BODY_CODE] = requested_P[HEAD_FINE]
    exact_codes[FIRST_BODY_CODE:FIRST_CELL_CODE] = requested_P[BODY_FINE]
    return exact_codes


@kernel
def _fill_exponent_tables(lows: Bytes, cell_bits_C: Bytes, n_contexts: int, contexts: Bytes, cell_bits: Bytes) -> None:
    """Write the context, and the width of residuals in its cells, of every exponent of the base."""
    above = N_EXPONENTS
    for c in range(n_contexts):
        for exponent in range(int(lows[c]), above):
            contexts[exponent], cell_bits[exponent] = np.uint8(c), cell_bits_C[c]
        above = int(lows[c])


@kernel
def _make_tile_arrays() -> TileArrays:
    """Allocate the work arrays."""
    return TileArrays(
        np.empty(DECODED_TILE, np.uint16),
        np.empty(DECODED_TILE, np.uint8),
        np.empty(ALL_ROOM, np.uint16),
        np.empty(ALL_ROOM, np.uint8),
        np.empty(3, np.int64),
        np.empty(STREAM_ROOM, np.uint8),
        np.empty(STREAM_ROOM, np.uint8),
        np.empty(STREAM_ROOM, np.uint16),
        np.empty(STREAM_ROOM, np.uint16),
        np.empty(STREAM_ROOM, np.float32),
        np.zeros(ALL_ROOM, np.uint16),
        np.zeros(ALL_ROOM, np.float32),
        np.empty(DECODED_TILE, np.uint16),
        np.empty(DECODED_TILE, np.float32),
    )


@kernel
def _decode_head(stored: Bytes, stages: Stages, contexts: Bytes, symbols: Bytes) -> None:
    """Decode the symbols of the head stage of a tile (padded) alone, on any machine."""
    first, states = int(stages.positions[0]), stages.states[:LANES]
    n_words = decode_symbols(stored, first, states, contexts, len(contexts), stages.head_table, symbols)
    stages.positions[0] += np.uint64(2 * n_words)


@template
def _unpack_residuals(
    stored: Bytes, streams: ResidualStreams, stream: int, features: int, widths: Bytes, arrays: TileArrays
) -> None:
    """Unpack the residuals of some elements of a stream, given their widths in bits."""
    n = -(-len(widths) // 4) * 4
    masks, residuals = arrays.masks[:n], arrays.residuals[:n]
    if streams.is_empty[stream]:
        for i in range(n):
            residuals[i] = np.uint16(0)
        return
    residual_masks(widths, masks)
    if features & VECTOR_RESIDUALS:
        streams.position[stream] = unpack_stream_by_4(stored, streams.position[stream], masks, residuals)
    else:
        streams.position[stream] = unpack_stream(stored, streams.position[stream], masks, residuals)


@template
def _decode_bands(
    stored: Bytes, streams: ResidualStreams, stream: int, tables: BlockTables, mantissa_bits: int, is_values: bool,
    features: int, n: int, arrays: TileArrays,
) -> None:  # fmt: skip
    """Decode the `n` collected elements of a stream of bands."""
    first = stream * STREAM_ROOM
    base, codes = arrays.stream_base[first : first + n], arrays.stream_codes[first : first + n]
    if not tables.exact_codes[1 if stream == 0 else FIRST_BODY_CODE]:
        fill_contexts(base, mantissa_bits, n, tables.contexts, arrays.stream_bytes[:n])
        centroid_deltas(arrays.stream_bytes, codes, tables.centroids, arrays.deltas[first : first + n])
        return
    edges, widths = arrays.edges[:n], arrays.widths[:n]
    band_edges(base, mantissa_bits, codes, tables.cuts, tables.top, edges, arrays.stream_bytes)
    look_up(streams.widths, arrays.stream_bytes, n, widths)
    _unpack_residuals(stored, streams, stream, features, widths, arrays)
    if is_values:
        band_values(base, mantissa_bits, codes, arrays.residuals, edges, arrays.values[first : first + n])
    else:
        band_deltas(base, mantissa_bits, codes, arrays.residuals, edges, arrays.deltas[first : first + n])


@template
def _decode_cells(
    stored: Bytes, streams: ResidualStreams, tables: BlockTables, mantissa_bits: int, is_values: bool,
    has_residuals: bool, features: int, n: int, arrays: TileArrays,
) -> None:  # fmt: skip
    """Decode the `n` collected elements in cells; without residuals, to the middles of their cells."""
    first, widths = 2 * STREAM_ROOM, arrays.widths[:n]
    base, codes = arrays.stream_base[first : first + n], arrays.stream_codes[first : first + n]
    fill_contexts(base, mantissa_bits, n, tables.cell_bits, widths)
    if has_residuals:
        _unpack_residuals(stored, streams, 2, features, widths, arrays)
    else:
        cell_middles(widths, arrays.residuals)
    if is_values:
        cell_values(base, codes, arrays.residuals, widths, arrays.values[first : first + n])
    else:
        deltas = arrays.deltas[first : first + n]
        cell_deltas(base, mantissa_bits, codes, arrays.residuals, widths, tables.limit, deltas)


@template
def _decode_codes(
    stored: Bytes, stages: Stages, has_body: bool, tables: BlockTables, base: Bits16, mantissa_bits: int, n: int,
    features: int, codes: Bytes, arrays: TileArrays,
) -> None:  # fmt: skip
    """Decode the codes of a tile of `n` elements, with code 0 as padding."""
    m = len(codes)
    contexts = arrays.contexts[:m]
    fill_contexts(base, mantissa_bits, n, tables.contexts, contexts)
    if features & VECTOR_SYMBOLS:
        decode_codes_vector(stored, stages.positions, stages.states, contexts, m, stages.starts, has_body, codes)
        return
    if has_body:
        decode_codes_scalar(
            stored, stages.positions, stages.states, contexts, m, stages.head_table, stages.body_table, codes
        )
    else:
        _decode_head(stored, stages, contexts, codes)
    for i in range(n, m):
        codes[i] = np.uint8(0)


@template
def _decode_streams(
    stored: Bytes, streams: ResidualStreams, requested_P: Bytes, tables: BlockTables, base: Bits16, mantissa_bits: int,
    is_values: bool, features: int, codes: Bytes, arrays: TileArrays,
) -> None:  # fmt: skip
    """Decode the elements of the requested streams of a tile, from its codes, to values or deltas by stream."""
    n_streams = 3 if requested_P[BODY] else 1
    collect_streams(codes, len(codes), base, n_streams, arrays.stream_codes, arrays.stream_base, arrays.stream_counts)
    for stream in range(n_streams):
        n = arrays.stream_counts[stream]
        if stream < 2:
            _decode_bands(stored, streams, stream, tables, mantissa_bits, is_values, features, n, arrays)
        else:
            has_residuals = bool(requested_P[REST])
            _decode_cells(stored, streams, tables, mantissa_bits, is_values, has_residuals, features, n, arrays)


@kernel
def _decode_all_tiles(
    stored: Bytes, stages: Stages, streams: ResidualStreams, requested_P: Bytes, tables: BlockTables, base: Bits16,
    mantissa_bits: int, features: int, codes: Bytes, values: Bits16, deltas: Floats,
) -> None:  # fmt: skip
    """Decode tile by tile: codes, then the elements of each stream side by side, which are put back in their places."""
    arrays, n, is_values = _make_tile_arrays(), len(base), len(values) > 0
    has_body, n_streams = bool(requested_P[BODY]), 3 if requested_P[BODY] else 1
    for tile in range(0, n, DECODED_TILE):
        stop, padded_stop = min(tile + DECODED_TILE, n), min(tile + DECODED_TILE, _padded(n))
        tile_codes, tile_base = codes[tile:padded_stop], base[tile:stop]
        m = len(tile_codes)
        if m > stop - tile:  # the last tile: whole vectors are read and written
            for i in range(stop - tile):
                arrays.base[i] = tile_base[i]
            tile_base = arrays.base[:m]
        _decode_codes(
            stored, stages, has_body, tables, tile_base, mantissa_bits, stop - tile, features, tile_codes, arrays
        )
        _decode_streams(
            stored, streams, requested_P, tables, tile_base, mantissa_bits, is_values, features, tile_codes, arrays
        )
        if is_values:
            placed_values = values[tile:stop] if m == stop - tile else arrays.placed_values
            place(tile_codes, m, arrays.values, placed_values, n_streams)
            for i in range(tile, stop if m > stop - tile else tile):
                values[i] = placed_values[i - tile]
        else:
            placed_deltas = deltas[tile:stop] if m == stop - tile else arrays.placed_deltas
            place(tile_codes, m, arrays.deltas, placed_deltas, n_streams)
            for i in range(tile, stop if m > stop - tile else tile):
                deltas[i] = placed_deltas[i - tile]


@kernel
def _check_ends(cursors_PF: Counts, stages: Stages, has_body: bool, streams: ResidualStreams) -> None:
    """Record a fault unless all words and residuals are consumed and the states are back at the lowest state."""
    for stage in range(2 if has_body else 1):
        is_end = stages.positions[stage] == stages.ends[stage]
        for lane in range(stage * LANES, (stage + 1) * LANES):
            is_end &= stages.states[lane] == np.uint32(LOWEST_STATE)
        if not is_end:
            set_fault(cursors_PF[BODY if stage else HEAD], _FAULT_SYMBOLS_END, 0, 0)
    for stream in range(3):
        cursor = cursors_PF[HEAD_FINE if stream == 0 else BODY_FINE if stream == 1 else REST]
        if np.int64((streams.position[stream] + np.uint64(7)) >> np.uint64(3)) != cursor[END]:
            set_fault(cursor, _FAULT_RESIDUALS_END, 0, 0)


@kernel
def _replace_exceptions(
    stored: Bytes, streams: ResidualStreams, base: Bits16, mantissa_bits: int, codes: Bytes, exact_codes: Bytes,
    limit: np.float32, values: Bits16, deltas: Floats,
) -> None:  # fmt: skip
    """Replace the values or deltas of all exceptions."""
    for stream in range(3):
        if streams.counts[stream] == 0:
            continue
        if len(deltas):
            replace_exception_deltas(
                stored, streams.exceptions[stream], base, mantissa_bits, codes, exact_codes, limit, deltas
            )
        else:
            replace_exception_values(stored, streams.exceptions[stream], values)


@kernel
def _decode_block(
    stored: Bytes, cursors_PF: Counts, requested_P: Bytes, base: Bits16, mantissa_bits: int, cuts: Floats,
    limit: np.float32, features: int, table: Bits32, body_table: Bits32, codes: Bytes, values: Bits16, deltas: Floats,
) -> None:  # fmt: skip
    """Decode the requested pieces of one block; see `decode_tiles`."""
    n, has_body = len(base), bool(requested_P[BODY])
    lows, cell_bits = np.zeros(MAX_CONTEXTS, np.uint8), np.zeros(MAX_CONTEXTS, np.uint8)
    centroids = np.zeros((MAX_CONTEXTS + 1) * N_CODES, np.float32)
    n_contexts = read_contexts(stored, cursors_PF[HEAD], lows)
    if n_contexts == 0:
        return
    read_centroids(stored, cursors_PF[HEAD], n_contexts, 1, FIRST_BODY_CODE, centroids)
    is_vector = bool(features & VECTOR_SYMBOLS)
    stages = Stages(
        table,
        body_table,
        np.full(N_STARTS, TOTAL, np.uint16),
        np.zeros(2 * LANES, np.uint32),
        np.zeros(2, np.uint64),
        np.zeros(2, np.uint64),
    )
    _read_stage(stored, cursors_PF[HEAD], 0, n_contexts, is_vector, _padded(n), stages)
    if has_body:
        read_cell_bits(stored, cursors_PF[BODY], n_contexts, cell_bits)
        read_centroids(stored, cursors_PF[BODY], n_contexts, FIRST_BODY_CODE, FIRST_CELL_CODE, centroids)
        _read_stage(stored, cursors_PF[BODY], 1, n_contexts, is_vector, _padded(n), stages)
    streams = _read_residual_streams(stored, cursors_PF, requested_P, n, cell_bits)
    if cursors_PF[:, FAULT].any():
        return
    contexts, widths = np.empty(N_EXPONENTS, np.uint8), np.empty(N_EXPONENTS, np.uint8)
    _fill_exponent_tables(lows, cell_bits, n_contexts, contexts, widths)
    top = top_edge_exponent(int(lows[0]), int(cuts.view(np.int32)[0]), mantissa_bits)
    tables = BlockTables(contexts, widths, centroids, _exact_codes(requested_P), cuts, limit, top)
    _decode_all_tiles(
        stored, stages, streams, requested_P, tables, base, mantissa_bits, features, codes, values, deltas
    )
    _check_ends(cursors_PF, stages, has_body, streams)
    if cursors_PF[:, FAULT].any():
        return
    _replace_exceptions(stored, streams, base, mantissa_bits, codes, tables.exact_codes, limit, values, deltas)


@kernel
def decode_tiles(
    stored: Bytes, cursors_BPF: Counts, requested_P: Bytes, base: Bits16, block_elements: int, mantissa_bits: int,
    cuts: Floats, limit: np.float32, features: int, table: Bits32, body_table: Bits32, codes: Bytes, values: Bits16,
    deltas: Floats,
) -> None:  # fmt: skip
    """Decode the requested pieces of consecutive blocks into `values`, or into `deltas` if that is not empty.

    Every block but the last has `block_elements`. Pieces are in `stored` (from POSITION to END of `cursors_BPF`; others
    have no bytes), which is readable for as many bytes as the base has in a block, and `SPARE_BYTES`, after the last.
    Faults are recorded in the cursors. `codes` is as long as a block, padded; tables have `TOTAL` entries for each
    context. No content makes it access anything outside.
    """
    for b in range(len(cursors_BPF)):
        start, stop = b * block_elements, min((b + 1) * block_elements, len(base))
        _decode_block(
            stored, cursors_BPF[b], requested_P, base[start:stop], mantissa_bits, cuts, limit, features, table,
            body_table, codes[: _padded(stop - start)], values[start:stop], deltas[start:stop],
        )  # fmt: skip
