"""Encoding: every kernel against a slow reference, scalar against vector code, and golden digests of the output."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from symbol_coding import scaled

from mergepipe.core.blocks import BF16, F32
from mergepipe.deltastore.codec.block import EncodedBlock, RawBytes, base_contexts, encode_block
from mergepipe.deltastore.codec.element_codes import (
    BODY_SYMBOLS,
    EDGE_CLASSES,
    ERROR_SUMS,
    EXCEPTION_BITS,
    FIRST_BODY_CODE,
    HEAD_SYMBOLS,
    MAX_CELL_BITS,
    N_CODES,
    N_WIDTHS,
    NEAR_CELLS,
    QUANTILE_BUCKETS,
    STREAM_CODES,
    SUMS_SHAPE,
    WIDTH_COUNTS,
    WIDTHS_PER_CLASS,
    Bands,
    sum_tile,
)
from mergepipe.deltastore.codec.levels import Codec
from mergepipe.deltastore.codec.rans import (
    LANES,
    MAX_CONTEXTS,
    SKIPPED,
    TOTAL,
    Bits16,
    padded_length,
)
from mergepipe.deltastore.codec.residuals import (
    FIRST_STEP_COUNT,
    N_SAMPLE_COUNTS,
    choose_widths,
    pack_residuals,
    packed_capacity,
)
from mergepipe.deltastore.codec.symbol_stages import Contexts, encode_stages_scalar, encode_stages_vector
from mergepipe.deltastore.codec.vector_symbols import HAS_VECTOR_ENCODER
from mergepipe.deltastore.codec.vectors import HAS_VECTOR_LOOKUP, bytes_equal, look_up_scalar, look_up_vector
from mergepipe.kernels.compiled import Bytes, Counts

seeds = st.integers(0, 2**32 - 1)
_FEATURES = [look_up_scalar, *([look_up_vector] if HAS_VECTOR_LOOKUP else [])]
_BANDS = Bands((6e-5, 2e-5, 3e-6))


def mixed(n: int, seed: int) -> NDArray[np.uint64]:
    """Numbers that look random and are the same for ever."""
    words = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    return words ^ (words >> np.uint64(32))


def lasting_pair(n: int, seed: int, spread: int) -> tuple[RawBytes, RawBytes]:
    """Bf16 of several exponents and both signs, and others at most `spread` places from most of them."""
    base = ((mixed(n, seed) & np.uint64(0x83FF)) | np.uint64(0x3800)).astype(np.uint16)
    steps = (mixed(n, seed + 1) % np.uint64(2 * spread + 1)).astype(np.int64) - spread
    steps[mixed(n, seed + 2) % np.uint64(3) == 0] = 0
    expert = (base.astype(np.int64) + steps).astype(np.uint16)
    expert[:: n // 7] = 0x8000
    return base.view(np.uint8), expert.view(np.uint8)


def block_digest(block: EncodedBlock) -> str:
    """A hash of all that is stored of a block."""
    hasher = blake3()
    for piece in sorted(block.pieces):
        hasher.update(len(block.pieces[piece]).to_bytes(4, "little"))
        hasher.update(block.pieces[piece].tobytes())
    hasher.update(np.array(block.errors, np.float32).tobytes() + np.array(block.counts, np.uint32).tobytes())
    return hasher.hexdigest(8)


@pytest.mark.parametrize(
    ("n", "spread", "digest"),
    [
        (16_385, 3, "22b394f6fddec580"),
        (20_001, 40, "1105f3d9c114110b"),
        (70_001, 9, "a0df1d0efe2e2d2e"),
        (262_144, 2, "301686f28b68e76f"),
    ],
)
def test_encode_block__writes_the_bytes_that_it_has_always_written(n: int, spread: int, digest: str) -> None:
    base, expert = lasting_pair(n, 11, spread)
    block = encode_block(base, expert, BF16, _BANDS)
    assert block.codec is Codec.BANDS
    assert block_digest(block) == digest


@pytest.mark.parametrize("n", [4096, 4097, 70_001])
def test_base_contexts__shared_by_several_experts_give_the_same_blocks(n: int) -> None:
    base, _ = lasting_pair(n, 5, 1)
    experts = [lasting_pair(n, 5, spread)[1] for spread in (2, 6, 30)]
    alone = [block_digest(encode_block(base, expert, BF16, _BANDS)) for expert in experts]
    prepared = base_contexts(base, BF16)
    assert prepared is not None
    assert [block_digest(encode_block(base, expert, BF16, _BANDS, prepared)) for expert in experts] == alone


def test_base_contexts__are_none_for_blocks_without_bands() -> None:
    base, _ = lasting_pair(4096, 5, 1)
    assert base_contexts(None, BF16) is None
    assert base_contexts(base, F32) is None
    assert base_contexts(base[:-2], BF16) is None


def test_encode_block__takes_arrays_that_are_read_only_or_not_aligned() -> None:
    base, expert = lasting_pair(5001, 3, 4)
    wanted = block_digest(encode_block(base, expert, BF16, _BANDS))
    shifted = [np.concatenate([np.zeros(1, np.uint8), part])[1:] for part in (base, expert)]
    frozen = [np.frombuffer(part.tobytes(), np.uint8) for part in (base, expert)]
    for own, other in (shifted, frozen):
        assert block_digest(encode_block(own, other, BF16, _BANDS)) == wanted


def test_encode_block__threads_do_not_disturb_each_other() -> None:
    pairs = [lasting_pair(20_000 + 100 * i, i, 1 + i) for i in range(8)]
    wanted = [block_digest(encode_block(base, expert, BF16, _BANDS)) for base, expert in pairs]
    with ThreadPoolExecutor(4) as pool:
        blocks = list(pool.map(lambda pair: encode_block(pair[0], pair[1], BF16, _BANDS), pairs * 4))
    assert [block_digest(block) for block in blocks] == wanted * 4


@given(seed=seeds, n=st.integers(0, 10_000), flip=st.integers(0, 9_999))
def test_bytes_equal__agrees_with_a_comparison_of_all_bytes(seed: int, n: int, flip: int) -> None:
    first = np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8)
    second = first.copy()
    assert bytes_equal(first, second)
    if n:
        second[flip % n] ^= 1
        assert not bytes_equal(first, second)
        assert not bytes_equal(first, first[:-1])


@pytest.mark.parametrize("way", range(len(_FEATURES)))
@given(seed=seeds, n=st.integers(0, 300))
def test_look_up__finds_what_indexing_finds(way: int, seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    table, indices = (rng.integers(0, 256, size).astype(np.uint8) for size in (256, n))
    wanted, out = table[indices], indices.copy()
    _FEATURES[way](table, out, n, out)  # in place, as contexts are looked up
    assert np.array_equal(out, wanted)


def random_codes(seed: int, n: int, n_contexts: int, skew: int) -> tuple[Bytes, Bytes]:
    """Contexts and codes of `n` elements, padded."""
    rng = np.random.default_rng(seed)
    contexts, codes = np.full(padded_length(n), SKIPPED, np.uint8), np.zeros(padded_length(n), np.uint8)
    contexts[:n] = rng.integers(0, n_contexts, n)
    shares = rng.random(20) ** skew + 1e-9
    codes[:n] = rng.choice(np.arange(1, 21), n, p=shares / shares.sum())
    return contexts, codes


@pytest.mark.skipif(not HAS_VECTOR_ENCODER, reason="this machine has one way only")
@given(seed=seeds, n=st.integers(1, 3000), n_contexts=st.integers(1, MAX_CONTEXTS), skew=st.sampled_from([0, 1, 8, 40]))
def test_encode_stages_vector__gives_what_the_scalar_one_gives(seed: int, n: int, n_contexts: int, skew: int) -> None:
    contexts, codes = random_codes(seed, n, n_contexts, skew)
    counts_CK = np.zeros((n_contexts, N_CODES), np.int64)
    np.add.at(counts_CK, (contexts[:n], codes[:n]), 1)
    head_counts_CS = counts_CK[:, :HEAD_SYMBOLS].copy()
    head_counts_CS[:, 0] = counts_CK[:, FIRST_BODY_CODE:].sum(axis=1)
    body_counts_CS = counts_CK[:, FIRST_BODY_CODE : FIRST_BODY_CODE + BODY_SYMBOLS]
    head, body = (scaled(counts_CS).reshape(-1) for counts_CS in (head_counts_CS, body_counts_CS))
    half, coded = len(contexts) + 1, []
    for way in (encode_stages_vector, encode_stages_scalar):
        words, states, ends = np.zeros(2 * half, np.uint16), np.zeros(2 * LANES, np.uint32), np.zeros(2, np.int64)
        way(contexts, codes, len(contexts), head, body, words, states, ends)
        coded.append([states.tolist(), words[ends[0] : half].tolist(), words[ends[1] :].tolist()])
    assert coded[0] == coded[1]


@given(seed=seeds, n=st.integers(1, 5000), widest=st.integers(0, 15))
def test_pack_streams__hold_the_residuals_bit_by_bit(seed: int, n: int, widest: int) -> None:
    rng = np.random.default_rng(seed)
    codes, widths = rng.integers(1, 21, n).astype(np.uint8), rng.integers(0, widest + 1, n).astype(np.uint8)
    residuals = (rng.integers(0, 1 << 15, n) & ((1 << widths.astype(np.int64)) - 1)).astype(np.uint16)
    words, n_bits = np.zeros((3, packed_capacity(n)), np.uint64), np.zeros(3, np.int64)
    pack_residuals(codes, residuals, widths, words.reshape(-1), n_bits)
    for stream, (first, last) in enumerate(STREAM_CODES):
        packed = words[stream].view(np.uint8)[: -(-n_bits[stream] // 8)]
        own = (codes >= first) & (codes <= last)
        bits = "".join(
            format(residual, f"0{width}b")[::-1]
            for residual, width in zip(residuals[own], widths[own], strict=True)
            if width
        )
        wanted = np.packbits(np.array([int(bit) for bit in bits], np.uint8), bitorder="little")
        assert np.array_equal(packed, wanted)


def slowly_scaled(counts_S: Counts) -> list[int]:
    """Frequencies of one context, as the format's first writer worked them out."""
    total = int(counts_S.sum())
    if not total:
        return [0] * len(counts_S)
    row = [max(int(count) * TOTAL // total, 1) if count else 0 for count in counts_S]
    while (excess := sum(row) - TOTAL) > 0:
        largest = row.index(max(row))
        row[largest] -= min(excess, max(row[largest] // 2, 1))
    row[row.index(max(row))] -= excess
    return row


@given(seed=seeds, n_symbols=st.sampled_from([5, 16, 256]), most=st.integers(1, 300_000), share=st.floats(0, 1))
def test_scale_rows__gives_what_the_first_writer_gave(seed: int, n_symbols: int, most: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    counts_CS = rng.integers(0, most, (3, n_symbols)) * (rng.random((3, n_symbols)) < share)
    assert scaled(counts_CS).tolist() == [slowly_scaled(counts_S) for counts_S in counts_CS]


def slow_cell_bits(counts_Q: NDArray[np.uint32]) -> int:
    """Bits that are left to the numbers of cells: 99.6 % of all are in the two cells next to the base's."""
    wanted = -(-int(counts_Q.sum()) * 996 // 1000)
    bucket = int((counts_Q.cumsum(dtype=np.int64) < wanted).sum())
    shift = max(bucket - 8, 0) // 8
    largest, low = (bucket - shift * 8) << shift, 0
    while largest >> low > NEAR_CELLS:
        low += 1
    return min(low, MAX_CELL_BITS)


@given(seed=seeds, n_contexts=st.integers(1, MAX_CONTEXTS), scale=st.floats(0.1, 60))
def test_choose_widths__chooses_the_cheapest_and_near_cells(seed: int, n_contexts: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    counts = np.zeros(N_SAMPLE_COUNTS, np.uint32)
    counts_SW = counts[:FIRST_STEP_COUNT].reshape(N_WIDTHS, WIDTH_COUNTS)
    counts_CQ = counts[FIRST_STEP_COUNT:].reshape(MAX_CONTEXTS, QUANTILE_BUCKETS)
    counts_SW += np.floor(rng.random(counts_SW.shape) ** 8 * 1000).astype(np.uint32)
    counts_SW[rng.random(N_WIDTHS) < rng.random()] = 0
    np.add.at(counts_CQ[0], np.minimum(rng.exponential(scale, 500), QUANTILE_BUCKETS - 1).astype(np.int64), 1)
    cell_bits, widths = np.full(256, 99, np.uint8), np.full(256, 99, np.uint8)
    choose_widths(counts, n_contexts, cell_bits, widths)
    beyond_SW = counts_SW.sum(axis=1, dtype=np.int64)[:, None] - counts_SW.cumsum(axis=1, dtype=np.int64)
    cost_SW = np.arange(WIDTH_COUNTS) * counts_SW.sum(axis=1, dtype=np.int64)[:, None] + EXCEPTION_BITS * beyond_SW
    wanted_EK = cost_SW[:, : WIDTH_COUNTS - 1].argmin(axis=1).reshape(EDGE_CLASSES, WIDTHS_PER_CLASS)
    is_seen_EK = counts_SW.any(axis=1).reshape(EDGE_CLASSES, WIDTHS_PER_CLASS)
    for column in range(WIDTHS_PER_CLASS):
        seen = np.flatnonzero(is_seen_EK[:, column])
        for edge in range(EDGE_CLASSES):
            finer = seen[seen >= edge]
            near = finer[0] if len(finer) else seen[-1] if len(seen) else None
            assert widths[edge * WIDTHS_PER_CLASS + column] == (0 if near is None else wanted_EK[near, column])
    assert not widths[N_WIDTHS:].any()
    assert cell_bits[0] == slow_cell_bits(counts_CQ[0])
    assert not cell_bits[1:].any()


@given(seed=seeds, n=st.integers(1, 1024))
def test_sum_tile__adds_one_after_another(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    deltas, estimates = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    contexts, codes = random_codes(seed, n, 3, 8)
    sums, errors = np.zeros(SUMS_SHAPE), np.zeros(ERROR_SUMS)
    keys, pairs = np.empty(n, np.uint16), np.empty(2 * n, np.float64)
    sum_tile(deltas, estimates, contexts[:n], codes[:n], keys, pairs, sums.reshape(-1), errors)
    wanted, wanted_errors = np.zeros(SUMS_SHAPE), np.zeros(ERROR_SUMS)
    for i in range(n):
        delta = float(deltas[i])
        wanted[i % 2, contexts[i], codes[i], :3] += delta, delta * delta, 1.0
        error = delta - float(estimates[i])
        wanted_errors[i % ERROR_SUMS] += error * error
    assert np.array_equal(sums, wanted)
    assert np.array_equal(errors, wanted_errors)


@given(seed=seeds, n=st.integers(1, 3000))
def test_contexts__are_ranges_of_exponents_with_enough_elements(seed: int, n: int) -> None:
    base: Bits16 = np.random.default_rng(seed).integers(0, 1 << 16, n).astype(np.uint16)
    contexts, rows = Contexts.of(base), np.empty(padded_length(n), np.uint8)
    contexts.fill_rows(base, rows)
    lows = contexts.lows.tolist()
    exponents = (base >> 7) & 0xFF
    assert lows == sorted(set(lows), reverse=True)
    assert lows[-1] == 0
    assert np.array_equal(rows[:n], [next(c for c, low in enumerate(lows) if low <= e) for e in exponents])
    assert (rows[n:] == SKIPPED).all()
    assert (np.bincount(rows[:n], minlength=len(lows))[:-1] >= 512).all()
