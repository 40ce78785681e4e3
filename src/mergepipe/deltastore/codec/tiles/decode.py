"""Decode one block of codec BANDS in one compiled call, tile by tile, so that intermediate arrays stay in the cache.

Format: "BANDS" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe.deltastore.codec.entropy.rans import (
    LANES,
    LOWEST_STATE,
    MAX_CONTEXTS,
    Bits16,
    decode_symbols,
    fill_skipped_row,
    padded_length,
)
from mergepipe.deltastore.codec.entropy.rans_vector_decoder import decode_head_symbols_vector, decode_symbols_vector
from mergepipe.deltastore.codec.levels import Piece
from mergepipe.deltastore.codec.piece_headers import (
    END,
    FAULT,
    NO_WIDTH_INDEX,
    POSITION,
    Fault,
    read_cell_bits,
    read_centroids,
    read_contexts,
    read_exceptions,
    read_frequencies,
    read_states,
    read_widths,
    set_fault,
)
from mergepipe.deltastore.codec.tiles.decode_kernels import (
    apply_centroids,
    replace_exception_deltas,
    replace_exception_values,
    tile_contexts,
    tile_deltas,
    tile_edges,
    tile_residual_masks,
    tile_values,
    unpack_tile,
    unpack_tile_by_4,
)
from mergepipe.deltastore.codec.tiles.element_codes import (
    BODY_SYMBOLS,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    HEAD_SYMBOLS,
    N_CODES,
    TILE,
    Integers,
    fill_body_contexts,
    join_codes,
    top_edge_exponent,
)
from mergepipe.kernels.compilation.compiled import Bits32, Bits64, Bytes, Counts, Floats, kernel

HEAD, HEAD_FINE, BODY, BODY_FINE, REST = (int(piece) for piece in list(Piece)[:5])
_FAULT_SYMBOLS_END, _FAULT_RESIDUALS_END = int(Fault.SYMBOLS_END), int(Fault.RESIDUALS_END)
_padded = kernel(padded_length)

# Instructions to use, as bits of `features`.
VECTOR_SYMBOLS, VECTOR_RESIDUALS = 1, 2


class Stage(NamedTuple):
    """Decoder state of one stage of symbols: byte offset of the next word, and where the words must end."""

    table: Bits32
    states: Bits32
    position: Bits64
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
    """Tables of a whole block. `exact_masks` is all ones for codes with exact deltas, whose centroids are 0."""

    lows: Bytes
    cell_bits: Bytes
    centroids: Floats
    exact_masks: Integers


class TileArrays(NamedTuple):
    """Work arrays for one tile."""

    contexts: Bytes
    body_contexts: Bytes
    symbols: Bytes
    body_symbols: Bytes
    cell_bits: Bytes
    no_cell_bits: Bytes
    masks: Bits16
    stream_masks: Bits16
    residuals: Bits16
    values: Bits16
    edges: Floats
    expert: Floats


@kernel
def _read_stage(
    stored: Bytes, cursor: Counts, n_contexts: int, n_symbols: int, with_start_table: bool, n_padded: int, table: Bits32
) -> Stage:
    """Read frequencies and states of one stage, up to its words."""
    states, position, ends = np.zeros(LANES, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    read_frequencies(stored, cursor, n_contexts, n_symbols, with_start_table, table)
    fill_skipped_row(table)
    n_words = read_states(stored, cursor, n_padded, states)
    position[0] = np.uint64(cursor[POSITION])
    ends[0] = position[0] + np.uint64(2 * n_words)
    return Stage(table, states, position, ends)


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
def _exact_code_masks(requested_P: Bytes) -> Integers:
    """Make a mask by code: ones where the delta is exact, as residuals are read or need not be.

    Code 0 (not in the head, body not read) gives the base's value, cells their middle: no centroid replaces these.
    """
    exact_masks = np.full(N_CODES, -1, np.int32)
    if not requested_P[HEAD_FINE]:
        exact_masks[1:FIRST_BODY_CODE] = 0
    if not requested_P[BODY_FINE]:
        exact_masks[FIRST_BODY_CODE:FIRST_CELL_CODE] = 0
    return exact_masks


@kernel
def _mask_centroids(exact_masks: Integers, centroids: Floats) -> None:
    """Set the centroids of codes with exact deltas to 0."""
    for code in range(N_CODES):
        if exact_masks[code]:
            centroids[code::N_CODES] = np.float32(0.0)


@kernel
def _make_tile_arrays() -> TileArrays:
    """Allocate the work arrays."""
    return TileArrays(
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.uint8),
        np.zeros(TILE, np.uint8),
        np.empty(TILE, np.uint16),
        np.empty(TILE, np.uint16),
        np.empty(TILE, np.uint16),
        np.empty(TILE, np.uint16),
        np.empty(TILE, np.float32),
        np.empty(TILE, np.float32),
    )


@kernel
def _decode_stage(
    stored: Bytes, stage: Stage, with_start_table: bool, contexts: Bytes, features: int, symbols: Bytes
) -> None:
    """Decode the symbols of one tile (padded)."""
    first, n = int(stage.position[0]), len(contexts)
    if with_start_table:
        n_words = decode_head_symbols_vector(stored, first, stage.states, contexts, n, stage.table, symbols)
    elif features & VECTOR_SYMBOLS:
        n_words = decode_symbols_vector(stored, first, stage.states, contexts, n, stage.table, symbols)
    else:
        n_words = decode_symbols(stored, first, stage.states, contexts, n, stage.table, symbols)
    stage.position[0] += np.uint64(2 * n_words)


@kernel
def _unpack_residuals(
    stored: Bytes, streams: ResidualStreams, top: np.int32, codes: Bytes, features: int, arrays: TileArrays
) -> None:
    """Unpack the residuals of one tile from its edges and codes."""
    masks = arrays.masks[: len(codes)]
    cell_bits = arrays.no_cell_bits if streams.is_empty[2] else arrays.cell_bits
    tile_residual_masks(arrays.edges, codes, cell_bits, top, streams.widths, arrays.symbols, arrays.body_symbols, masks)
    if features & VECTOR_RESIDUALS:
        unpack_tile_by_4(
            stored, streams.position, streams.is_empty, codes, masks, arrays.stream_masks, arrays.residuals
        )
    else:
        unpack_tile(stored, streams.position, codes, masks, arrays.residuals)


@kernel
def _check_ends(cursors_PF: Counts, head: Stage, body: Stage, has_body: bool, streams: ResidualStreams) -> None:
    """Record a fault unless all words and residuals are consumed and the states are back at the lowest state."""
    for number in range(2 if has_body else 1):
        stage = body if number else head
        is_end = stage.position[0] == stage.ends[0]
        for lane in range(LANES):
            is_end &= stage.states[lane] == np.uint32(LOWEST_STATE)
        if not is_end:
            set_fault(cursors_PF[BODY if number else HEAD], _FAULT_SYMBOLS_END, 0, 0)
    for stream in range(3):
        cursor = cursors_PF[HEAD_FINE if stream == 0 else BODY_FINE if stream == 1 else REST]
        if np.int64((streams.position[stream] + np.uint64(7)) >> np.uint64(3)) != cursor[END]:
            set_fault(cursor, _FAULT_RESIDUALS_END, 0, 0)


@kernel
def _decode_all_tiles(
    stored: Bytes, head: Stage, body: Stage, streams: ResidualStreams, tables: BlockTables, requested_P: Bytes,
    base: Bits16, mantissa_bits: int, cuts: Floats, limit: np.float32, features: int, codes: Bytes, values: Bits16,
    deltas: Floats,
) -> None:  # fmt: skip
    """Decode tile by tile: contexts, codes, residuals, values, deltas."""
    arrays, n, centroids, exact_masks = _make_tile_arrays(), len(base), tables.centroids, tables.exact_masks
    has_body, is_middle = bool(requested_P[BODY]), 1 - int(requested_P[REST])
    has_values = requested_P[HEAD_FINE] | requested_P[BODY]
    top = top_edge_exponent(int(tables.lows[0]), int(cuts.view(np.int32)[0]), mantissa_bits)
    has_centroids = not requested_P[HEAD_FINE] or (has_body and not requested_P[BODY_FINE])
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        tile_base, tile_codes, n_padded = base[tile:stop], codes[tile:stop], _padded(stop - tile)
        contexts = arrays.contexts[:n_padded]
        tile_contexts(
            tile_base, mantissa_bits, tables.lows, tables.cell_bits, len(tables.lows), arrays.symbols, contexts,
            arrays.cell_bits,
        )  # fmt: skip
        symbols = arrays.symbols[:n_padded]
        _decode_stage(stored, head, bool(features & VECTOR_SYMBOLS), contexts, features, symbols)
        if has_body:
            body_contexts, body_symbols = arrays.body_contexts[:n_padded], arrays.body_symbols[:n_padded]
            fill_body_contexts(contexts, symbols, n_padded, body_contexts)
            _decode_stage(stored, body, False, body_contexts, features, body_symbols)
            join_codes(symbols, body_symbols, len(tile_base), tile_codes)
        else:
            for i in range(len(tile_base)):
                tile_codes[i] = symbols[i]
        decoded = arrays.values[: stop - tile] if len(deltas) else values[tile:stop]
        if has_values:
            tile_edges(tile_base, mantissa_bits, tile_codes, cuts, arrays.edges)
            _unpack_residuals(stored, streams, top, tile_codes, features, arrays)
            tile_values(
                tile_base,
                mantissa_bits,
                tile_codes,
                arrays.residuals,
                arrays.cell_bits,
                is_middle,
                arrays.edges,
                decoded,
            )
        else:
            decoded[:] = tile_base
        if len(deltas):
            differences = deltas[tile:stop]
            tile_deltas(tile_base, mantissa_bits, decoded, tile_codes, limit, arrays.edges, arrays.expert, differences)
            if has_centroids:
                apply_centroids(contexts, tile_codes, exact_masks, centroids, differences)


@kernel
def _replace_exceptions(
    stored: Bytes, streams: ResidualStreams, base: Bits16, mantissa_bits: int, codes: Bytes, exact_masks: Integers,
    limit: np.float32, values: Bits16, deltas: Floats,
) -> None:  # fmt: skip
    """Replace the values or deltas of all exceptions."""
    for stream in range(3):
        if streams.counts[stream] == 0:
            continue
        if len(deltas):
            replace_exception_deltas(
                stored, streams.exceptions[stream], base, mantissa_bits, codes, exact_masks, limit, deltas
            )
        else:
            replace_exception_values(stored, streams.exceptions[stream], values)


@kernel
def decode_tiles(
    stored: Bytes, cursors_PF: Counts, requested_P: Bytes, base: Bits16, mantissa_bits: int, cuts: Floats,
    limit: np.float32, features: int, table: Bits32, body_table: Bits32, codes: Bytes, values: Bits16, deltas: Floats,
) -> None:  # fmt: skip
    """Decode the requested pieces into `values`, or into `deltas` if that is not empty.

    Pieces are in `stored` (from POSITION to END of `cursors_PF`; others have no bytes), which is readable for as many
    bytes as the base has, and `SPARE_BYTES`, after the last. Faults are recorded in the cursors. `codes` is as long as
    the base; tables have `rans.TOTAL` entries for each context. No content makes it access anything outside the arrays.
    """
    n, has_body = len(base), bool(requested_P[BODY])
    lows, cell_bits = np.zeros(MAX_CONTEXTS, np.uint8), np.zeros(MAX_CONTEXTS, np.uint8)
    centroids = np.zeros((MAX_CONTEXTS + 1) * N_CODES, np.float32)
    n_contexts = read_contexts(stored, cursors_PF[HEAD], lows)
    if n_contexts == 0:
        return
    read_centroids(stored, cursors_PF[HEAD], n_contexts, 1, FIRST_BODY_CODE, centroids)
    head = _read_stage(
        stored, cursors_PF[HEAD], n_contexts, HEAD_SYMBOLS, bool(features & VECTOR_SYMBOLS), _padded(n), table
    )
    body = head
    if has_body:
        read_cell_bits(stored, cursors_PF[BODY], n_contexts, cell_bits)
        read_centroids(stored, cursors_PF[BODY], n_contexts, FIRST_BODY_CODE, FIRST_CELL_CODE, centroids)
        body = _read_stage(stored, cursors_PF[BODY], n_contexts, BODY_SYMBOLS, False, _padded(n), body_table)
    streams = _read_residual_streams(stored, cursors_PF, requested_P, n, cell_bits)
    if cursors_PF[:, FAULT].any():
        return
    tables = BlockTables(lows[:n_contexts], cell_bits, centroids, _exact_code_masks(requested_P))
    _mask_centroids(tables.exact_masks, centroids)
    _decode_all_tiles(
        stored, head, body, streams, tables, requested_P, base, mantissa_bits, cuts, limit, features, codes, values,
        deltas,
    )  # fmt: skip
    _check_ends(cursors_PF, head, body, has_body, streams)
    if cursors_PF[:, FAULT].any():
        return
    _replace_exceptions(stored, streams, base, mantissa_bits, codes, tables.exact_masks, limit, values, deltas)
