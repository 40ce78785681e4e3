"""A whole block of bands decoded by one compiled call, tile by tile, so that what is between stays in the cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe.deltastore.codec.decode_tiles_loops import (
    except_deltas,
    numbers_by_four,
    numbers_one_by_one,
    put_exceptions,
    tile_centroids,
    tile_contexts,
    tile_differences,
    tile_edges,
    tile_ones,
    tile_values,
)
from mergepipe.deltastore.codec.levels import Piece
from mergepipe.deltastore.codec.piece_headers import (
    AT,
    FAULT,
    NO_SLOT,
    STOP,
    Fault,
    fail,
    take_centroids,
    take_contexts,
    take_exceptions,
    take_frequencies,
    take_low_bits,
    take_states,
    take_widths,
)
from mergepipe.deltastore.codec.range_decoder import decode_head_by_16, decode_symbols_by_16
from mergepipe.deltastore.codec.rans import (
    LANES,
    LOWEST_STATE,
    MAX_CONTEXTS,
    Halves,
    decode_symbols,
    fill_skipped,
    padded,
)
from mergepipe.deltastore.codec.symbols import (
    BODY_SYMBOLS,
    FIRST_BODY_CODE,
    FIRST_REST_CODE,
    HEAD_SYMBOLS,
    N_CODES,
    TILE,
    Integers,
    body_contexts,
    join_codes,
    top_exponent,
)
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, Floats, kernel

HEAD, HEAD_FINE, BODY, BODY_FINE, REST = (int(piece) for piece in list(Piece)[:5])
_SYMBOLS_END, _NUMBERS_END = int(Fault.SYMBOLS_END), int(Fault.NUMBERS_END)
_padded = kernel(padded)

# What the machine can, as bits of `ways`.
BY_16, BY_FOUR = 1, 2


class Stage(NamedTuple):
    """One stage of symbols on its way: `at` is the byte of the next word, `ends` where they should end."""

    table: Bits32
    states: Bits32
    at: Bits64
    ends: Bits64


class Numbers(NamedTuple):
    """Fine numbers on their way. By stream: the bit of the next one, where exceptions begin, how many these are.

    `widths` are those of bands; of `is_empty` streams all are 0.
    """

    widths: Bytes
    is_empty: Bytes
    at: Bits64
    exceptions: Counts
    counts: Counts


class Tables(NamedTuple):
    """What holds for a whole block. `kept` has ones for codes whose value is known; centroids of these are 0."""

    lows: Bytes
    low_bits: Bytes
    centroids: Floats
    kept: Integers


class Tile(NamedTuple):
    """Room for what is worked out of one tile."""

    rows: Bytes
    body_rows: Bytes
    symbols: Bytes
    body_symbols: Bytes
    cells: Bytes
    no_cells: Bytes
    ones: Halves
    own_ones: Halves
    numbers: Halves
    values: Halves
    edges: Floats
    other: Floats


@kernel
def _take_stage(
    stored: Bytes, cursor: Counts, n_contexts: int, n_symbols: int, by_starts: bool, n_padded: int, table: Bits32
) -> Stage:
    states, at, ends = np.zeros(LANES, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    take_frequencies(stored, cursor, n_contexts, n_symbols, by_starts, table)
    fill_skipped(table)
    n_words = take_states(stored, cursor, n_padded, states)
    at[0] = np.uint64(cursor[AT])
    ends[0] = at[0] + np.uint64(2 * n_words)
    return Stage(table, states, at, ends)


@kernel
def _take_numbers(stored: Bytes, cursors_PF: Counts, wanted_P: Bytes, n: int, low_bits: Bytes) -> Numbers:
    """The fine pieces up to their numbers. One that is empty has neither widths nor exceptions."""
    widths, at, is_empty = np.zeros(NO_SLOT + 1, np.uint8), np.zeros(3, np.uint64), np.ones(3, np.uint8)
    exceptions, counts = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for stream in range(3):
        cursor = cursors_PF[HEAD_FINE if stream == 0 else BODY_FINE if stream == 1 else REST]
        if cursor[AT] < cursor[STOP]:
            if stream < 2:
                first, stop = (1, FIRST_BODY_CODE) if stream == 0 else (FIRST_BODY_CODE, FIRST_REST_CODE)
                is_empty[stream] = take_widths(stored, cursor, first, stop, widths) == 0
            exceptions[stream] = cursor[AT]
            counts[stream] = take_exceptions(stored, cursor, n)
        at[stream] = np.uint64(8 * cursor[AT])
    is_empty[2] = not (wanted_P[REST] and low_bits.any())
    return Numbers(widths, is_empty, at, exceptions, counts)


@kernel
def _known_codes(wanted_P: Bytes) -> Integers:
    """Ones for the codes whose value is known. Of code 0 nothing is: the base's own value; of cells the middle."""
    kept = np.full(N_CODES, -1, np.int32)
    if not wanted_P[HEAD_FINE]:
        kept[1:FIRST_BODY_CODE] = 0
    if not wanted_P[BODY_FINE]:
        kept[FIRST_BODY_CODE:FIRST_REST_CODE] = 0
    return kept


@kernel
def _mask_centroids(kept: Integers, centroids: Floats) -> None:
    """Nothing for codes whose value is known."""
    for code in range(N_CODES):
        if kept[code]:
            centroids[code::N_CODES] = np.float32(0.0)


@kernel
def _make_tile() -> Tile:
    return Tile(
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
def _decode_stage(stored: Bytes, stage: Stage, by_starts: bool, rows: Bytes, ways: int, symbols: Bytes) -> None:
    """The symbols of one tile (padded)."""
    first, n = int(stage.at[0]), len(rows)
    if by_starts:
        taken = decode_head_by_16(stored, first, stage.states, rows, n, stage.table, symbols)
    elif ways & BY_16:
        taken = decode_symbols_by_16(stored, first, stage.states, rows, n, stage.table, symbols)
    else:
        taken = decode_symbols(stored, first, stage.states, rows, n, stage.table, symbols)
    stage.at[0] += np.uint64(2 * taken)


@kernel
def _decode_numbers(stored: Bytes, numbers: Numbers, top: np.int32, codes: Bytes, ways: int, room: Tile) -> None:
    """The fine numbers of one tile, whose edges are known."""
    ones = room.ones[: len(codes)]
    cells = room.no_cells if numbers.is_empty[2] else room.cells
    tile_ones(room.edges, codes, cells, top, numbers.widths, room.symbols, room.body_symbols, ones)
    if ways & BY_FOUR:
        numbers_by_four(stored, numbers.at, numbers.is_empty, codes, ones, room.own_ones, room.numbers)
    else:
        numbers_one_by_one(stored, numbers.at, codes, ones, room.numbers)


@kernel
def _check_ends(cursors_PF: Counts, head: Stage, body: Stage, has_body: bool, numbers: Numbers) -> None:
    """Check that all words and numbers were taken, and that states are what encoding begins with."""
    for number in range(2 if has_body else 1):
        stage = body if number else head
        is_end = stage.at[0] == stage.ends[0]
        for lane in range(LANES):
            is_end &= stage.states[lane] == np.uint32(LOWEST_STATE)
        if not is_end:
            fail(cursors_PF[BODY if number else HEAD], _SYMBOLS_END, 0, 0)
    for stream in range(3):
        cursor = cursors_PF[HEAD_FINE if stream == 0 else BODY_FINE if stream == 1 else REST]
        if np.int64((numbers.at[stream] + np.uint64(7)) >> np.uint64(3)) != cursor[STOP]:
            fail(cursor, _NUMBERS_END, 0, 0)


@kernel
def _decode_all(
    stored: Bytes, head: Stage, body: Stage, numbers: Numbers, tables: Tables, wanted_P: Bytes, base: Halves,
    cuts: Floats, limit: np.float32, ways: int, codes: Bytes, values: Halves, deltas: Floats,
) -> None:  # fmt: skip
    """Tile by tile: contexts, codes, values, deltas."""
    room, n, centroids, kept = _make_tile(), len(base), tables.centroids, tables.kept
    has_body, half = bool(wanted_P[BODY]), 1 - int(wanted_P[REST])
    has_values = wanted_P[HEAD_FINE] | wanted_P[BODY]
    top = top_exponent(int(tables.lows[0]), int(cuts.view(np.int32)[0]))
    has_centroids = not wanted_P[HEAD_FINE] or (has_body and not wanted_P[BODY_FINE])
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        own, own_codes, n_padded = base[tile:stop], codes[tile:stop], _padded(stop - tile)
        rows = room.rows[:n_padded]
        tile_contexts(own, tables.lows, tables.low_bits, len(tables.lows), room.symbols, rows, room.cells)
        symbols = room.symbols[:n_padded]
        _decode_stage(stored, head, bool(ways & BY_16), rows, ways, symbols)
        if has_body:
            body_rows, body_symbols = room.body_rows[:n_padded], room.body_symbols[:n_padded]
            body_contexts(rows, symbols, n_padded, body_rows)
            _decode_stage(stored, body, False, body_rows, ways, body_symbols)
            join_codes(symbols, body_symbols, len(own), own_codes)
        else:
            for i in range(len(own)):
                own_codes[i] = symbols[i]
        found = room.values[: stop - tile] if len(deltas) else values[tile:stop]
        if has_values:
            tile_edges(own, own_codes, cuts, room.edges)
            _decode_numbers(stored, numbers, top, own_codes, ways, room)
            tile_values(own, own_codes, room.numbers, room.cells, half, room.edges, found)
        else:
            found[:] = own
        if len(deltas):
            differences = deltas[tile:stop]
            tile_differences(own, found, own_codes, limit, room.edges, room.other, differences)
            if has_centroids:
                tile_centroids(rows, own_codes, kept, centroids, differences)


@kernel
def _put_exceptions(
    stored: Bytes, numbers: Numbers, base: Halves, codes: Bytes, kept: Integers, limit: np.float32, values: Halves,
    deltas: Floats,
) -> None:  # fmt: skip
    for stream in range(3):
        if numbers.counts[stream] == 0:
            continue
        if len(deltas):
            except_deltas(stored, numbers.exceptions[stream], base, codes, kept, limit, deltas)
        else:
            put_exceptions(stored, numbers.exceptions[stream], values)


@kernel
def decode_tiles(
    stored: Bytes, cursors_PF: Counts, wanted_P: Bytes, base: Halves, cuts: Floats, limit: np.float32, ways: int,
    table: Bits32, body_table: Bits32, codes: Bytes, values: Halves, deltas: Floats,
) -> None:  # fmt: skip
    """Decode the pieces that are wanted into `values`, or into `deltas` where that is not empty.

    Pieces lie in `stored` (`cursors_PF`: from AT to STOP; others have no bytes), which has room for as many bytes as
    the base and `SPARE_BYTES` after the last. Faults are left in the cursors. `codes` is as long as the base; tables
    have `rans.TOTAL` entries for each context. Nothing outside the arrays is read or written, whatever they hold.
    """
    n, has_body = len(base), bool(wanted_P[BODY])
    lows, low_bits = np.zeros(MAX_CONTEXTS, np.uint8), np.zeros(MAX_CONTEXTS, np.uint8)
    centroids = np.zeros((MAX_CONTEXTS + 1) * N_CODES, np.float32)
    n_contexts = take_contexts(stored, cursors_PF[HEAD], lows)
    if n_contexts == 0:
        return
    take_centroids(stored, cursors_PF[HEAD], n_contexts, 1, FIRST_BODY_CODE, centroids)
    head = _take_stage(stored, cursors_PF[HEAD], n_contexts, HEAD_SYMBOLS, bool(ways & BY_16), _padded(n), table)
    body = head
    if has_body:
        take_low_bits(stored, cursors_PF[BODY], n_contexts, low_bits)
        take_centroids(stored, cursors_PF[BODY], n_contexts, FIRST_BODY_CODE, FIRST_REST_CODE, centroids)
        body = _take_stage(stored, cursors_PF[BODY], n_contexts, BODY_SYMBOLS, False, _padded(n), body_table)
    numbers = _take_numbers(stored, cursors_PF, wanted_P, n, low_bits)
    if cursors_PF[:, FAULT].any():
        return
    tables = Tables(lows[:n_contexts], low_bits, centroids, _known_codes(wanted_P))
    _mask_centroids(tables.kept, centroids)
    _decode_all(stored, head, body, numbers, tables, wanted_P, base, cuts, limit, ways, codes, values, deltas)
    _check_ends(cursors_PF, head, body, has_body, numbers)
    if cursors_PF[:, FAULT].any():
        return
    _put_exceptions(stored, numbers, base, codes, tables.kept, limit, values, deltas)
