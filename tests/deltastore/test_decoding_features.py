"""Decoding: every way that machines have gives the same bits, arrays are reused, and the base is looked at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from symbol_coding import decode_table, scaled

from mergepipe.checkpoints.contract import BaseBytes
from mergepipe.core.blocks import BF16
from mergepipe.deltastore.codec.arrays import KEPT_BYTES, scratch
from mergepipe.deltastore.codec.block import (
    BAND_PIECES,
    BandBlocks,
    decode_band_blocks,
    decode_band_deltas,
    decode_band_values,
    encode_bands,
    padding_bytes,
)
from mergepipe.deltastore.codec.element_codes import (
    BODY_SYMBOLS,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    HEAD_SYMBOLS,
    LAST_CELL_CODE,
    TILE,
    Bands,
)
from mergepipe.deltastore.codec.levels import PIECES_OF, Level, Piece
from mergepipe.deltastore.codec.piece_headers import CURSOR_FIELDS, END, POSITION
from mergepipe.deltastore.codec.rans import (
    LANES,
    MAX_CONTEXTS,
    SKIPPED,
    TOTAL,
    decode_symbols,
)
from mergepipe.deltastore.codec.residuals import HAS_PDEP
from mergepipe.deltastore.codec.stream_elements import (
    ALL_ROOM,
    DECODED_TILE,
    HAS_COMPRESSION,
    ROUND,
    STREAM_ROOM,
    collect_scalar,
    collect_streams_scalar,
    collect_streams_vector,
    collect_vector,
    place_scalar,
    place_vector,
)
from mergepipe.deltastore.codec.symbol_stages import decode_codes_scalar
from mergepipe.deltastore.codec.tile_decode import VECTOR_RESIDUALS, VECTOR_SYMBOLS
from mergepipe.deltastore.codec.vector_symbols import (
    BODY_ROW,
    N_STARTS,
    decode_codes_vector,
    fill_starts,
    has_vector_decoder,
)
from mergepipe.deltastore.pack.encode_pass import choose_bands
from mergepipe.errors import CorruptError
from support.rounding import decode, encode

FEATURE_SETS = (
    [0]
    + [VECTOR_SYMBOLS] * has_vector_decoder()
    + [VECTOR_RESIDUALS] * HAS_PDEP
    + [VECTOR_SYMBOLS | VECTOR_RESIDUALS] * (has_vector_decoder() and HAS_PDEP)
)
LEVELS = (Level.HEAD, Level.HEAD_EXACT, Level.BODY, Level.BODY_EXACT)
Pieces = dict[Piece, NDArray[np.uint8]]
Bits16 = NDArray[np.uint16]


def encoded(seed: int, n: int, step: float) -> tuple[Bits16, Bits16, Bands, Pieces]:
    """A base and an expert in bf16, their bands and pieces; a few elements are far away."""
    rng = np.random.default_rng(seed)
    base_N = decode(encode((rng.standard_normal(n) * 0.02).astype(np.float32), BF16).tobytes(), BF16)
    expert_N = (base_N + rng.standard_normal(n) * step).astype(np.float32)
    expert_N[rng.random(n) < 0.002] *= np.float32(-1000)
    base, expert = (np.frombuffer(encode(each, BF16).tobytes(), np.uint16).copy() for each in (base_N, expert_N))
    bands = choose_bands(np.asarray(decode(expert.tobytes(), BF16) - base_N), is_sample=False)
    block = encode_bands(base, expert, bands)
    assert block is not None
    return base, expert, bands, {piece: np.asarray(content) for piece, content in block.pieces.items()}


def deltas_of(pieces: Pieces, level: Level, base: Bits16, bands: Bands, features: int) -> bytes:
    out = np.full(len(base), np.nan, np.float32)
    wanted = {piece: content for piece, content in pieces.items() if piece in PIECES_OF[level]}
    decode_band_deltas(wanted, level, base, bands, "test", out, features)
    return out.tobytes()


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(4096, 9000), step=st.floats(-6, 0))
def test_decode_band_values__every_way_gives_the_same_bits(seed: int, n: int, step: float) -> None:
    base, expert, bands, pieces = encoded(seed, n, 10.0**step)
    for features in FEATURE_SETS:
        values = np.zeros(n, np.uint16)
        decode_band_values(pieces, base, bands, "test", values, features)
        assert np.array_equal(values, expert)
    for level in LEVELS:
        assert len({deltas_of(pieces, level, base, bands, features) for features in FEATURE_SETS}) == 1


@pytest.mark.parametrize("features", FEATURE_SETS)
def test_decode_band_blocks__equal_the_blocks_decoded_alone(features: int) -> None:
    n, last = 5000, 4111
    bands = encoded(1, n, 1e-3)[2]
    blocks = []
    for seed, length in ((1, n), (2, n), (3, last)):
        base, expert, _, _ = encoded(seed, length, 1e-3)
        block = encode_bands(base, expert, bands)
        assert block is not None
        blocks.append((base, expert, block.pieces))
    cursors_BPF = np.zeros((3, len(BAND_PIECES), CURSOR_FIELDS), np.int64)
    contents, end = [], 7
    for piece in BAND_PIECES:
        for cursors_PF, (_, _, pieces) in zip(cursors_BPF, blocks, strict=True):
            cursors_PF[piece, POSITION], cursors_PF[piece, END] = end, end + len(pieces[piece])
            contents.append(pieces[piece])
            end += len(pieces[piece])
    stored = np.concatenate([np.zeros(7, np.uint8), *contents, np.zeros(padding_bytes(n), np.uint8)])
    whole = BandBlocks(stored, cursors_BPF, np.concatenate([base for base, _, _ in blocks]), n)
    values, deltas = np.zeros(2 * n + last, np.uint16), np.zeros(2 * n + last, np.float32)
    decode_band_blocks(whole, Level.LOSSLESS, bands, str, values, deltas[:0], features)
    assert np.array_equal(values, np.concatenate([expert for _, expert, _ in blocks]))
    coarse = replace(whole, cursors_BPF=cursors_BPF.copy())
    coarse.cursors_BPF[:, [Piece.HEAD_FINE, Piece.BODY_FINE, Piece.REST]] = 0
    decode_band_blocks(coarse, Level.BODY, bands, str, values[:0], deltas, features)
    alone = [deltas_of(dict(pieces), Level.BODY, base, bands, features) for base, _, pieces in blocks]
    assert deltas.tobytes() == b"".join(alone)
    cursors_BPF[1, Piece.REST, END] -= 1
    with pytest.raises(CorruptError) as refused:
        decode_band_blocks(whole, Level.LOSSLESS, bands, lambda block: f"block {block}", values, deltas[:0], features)
    assert str(refused.value).startswith("block 1: ")


def test_decode_band_values__reads_and_writes_arrays_of_any_alignment() -> None:
    base, expert, bands, pieces = encoded(1, 5000, 1e-4)
    odd = np.empty(10_001, np.uint8)[1:]
    odd[:] = base.view(np.uint8)
    odd.flags.writeable = False
    out = np.zeros(10_001, np.uint8)[1:]
    decode_band_values(pieces, odd.view(np.uint16), bands, "test", out.view(np.uint16))
    assert np.array_equal(out, expert.view(np.uint8))


def test_decode_band_values__what_was_decoded_before_in_a_thread_leaves_no_trace() -> None:
    blocks = [encoded(seed, n, step) for seed, n, step in ((1, 9000, 1e-2), (2, 4096, 1e-5), (3, 6000, 1e-3))]

    def decode_all(_: int) -> None:
        for base, expert, bands, pieces in blocks * 3:
            values = np.zeros(len(base), np.uint16)
            decode_band_values(pieces, base, bands, "test", values)
            assert np.array_equal(values, expert)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(decode_all, range(8)))) == 8


@pytest.mark.parametrize("features", FEATURE_SETS)
@pytest.mark.parametrize("piece", [Piece.HEAD, Piece.HEAD_FINE, Piece.BODY, Piece.BODY_FINE, Piece.REST])
def test_decode_band_values__pieces_that_end_early_or_late_are_refused(piece: Piece, features: int) -> None:
    base, _, bands, pieces = encoded(4, 5000, 1e-3)
    own, values = pieces[piece], np.zeros(5000, np.uint16)
    for content in (own[:-1], own[:-2], own[:3], np.append(own, np.zeros(2, np.uint8)), np.zeros(40_000, np.uint8)):
        with pytest.raises(CorruptError) as refused:
            decode_band_values({**pieces, piece: content}, base, bands, "test", values, features)
        assert refused.value.code == "store.damaged"


@given(seed=st.integers(0, 2**32 - 1), n_contexts=st.integers(1, MAX_CONTEXTS), has_body=st.booleans())
def test_decode_codes__decodes_whatever_words_as_each_stage_alone(seed: int, n_contexts: int, has_body: bool) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 20)) * LANES
    contexts_N = rng.integers(0, n_contexts, n).astype(np.uint8)
    contexts_N[rng.random(n) < 0.1] = SKIPPED
    words_SW = rng.integers(0, 256, (2, 2 * n + 64)).astype(np.uint8)
    states = rng.integers(0, 1 << 31, 2 * LANES).astype(np.uint32)
    starts, left, tables = np.full(N_STARTS, TOTAL, np.uint16), states.copy(), []
    symbols, ends = [], []
    stage_contexts_N = contexts_N
    for stage, n_symbols in enumerate((HEAD_SYMBOLS, BODY_SYMBOLS)[: 1 + has_body]):
        counts_CS = rng.integers(0, 100, (n_contexts, n_symbols)) * (rng.random((n_contexts, n_symbols)) < 0.6)
        frequencies_CS = scaled(counts_CS)
        table = decode_table(frequencies_CS)
        for context, row_S in enumerate(frequencies_CS):
            fill_starts(row_S.astype(np.uint32), context, stage * BODY_ROW, starts)
        tables.append(table)
        symbols.append(np.zeros(n, np.uint8))
        own = left[stage * LANES : (stage + 1) * LANES]
        ends.append(2 * decode_symbols(words_SW[stage], 0, own, stage_contexts_N, n, table, symbols[-1]))
        stage_contexts_N = np.where(symbols[0] == 0, contexts_N, SKIPPED).astype(np.uint8)
    expected_N = symbols[0]
    if has_body:
        expected_N = np.where(symbols[0] > 0, symbols[0], symbols[1] + FIRST_BODY_CODE)
        expected_N[contexts_N == SKIPPED] = 0
    first = np.array([0, words_SW.shape[1]], np.uint64)
    ways: list[tuple[Any, Sequence[Any]]] = []
    if has_vector_decoder():
        ways.append((decode_codes_vector, (starts, has_body)))
    if has_body:
        ways.append((decode_codes_scalar, tables))
    for decode_codes, found_in in ways:
        codes_N, positions, own = np.zeros(n, np.uint8), first.copy(), states.copy()
        decode_codes(words_SW.reshape(-1), positions, own, contexts_N, n, *found_in, codes_N)
        assert np.array_equal(np.where(contexts_N == SKIPPED, 0, codes_N), expected_N)
        assert np.array_equal(own, left)
        assert (positions - first)[: 1 + has_body].tolist() == ends


WAYS = [(collect_scalar, place_scalar), *([(collect_vector, place_vector)] if HAS_COMPRESSION else [])]


@pytest.mark.parametrize(("collect", "place"), WAYS)
@pytest.mark.parametrize("n", [ROUND, TILE])
def test_place__puts_what_was_collected_back_and_zeros_elsewhere(collect: Any, place: Any, n: int) -> None:
    rng = np.random.default_rng(n)
    codes_N = rng.integers(0, LAST_CELL_CODE + 1, n).astype(np.uint8)
    values_N = rng.integers(1, 1 << 16, n).astype(np.uint16)
    collected, octets = np.zeros(ALL_ROOM, np.uint16), np.empty(STREAM_ROOM, np.uint8)
    bounds = (1, FIRST_BODY_CODE, FIRST_CELL_CODE, LAST_CELL_CODE + 1)
    for stream, (first, stop) in enumerate(itertools.pairwise(bounds)):
        room = collected[stream * STREAM_ROOM : (stream + 1) * STREAM_ROOM]
        is_in_N = (codes_N >= first) & (codes_N < stop)
        count = collect(codes_N, n, first, stop - 1, codes_N, values_N, octets, room)
        assert np.array_equal(octets[:count], codes_N[is_in_N])
        assert np.array_equal(room[:count], values_N[is_in_N])
    for n_streams in (1, 3):
        is_placed_N = (codes_N > 0) & (codes_N < bounds[n_streams])
        for kind in (np.uint16, np.float32):
            placed_N = np.ones(n, kind)
            place(codes_N, n, collected.astype(kind), placed_N, n_streams)
            assert np.array_equal(placed_N, np.where(is_placed_N, values_N, 0).astype(kind))


@pytest.mark.parametrize("collect", [collect_streams_scalar, *([collect_streams_vector] if HAS_COMPRESSION else [])])
@pytest.mark.parametrize(("n", "n_streams"), [(ROUND, 3), (TILE, 1), (DECODED_TILE, 3)])
def test_collect_streams__has_the_codes_and_base_of_each_stream_in_order(collect: Any, n: int, n_streams: int) -> None:
    rng = np.random.default_rng(n)
    codes_N = rng.integers(0, LAST_CELL_CODE + 1 if n_streams == 3 else FIRST_BODY_CODE, n).astype(np.uint8)
    base_N = rng.integers(1, 1 << 16, n).astype(np.uint16)
    stream_codes, stream_base = np.zeros(ALL_ROOM, np.uint8), np.zeros(ALL_ROOM, np.uint16)
    counts = np.full(3, -1, np.int64)
    collect(codes_N, n, base_N, n_streams, stream_codes, stream_base, counts)
    bounds = (1, FIRST_BODY_CODE, FIRST_CELL_CODE, LAST_CELL_CODE + 1)
    for stream, (first, stop) in enumerate(itertools.pairwise(bounds[: n_streams + 1])):
        is_in_N, at = (codes_N >= first) & (codes_N < stop), stream * STREAM_ROOM
        assert counts[stream] == is_in_N.sum()
        assert np.array_equal(stream_codes[at : at + counts[stream]], codes_N[is_in_N])
        assert np.array_equal(stream_base[at : at + counts[stream]], base_N[is_in_N])
    assert (counts[n_streams:] == -1).all()


def test_scratch__is_a_thread_s_own_and_kept_up_to_a_limit() -> None:
    first = scratch("test", 1000, np.uint32)
    assert first.ctypes.data == scratch("test", 10, np.uint8).ctypes.data
    assert first.ctypes.data % 4096 == 0
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(scratch("test", 1000, np.uint32).ctypes.data))
    thread.start()
    thread.join()
    assert others != [first.ctypes.data]
    large = scratch("test", KEPT_BYTES + 1, np.uint8)
    assert len(large) == KEPT_BYTES + 1
    assert scratch("test", 1000, np.uint32).ctypes.data == first.ctypes.data


def test_base_bytes__digests_are_those_of_the_bytes_and_taken_once() -> None:
    stored = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    base = BaseBytes(stored)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: base.digest(100, 4000), range(16)))
    assert found == {blake3(stored[100:4000].tobytes()).digest(16)}
    stored[200] ^= 1  # not looked at again
    assert base.digest(100, 4000) in found
    assert base.digest(0, 5000) == blake3(stored.tobytes()).digest(16)
