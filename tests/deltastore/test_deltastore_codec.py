"""The codec: every bit comes back, levels are what they say, and damage is refused without harm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from symbol_coding import decode_table, scaled

from mergepipe.core.blocks import BF16, DTYPES, F16, F32, DType
from mergepipe.deltastore.codec.block import (
    BlockContext,
    EncodedBlock,
    RawBytes,
    decode_block,
    decode_deltas,
    encode_block,
)
from mergepipe.deltastore.codec.element_codes import Bands
from mergepipe.deltastore.codec.levels import PIECES_OF, RECORDED_LEVELS, Codec, Level, Piece
from mergepipe.deltastore.codec.rans import (
    LANES,
    LOWEST_STATE,
    SKIPPED,
    TOTAL,
    decode_symbols,
    encode_symbols,
    padded_length,
)
from mergepipe.deltastore.pack.encode_pass import choose_bands
from mergepipe.errors import CorruptError
from mergepipe.testing.tensors import SPECIAL
from support.rounding import decode, encode

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(DTYPES.values(), key=lambda dtype: dtype.name))


def bf16_pair(seed: int, n: int, step: float, changed: float = 1.0) -> tuple[RawBytes, RawBytes]:
    """A base and an expert whose deltas have about the size `step`, as stored bytes."""
    rng = np.random.default_rng(seed)
    base_N = decode(encode((rng.standard_normal(n) * 0.02).astype(np.float32), BF16).tobytes(), BF16)
    moved_N = base_N + (rng.standard_normal(n) * step).astype(np.float32)
    expert_N = np.where(rng.random(n) < changed, moved_N, base_N).astype(np.float32)
    return as_bytes(encode(base_N, BF16)), as_bytes(encode(expert_N, BF16))


def as_bytes(stored: NDArray[np.generic]) -> RawBytes:
    return np.frombuffer(stored.tobytes(), np.uint8)


def deltas_of(base: RawBytes, expert: RawBytes) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        return np.asarray(decode(expert.tobytes(), BF16) - decode(base.tobytes(), BF16))


def bands_of(base: RawBytes, expert: RawBytes) -> Bands:
    return choose_bands(deltas_of(base, expert), is_sample=False)


def decoded(block: EncodedBlock, base: RawBytes, dtype: DType, bands: Bands | None) -> RawBytes:
    out = np.full(len(base), 0xA5, np.uint8)
    decode_block(block.codec, block.pieces, BlockContext(base, dtype, bands, "test"), out)
    return out


def deltas_at(block: EncodedBlock, level: Level, base: RawBytes, bands: Bands) -> NDArray[np.float32]:
    """Deltas at a level, from nothing but the pieces that it reads."""
    pieces = {piece: content for piece, content in block.pieces.items() if piece in PIECES_OF[level]}
    out = np.full(len(base) // 2, np.nan, np.float32)
    decode_deltas(block.codec, level, pieces, BlockContext(base, BF16, bands, "test"), out)
    return out


@given(seed=seeds, n=st.integers(1, 3000), dtype=dtypes)
def test_encode_block__any_bits_of_any_dtype_come_back(seed: int, n: int, dtype: DType) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, n * dtype.itemsize, np.uint8)
    expert = base.copy()
    touched = rng.random(len(base)) < rng.random()
    expert[touched] = rng.integers(0, 256, int(touched.sum()), np.uint8)
    bands = Bands((1.0, 0.5, 1e-3)) if dtype is BF16 else None
    block = encode_block(base, expert, dtype, bands)
    assert np.array_equal(decoded(block, base, dtype, bands), expert)


@given(
    seed=seeds, n=st.integers(16_384, 30_000), step=st.floats(-7, 0), changed=st.floats(0, 1), odd=st.floats(0, 0.02)
)
def test_encode_block__experts_near_their_base_come_back(
    seed: int, n: int, step: float, changed: float, odd: float
) -> None:
    base, expert = (part.copy().view(np.uint16) for part in bf16_pair(seed, n, 10.0**step, changed))
    rng = np.random.default_rng(seed)
    specials = encode(SPECIAL[np.isfinite(SPECIAL)], BF16).view(np.uint16)
    for stored in (base, expert):
        places = np.flatnonzero(rng.random(n) < odd)
        stored[places] = rng.choice(specials, len(places))
    bands = bands_of(base.view(np.uint8), expert.view(np.uint8))
    block = encode_block(base.view(np.uint8), expert.view(np.uint8), BF16, bands)
    assert np.array_equal(decoded(block, base.view(np.uint8), BF16, bands), expert.view(np.uint8))
    if odd == 0 and changed > 0:
        assert block.codec in (Codec.BANDS, Codec.SAME)


@pytest.mark.parametrize("bits", [0x7FC1, 0xFF81, 0x7F80, 0xFF80])
def test_encode_block__nan_payloads_and_infinities_come_back(bits: int) -> None:
    base, expert = bf16_pair(1, 8192, 1e-4)
    odd = expert.copy()
    odd.view(np.uint16)[17] = bits
    bands = bands_of(base, expert)
    block = encode_block(base, odd, BF16, bands)
    assert block.codec is Codec.BYTES  # a delta that is not finite has no band
    assert np.array_equal(decoded(block, base, BF16, bands), odd)


def test_encode_block__a_zero_of_the_other_sign_is_an_exception_and_comes_back() -> None:
    base, expert = (part.copy() for part in bf16_pair(2, 16_384, 1e-4))
    base.view(np.uint16)[[5, 6, 7]] = 0x0000, 0x8000, 0x3C00
    expert.view(np.uint16)[[5, 6, 7]] = 0x8000, 0x0000, 0x8000
    bands = bands_of(base, expert)
    block = encode_block(base, expert, BF16, bands)
    assert block.codec is Codec.BANDS
    assert np.array_equal(decoded(block, base, BF16, bands), expert)


def test_encode_block__the_plainest_codec_that_is_needed_is_taken() -> None:
    base, expert = bf16_pair(3, 8192, 1e-4)
    noise = np.random.default_rng(0).integers(0, 256, len(base), np.uint8)
    assert encode_block(base, base.copy(), BF16, bands_of(base, expert)).codec is Codec.SAME
    assert encode_block(base, expert, BF16, None).codec is Codec.BYTES
    assert encode_block(base, noise, BF16, None).codec is Codec.RAW
    assert encode_block(None, noise, BF16, None).codec is Codec.RAW


@pytest.mark.parametrize(("dtype", "share"), [(F16, 0.75), (F32, 0.8)])
def test_encode_block__other_floats_shrink_too(dtype: DType, share: float) -> None:
    rng = np.random.default_rng(4)
    base_N = (rng.standard_normal(8192) * 0.02).astype(np.float32)
    base = as_bytes(encode(base_N, dtype))
    expert = as_bytes(encode((base_N + rng.standard_normal(8192) * 1e-5).astype(np.float32), dtype))
    block = encode_block(base, expert, dtype, None)
    assert block.codec is Codec.BYTES
    assert block.nbytes < share * len(expert)


@given(seed=seeds, step=st.floats(-5, -2), changed=st.floats(0.3, 1))
def test_decode_deltas__the_head_is_exact_above_its_cut_and_zero_below(seed: int, step: float, changed: float) -> None:
    base, expert = bf16_pair(seed, 16_384, 10.0**step, changed)
    bands = bands_of(base, expert)
    block = encode_block(base, expert, BF16, bands)
    assume(block.codec is Codec.BANDS)
    full_N = deltas_of(base, expert)
    head_N = np.where(np.abs(full_N) >= np.float32(bands.cuts[1]), full_N, np.float32(0))
    assert np.array_equal(deltas_at(block, Level.HEAD_EXACT, base, bands), head_N)
    body_N = deltas_at(block, Level.BODY_EXACT, base, bands)
    in_bands_N = np.abs(full_N) >= np.float32(bands.cuts[2])
    assert np.array_equal(body_N[in_bands_N], full_N[in_bands_N])
    assert (np.abs(body_N[~in_bands_N]) <= np.float32(bands.cuts[2])).all()
    assert np.array_equal(deltas_at(block, Level.LOSSLESS, base, bands), full_N)


@given(seed=seeds, step=st.floats(-5, -2), changed=st.floats(0.3, 1))
def test_encode_block__records_the_error_that_each_level_leaves(seed: int, step: float, changed: float) -> None:
    base, expert = bf16_pair(seed, 16_384, 10.0**step, changed)
    bands = bands_of(base, expert)
    block = encode_block(base, expert, BF16, bands)
    assume(block.codec is Codec.BANDS)
    full_N = deltas_of(base, expert).astype(np.float64)
    for level, recorded in zip(RECORDED_LEVELS, block.errors, strict=True):
        left = float(((deltas_at(block, level, base, bands) - full_N) ** 2).sum())
        assert recorded == pytest.approx(left, rel=1e-4, abs=1e-6 * block.errors[0])
    assert block.errors[Level.HEAD] <= block.errors[Level.NOTHING] * (1 + 1e-9)
    assert block.errors[Level.BODY] <= block.errors[Level.HEAD] * (1 + 1e-9)


def test_encode_block__records_the_error_of_blocks_without_levels() -> None:
    base, expert = bf16_pair(6, 100, 1e-3)
    block = encode_block(base, expert, BF16, None)
    squares = float((deltas_of(base, expert).astype(np.float64) ** 2).sum())
    assert block.codec in (Codec.BYTES, Codec.RAW)
    assert block.errors[0] == pytest.approx(squares)
    assert block.errors[1:] == (0.0,) * 4
    ones, twos = (np.full(64, value, np.uint8) for value in (1, 2))
    assert encode_block(ones, twos, DTYPES["I64"], None).errors == (0.0,) * 5


@given(seed=seeds)
def test_encode_block__counts_what_is_in_the_bands(seed: int) -> None:
    base, expert = bf16_pair(seed, 16_384, 1e-4)
    bands = bands_of(base, expert)
    block = encode_block(base, expert, BF16, bands)
    magnitudes_N = np.abs(deltas_of(base, expert))
    assert block.counts == tuple(int((magnitudes_N >= np.float32(cut)).sum()) for cut in bands.cuts)
    for count, density in zip(block.counts, (0.05, 0.2, 0.5), strict=True):
        assert count >= int(density * 16_384)


def test_encode_block__keeps_exceptions_anywhere_in_a_block() -> None:
    """Negative zeros are no numbers past an edge, and no cells: they are listed, by chunks of 64 Ki."""
    base, expert = bf16_pair(3, 200_001, 1e-4)
    expert = expert.copy()
    values = expert.view(np.uint16)
    values[np.random.default_rng(3).permutation(200_001)[:900]] = 0x8000
    values[[0, 65_535, 65_536, 131_072, 200_000]] = 0x8000
    bands = bands_of(base, expert)
    block = encode_block(base, expert, BF16, bands)
    assert block.codec is Codec.BANDS
    assert np.array_equal(decoded(block, base, BF16, bands), expert)


def test_encode_block__is_small_for_a_small_change() -> None:
    base, expert = bf16_pair(5, 1 << 18, 1e-4)
    block = encode_block(base, expert, BF16, bands_of(base, expert))
    head = sum(len(block.pieces[piece]) for piece in (Piece.HEAD, Piece.HEAD_FINE))
    assert block.nbytes < 0.193 * len(expert)
    assert head < 0.116 * len(expert)


@given(seed=seeds)
def test_choose_bands__a_sample_holds_at_least_the_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole_N = rng.standard_normal(200_000).astype(np.float32)
    bands = choose_bands(whole_N[:50_000], is_sample=True)
    first, second, third = ((np.abs(whole_N) >= np.float32(cut)).mean() for cut in bands.cuts)
    assert 0.01 <= first <= 0.09
    assert 0.2 <= second <= 0.22
    assert third >= 0.5


@given(scale=st.floats(1e-30, 1e30), seed=seeds)
def test_choose_bands__bands_are_powers_of_two_wide(scale: float, seed: int) -> None:
    deltas_N = (np.random.default_rng(seed).standard_normal(5000) * scale).astype(np.float32)
    first, second, third = choose_bands(deltas_N, is_sample=False).cuts
    assert math.frexp(first - second)[0] == math.frexp(second - third)[0] == 0.5
    assert 0.4 * second <= first - second < 0.8 * second


def test_choose_bands__of_few_different_sizes_begin_at_them() -> None:
    deltas_N = np.repeat(np.array([0, 1, -1, 3], np.float32), (40, 30, 20, 10))
    first, second, third = choose_bands(deltas_N, is_sample=False).cuts
    assert (second, third) == (1, 1)
    assert first > 1


def test_choose_bands__deltas_that_are_all_zero_or_not_finite_still_have_cuts() -> None:
    for deltas_N in (np.zeros(100, np.float32), np.full(3, np.nan, np.float32), np.empty(0, np.float32)):
        assert choose_bands(deltas_N, is_sample=False).cuts[2] > 0


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=5, max_size=5), min_size=1, max_size=4))
def test_scale_rows__rows_add_up_and_keep_every_symbol(counts: list[list[int]]) -> None:
    counts_CS = np.array(counts, np.int64)
    frequencies_CS = scaled(counts_CS)
    assert set(frequencies_CS.sum(axis=1, dtype=np.int64).tolist()) <= {0, TOTAL}
    assert ((frequencies_CS > 0) == (counts_CS > 0)).all()


def coded_stage(seed: int, n_symbols: int, n_contexts: int) -> tuple[NDArray[np.uint8], ...]:
    """Frequencies, contexts of some elements (some skipped), their symbols: as a stage has them."""
    rng = np.random.default_rng(seed)
    n = padded_length(int(rng.integers(1, 2000)))
    rows_N = rng.integers(0, n_contexts, n).astype(np.uint8)
    symbols_N = (n_symbols * rng.random(n) ** rng.integers(1, 30)).astype(np.uint8)
    rows_N[rng.random(n) < rng.random()] = SKIPPED
    symbols_N[rows_N == SKIPPED] = 0
    counts_CS = np.zeros((n_contexts, n_symbols), np.int64)
    coded_N = rows_N != SKIPPED
    np.add.at(counts_CS, (rows_N[coded_N], symbols_N[coded_N]), 1)
    return scaled(counts_CS).view(np.uint8), rows_N, symbols_N


@given(seed=seeds, n_symbols=st.sampled_from([2, 5, 16, 256]), n_contexts=st.integers(1, 16))
def test_decode_symbols__gives_back_what_was_encoded(seed: int, n_symbols: int, n_contexts: int) -> None:
    stored, rows_N, symbols_N = coded_stage(seed, n_symbols, n_contexts)
    frequencies_CS = stored.view(np.uint16)
    words, states = np.empty(len(rows_N) + 1, np.uint16), np.zeros(LANES, np.uint32)
    first = encode_symbols(symbols_N, rows_N, len(rows_N), frequencies_CS.reshape(-1), n_symbols, words, states)
    coded = np.concatenate([words[first:], np.zeros(first, np.uint16)])
    table, found_N = decode_table(frequencies_CS), np.full(len(rows_N), 7, np.uint8)
    assert decode_symbols(coded.view(np.uint8), 0, states, rows_N, len(rows_N), table, found_N) == len(words) - first
    assert np.array_equal(found_N, symbols_N)
    assert (states == LOWEST_STATE).all()


def test_scale_rows__many_rare_symbols_beside_a_frequent_one_fit() -> None:
    counts_CS = np.ones((1, 256), np.int64)
    counts_CS[0, 7] = 10**9
    assert int(scaled(counts_CS).sum()) == TOTAL


@given(seed=seeds, data=st.data())
def test_decode_block__damaged_pieces_are_refused_or_give_other_values_never_more(
    seed: int, data: st.DataObject
) -> None:
    """Checksums find damage before; this is for a store that was made to lie."""
    base, expert = bf16_pair(seed % 7, 5000, 1e-4)
    bands = bands_of(base, expert)
    banded = encode_block(base, expert, BF16, bands)
    bytewise = encode_block(base, expert, BF16, None)
    block = data.draw(st.sampled_from([banded, bytewise]))
    piece = data.draw(st.sampled_from(sorted(p for p, content in block.pieces.items() if len(content))))
    content = block.pieces[piece].copy()
    rng = np.random.default_rng(seed)
    for _ in range(data.draw(st.integers(1, 8))):
        content[rng.integers(0, min(len(content), data.draw(st.sampled_from([64, 10**9]))))] = rng.integers(0, 256)
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    pieces = {**block.pieces, piece: content[:cut]}
    context = BlockContext(base, BF16, bands, "test")
    for level in (Level.HEAD, Level.HEAD_EXACT, Level.BODY, Level.BODY_EXACT, Level.LOSSLESS):
        out = np.zeros(5000, np.float32)
        try:
            decode_deltas(block.codec, level, pieces, context, out)
        except CorruptError as error:
            refused = error
        else:
            continue
        assert refused.code == "store.damaged"


@pytest.mark.parametrize("dtype", [F32, DTYPES["U8"]])
@pytest.mark.parametrize("level", [Level.HEAD, Level.BODY_EXACT, Level.LOSSLESS])
def test_decode_deltas__refuses_bands_of_other_dtypes_before_anything_is_written(dtype: DType, level: Level) -> None:
    base, expert = bf16_pair(0, 16_384, 1e-4)
    bands = bands_of(base, expert)
    block = encode_block(base, expert, BF16, bands)
    assert block.codec is Codec.BANDS
    context = BlockContext(base, dtype, bands, "test")
    room_N = np.full(32_768, 7, np.float32)
    n = len(base) // dtype.itemsize
    with pytest.raises(CorruptError, match=f"which {dtype.name} does not support"):
        decode_deltas(block.codec, level, block.pieces, context, room_N[:n])
    values = np.full(len(base), 7, np.uint8)
    with pytest.raises(CorruptError, match=f"which {dtype.name} does not support"):
        decode_block(block.codec, block.pieces, context, values)
    assert (room_N == 7).all()
    assert (values == 7).all()
