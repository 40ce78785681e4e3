"""The codec and its planes: every bit comes back, levels are what they say, damage is refused without harm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from packing_cases import as_bytes, decoded, deltas_at, deltas_of, weights

from mergepipe.checkpoints.contract import BaseBytes
from mergepipe.core.blocks import BF16, DTYPES, F16, F32, DType
from mergepipe.deltastore.codec import (
    FORM_COMPRESSED,
    FORM_PLAIN,
    FORM_QUARTERS,
    FORM_SPARSE,
    BlockContext,
    decode_block,
    decode_planes,
    encode_block,
    encode_planes,
)
from mergepipe.deltastore.encode_pass import choose_cut
from mergepipe.deltastore.pieces import HEAD_DENSITY, RECORDED_LEVELS, Codec, EncodedBlock, Level, Piece, RawBytes
from mergepipe.errors import CorruptError
from mergepipe.testing import SPECIAL
from support.public_names import BLOCK_ELEMENTS
from support.refusals import refuses
from support.rounding import decode, encode

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(DTYPES.values(), key=lambda dtype: dtype.name))


def pair(seed: int, n: int, step: float, changed: float = 1.0, dtype: DType = BF16) -> tuple[RawBytes, RawBytes]:
    """A base and an expert whose deltas have about the size `step`, as stored bytes."""
    rng = np.random.default_rng(seed)
    base_N = decode(encode((rng.standard_normal(n) * 0.02).astype(np.float32), dtype).tobytes(), dtype)
    moved_N = base_N + (rng.standard_normal(n) * step).astype(np.float32)
    expert_N = np.where(rng.random(n) < changed, moved_N, base_N).astype(np.float32)
    return as_bytes(encode(base_N, dtype)), as_bytes(encode(expert_N, dtype))


def cut_of(base: RawBytes, expert: RawBytes, dtype: DType = BF16) -> float:
    return choose_cut(deltas_of(base, expert, dtype), is_sample=False)


@given(seed=seeds, n=st.integers(1, 6000), dtype=dtypes)
def test_encode_block__any_bits_of_any_dtype_come_back(seed: int, n: int, dtype: DType) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, n * dtype.itemsize, np.uint8)
    expert = base.copy()
    touched = rng.random(len(base)) < rng.random()
    expert[touched] = rng.integers(0, 256, int(touched.sum()), np.uint8)
    block = encode_block(base, expert, dtype, 1e-3)
    assert np.array_equal(decoded(block, BlockContext(base, dtype, "test"), len(base)), expert)


@given(
    seed=seeds,
    n=st.integers(16_384, 30_000),
    step=st.floats(-7, 0),
    changed=st.floats(0, 1),
    odd=st.floats(0, 0.02),
    dtype=st.sampled_from([BF16, F16]),
)
def test_encode_block__experts_near_their_base_come_back(
    seed: int, n: int, step: float, changed: float, odd: float, dtype: DType
) -> None:
    """Zeros of both signs, subnormal and the largest numbers among the rest."""
    base, expert = (part.copy().view(np.uint16) for part in pair(seed, n, 10.0**step, changed, dtype))
    rng = np.random.default_rng(seed)
    values = encode(SPECIAL[np.isfinite(SPECIAL) & (abs(SPECIAL) < 60_000)], dtype).view(np.uint16)
    for stored in (base, expert):
        places = np.flatnonzero(rng.random(n) < odd)
        stored[places] = rng.choice(np.append(values, [0x0001, 0x8001, 0x8000]), len(places))
    whole, other = base.view(np.uint8), expert.view(np.uint8)
    block = encode_block(whole, other, dtype, cut_of(whole, other, dtype))
    assert np.array_equal(decoded(block, BlockContext(whole, dtype, "test"), len(whole)), other)
    if odd == 0 and changed > 0:
        assert block.codec in (Codec.BANDS, Codec.SAME, *([Codec.STANDALONE] if step > -2 else []))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("bits", [0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x7C00, 0xFE03])
def test_encode_block__nan_payloads_and_infinities_come_back(bits: int, dtype: DType) -> None:
    base, expert = pair(1, 8192, 1e-4, dtype=dtype)
    odd = expert.copy()
    odd.view(np.uint16)[17] = bits
    block = encode_block(base, odd, dtype, cut_of(base, expert, dtype))
    is_finite = np.isfinite(decode(odd.tobytes(), dtype)).all()
    assert block.codec is (Codec.BANDS if is_finite else Codec.BYTES)  # no level has a delta that is not finite
    assert np.array_equal(decoded(block, BlockContext(base, dtype, "test"), len(base)), odd)


def test_encode_block__the_plainest_codec_that_is_needed_is_taken() -> None:
    base, expert = pair(3, 8192, 1e-4)
    noise = np.random.default_rng(0).integers(0, 256, len(base), np.uint8)
    assert encode_block(base, base.copy(), BF16, cut_of(base, expert)).codec is Codec.SAME
    assert encode_block(base, expert, BF16, cut_of(base, expert)).codec is Codec.BANDS
    assert encode_block(base, expert, BF16, None).codec is Codec.BYTES
    assert encode_block(base, noise, BF16, None).codec is Codec.RAW
    assert encode_block(None, noise, BF16, None).codec is Codec.RAW


@given(seed=seeds, step=st.floats(-5, -2), changed=st.floats(0.3, 1), dtype=st.sampled_from([BF16, F16]))
def test_decode_deltas__the_head_is_exact_from_the_cut_on_and_zero_below(
    seed: int, step: float, changed: float, dtype: DType
) -> None:
    base, expert = pair(seed, 16_384, 10.0**step, changed, dtype)
    cut = cut_of(base, expert, dtype)
    block = encode_block(base, expert, dtype, cut)
    assume(block.codec is Codec.BANDS)
    context = BlockContext(base, dtype, "test")
    full_N = deltas_of(base, expert, dtype)
    head_N = np.where(np.abs(full_N) >= np.float32(cut), full_N, np.float32(0))
    assert np.array_equal(deltas_at(block, Level.HEAD, context, 16_384), head_N)
    assert np.array_equal(deltas_at(block, Level.LOSSLESS, context, 16_384), full_N)
    assert block.count == np.count_nonzero(head_N)
    assert block.count >= int(HEAD_DENSITY * 16_384) or changed < 1
    for level, recorded in zip(RECORDED_LEVELS, block.errors, strict=True):
        left = float(((deltas_at(block, level, context, 16_384) - full_N.astype(np.float64)) ** 2).sum())
        assert recorded == pytest.approx(left, rel=1e-6, abs=1e-30)


def test_encode_block__records_the_error_of_blocks_without_levels() -> None:
    base, expert = pair(6, 100, 1e-3)
    block = encode_block(base, expert, BF16, None)
    squares = float((deltas_of(base, expert).astype(np.float64) ** 2).sum())
    assert block.codec in (Codec.BYTES, Codec.RAW)
    assert block.errors[0] == pytest.approx(squares)
    assert block.errors[1:] == (0.0,)
    ones, twos = (np.full(64, value, np.uint8) for value in (1, 2))
    assert encode_block(ones, twos, DTYPES["I64"], None).errors == (0.0, 0.0)


@pytest.mark.parametrize(
    ("step", "whole", "head"),
    [(3e-5, 0.092, 0.073), (1e-4, 0.193, 0.118), (3e-4, 0.297, 0.126), (1e-3, 0.416, 0.131), (4e-3, 0.567, 0.168)],
)
def test_encode_block__is_as_small_as_documented(step: float, whole: float, head: float) -> None:
    base, expert = pair(5, 1 << 18, step)
    block = encode_block(base, expert, BF16, cut_of(base, expert))
    assert block.nbytes < whole * len(expert)
    assert len(block.pieces[Piece.HEAD]) < head * len(expert)


@given(seed=seeds)
def test_choose_cut__a_sample_holds_at_least_the_share(seed: int) -> None:
    whole_N = np.random.default_rng(seed).standard_normal(200_000).astype(np.float32)
    cut = choose_cut(whole_N[:50_000], is_sample=True)
    assert HEAD_DENSITY <= (np.abs(whole_N) >= np.float32(cut)).mean() <= HEAD_DENSITY * 1.1


def test_choose_cut__deltas_that_are_all_zero_or_not_finite_still_have_one() -> None:
    for deltas_N in (np.zeros(100, np.float32), np.full(3, np.nan, np.float32), np.empty(0, np.float32)):
        assert choose_cut(deltas_N, is_sample=False) > 0
    assert choose_cut(np.repeat(np.array([0, 1, -1, 3], np.float32), (40, 30, 20, 10)), is_sample=False) == 1


# --- blocks from others ---


@pytest.mark.parametrize("piece", [Piece.HEAD, Piece.REST])
def test_decode_block__pieces_that_end_early_or_late_are_refused(piece: Piece) -> None:
    base, expert = pair(4, 5000, 1e-3)
    block = encode_block(base, expert, BF16, cut_of(base, expert))
    own = block.pieces[piece]
    for content in (
        own[:-1],
        own[:-2],
        own[:3],
        own[:0],
        np.append(own, np.zeros(2, np.uint8)),
        np.zeros(40_000, np.uint8),
    ):
        with refuses(CorruptError, "store.damaged"):
            decode_block(block.codec, {**block.pieces, piece: content}, BlockContext(base, BF16, "test"), expert.copy())


def test_decode_block__bands_of_a_dtype_that_has_none_are_refused() -> None:
    base, expert = pair(4, 5000, 1e-3)
    block = encode_block(base, expert, BF16, cut_of(base, expert))
    for context in (
        BlockContext(base, F32, "test"),
        BlockContext(base, BF16, "test", F32),
        BlockContext(None, BF16, "test"),
    ):
        with pytest.raises(CorruptError):
            decode_block(block.codec, block.pieces, context, expert.copy())


# --- the same bytes everywhere ---


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
    hasher.update(np.array(block.errors, np.float32).tobytes() + np.array(block.count, np.uint32).tobytes())
    return hasher.hexdigest(8)


@pytest.mark.parametrize(
    ("n", "spread", "digest"),
    [
        (16_385, 3, "deb844bfffdf495c"),
        (20_001, 40, "625cd13ed1b4a40c"),
        (70_001, 9, "757b6ae0cf1d598b"),
        (262_144, 2, "580f29686ffff75d"),
    ],
)
def test_encode_block__writes_the_bytes_that_it_has_always_written(n: int, spread: int, digest: str) -> None:
    base, expert = lasting_pair(n, 11, spread)
    block = encode_block(base, expert, BF16, 2e-5)
    assert block.codec is Codec.BANDS
    assert block_digest(block) == digest
    assert np.array_equal(decoded(block, BlockContext(base, BF16, "test"), len(base)), expert)


def test_encode_block__takes_arrays_that_are_read_only_or_not_aligned() -> None:
    base, expert = lasting_pair(5001, 3, 4)
    wanted = block_digest(encode_block(base, expert, BF16, 2e-5))
    shifted = [np.concatenate([np.zeros(1, np.uint8), part])[1:] for part in (base, expert)]
    frozen = [np.frombuffer(part.tobytes(), np.uint8) for part in (base, expert)]
    for own, other in (shifted, frozen):
        block = encode_block(own, other, BF16, 2e-5)
        assert block_digest(block) == wanted
        out = np.zeros(len(other) + 1, np.uint8)[1:]
        decode_block(block.codec, block.pieces, BlockContext(own, BF16, "test"), out)
        assert np.array_equal(out, other)


def test_encode_block__threads_do_not_disturb_each_other() -> None:
    pairs = [lasting_pair(20_000 + 100 * i, i, 1 + i) for i in range(8)]
    wanted = [block_digest(encode_block(base, expert, BF16, 2e-5)) for base, expert in pairs]
    with ThreadPoolExecutor(4) as pool:
        blocks = list(pool.map(lambda pair: encode_block(pair[0], pair[1], BF16, 2e-5), pairs * 4))
    assert [block_digest(block) for block in blocks] == wanted * 4


def test_base_bytes__digests_are_those_of_the_bytes_and_taken_once() -> None:
    stored = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    base = BaseBytes(stored)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: base.digest(100, 4000), range(16)))
    assert found == {blake3(stored[100:4000].tobytes()).digest(16)}
    stored[200] ^= 1  # not looked at again
    assert base.digest(100, 4000) in found
    assert base.digest(0, 5000) == blake3(stored.tobytes()).digest(16)


U8 = DTYPES["U8"]


def decoded_planes(content: RawBytes, base: RawBytes | None, nbytes: int, dtype: DType) -> RawBytes:
    out = np.full(nbytes, 0xA5, np.uint8)
    decode_planes(content, base, dtype, "test", out)
    return out


@given(seed=seeds, n=st.integers(0, 3000), dtype=dtypes, spread=st.integers(0, 63), has_base=st.booleans())
def test_encode_planes__any_bits_of_any_dtype_come_back(
    seed: int, n: int, dtype: DType, spread: int, has_base: bool
) -> None:
    rng = np.random.default_rng(seed)
    words = (rng.integers(0, 2**64, n, np.uint64) >> np.uint64(63 - spread)) << np.uint64(rng.integers(0, 8))
    expert = as_bytes(words.astype(f"u{dtype.itemsize}"))
    base = np.roll(expert, int(rng.integers(0, 9))) if has_base else None
    assert np.array_equal(decoded_planes(encode_planes(base, expert, dtype), base, len(expert), dtype), expert)


PLANES: dict[int, Callable[[np.random.Generator, int], NDArray[Any]]] = {
    FORM_SPARSE: lambda rng, n: np.where(rng.random(n) < 0.002, rng.integers(0, 256, n), 0),
    FORM_QUARTERS: lambda rng, n: rng.choice([0, 1, 2, 9], n, p=[0.8, 0.1, 0.06, 0.04]),
    FORM_COMPRESSED: lambda rng, n: rng.normal(100, 9, n),
    FORM_PLAIN: lambda rng, n: rng.integers(0, 256, n),
}


@pytest.mark.parametrize("n", [5000, 70_001])
@pytest.mark.parametrize("form", PLANES)
def test_encode_planes__a_plane_takes_the_form_that_suits_it_and_comes_back(form: int, n: int) -> None:
    plane_N = PLANES[form](np.random.default_rng(n), n).astype(np.uint8)
    expert = np.where(plane_N & 1, 0 - (plane_N >> 1) - 1, plane_N >> 1).astype(np.uint8)  # unfolded
    content = encode_planes(None, expert, U8)
    shares = np.bincount(plane_N) / n
    entropy_bytes = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum() / 8 * n
    assert content[0] == form
    assert len(content) <= 1.1 * entropy_bytes + 200
    assert np.array_equal(decoded_planes(content, None, n, U8), expert)


@pytest.mark.parametrize(("dtype", "share"), [(BF16, 0.664), (F16, 0.8435), (F32, 0.8325), (DTYPES["F8_E5M2"], 0.69)])
def test_encode_planes__normal_weights_take_little_more_than_their_entropy(dtype: DType, share: float) -> None:
    expert = weights(BLOCK_ELEMENTS, dtype)
    assert len(encode_planes(None, expert, dtype)) <= share * len(expert)


def test_encode_planes__low_bits_that_are_zero_cost_nothing() -> None:
    widened = weights(BLOCK_ELEMENTS, BF16).view(np.uint16).astype(np.uint32) << 16
    assert len(encode_planes(None, as_bytes(widened), F32)) < 0.36 * widened.nbytes


def frame(content: bytes) -> list[int]:
    compressed = zstd.compress(content)
    return [FORM_COMPRESSED, *len(compressed).to_bytes(4, "little"), *compressed]


def test_decode_planes__frames_of_another_size_and_bytes_outside_a_plane_are_refused() -> None:
    unsized = zstd.compress(bytes(64), options={zstd.CompressionParameter.content_size_flag: 0})
    lies = {
        "a frame of 1073741824 bytes": frame(bytes(1 << 30)),
        "a frame of unknown size": [FORM_COMPRESSED, *len(unsized).to_bytes(4, "little"), *unsized],
        "cannot be decompressed": [FORM_COMPRESSED, 8, 0, 0, 0, *b"notzstd!"],
        "unknown form 9": [9],
        "a byte at 99 of a plane of 64": [FORM_SPARSE, 1, 0, 0, 0, FORM_PLAIN, 99, FORM_PLAIN, 1],
        "65 gaps in a plane of 64": [FORM_SPARSE, 65, 0, 0, 0],
        "are needed": [FORM_QUARTERS, FORM_PLAIN, *[0xFF] * 16, FORM_PLAIN, *[1] * 63],
        "left over": [FORM_PLAIN] + [0] * 65,
    }
    for message, content in lies.items():
        with pytest.raises(CorruptError, match=message):
            decoded_planes(np.array(content, np.uint8), None, 64, U8)
    doubled = frame(bytes(64))
    doubled[1] += len(doubled) - 5
    with pytest.raises(CorruptError, match="bytes after a frame"):
        decoded_planes(np.array(doubled + doubled[5:], np.uint8), None, 64, U8)


def test_decode_planes__a_frame_that_ends_early_or_holds_more_than_it_claims_is_refused() -> None:
    cut = frame(bytes(range(64)))
    cut[1] -= 1
    with pytest.raises(CorruptError, match="its end is missing"):
        decoded_planes(np.array(cut[:-1], np.uint8), None, 64, U8)
    zeros = frame(bytes(1 << 20))
    claims_less = bytes(zeros).replace((1 << 20).to_bytes(4, "little"), (1 << 19).to_bytes(4, "little"))
    with pytest.raises(CorruptError, match="cannot be decompressed"):
        decoded_planes(np.frombuffer(claims_less, np.uint8), None, 1 << 19, U8)


@pytest.mark.parametrize("n_bytes", [1, 64, 1 << 15, (1 << 15) + 1, 1 << 17, 3 << 17])
def test_decode_planes__frames_of_other_writers_are_read(n_bytes: int) -> None:
    """With a checksum, and, of a writer that streams, with a last block without content."""
    content = bytes(i * i % 251 for i in range(n_bytes))
    options: dict[int, int] = {
        zstd.CompressionParameter.checksum_flag: 1,
        zstd.CompressionParameter.content_size_flag: 1,
    }
    streamed = zstd.ZstdCompressor(options=options)
    streamed.set_pledged_input_size(n_bytes)
    written = streamed.compress(content, streamed.FLUSH_BLOCK) + streamed.flush()
    plane = [FORM_COMPRESSED, *len(written).to_bytes(4, "little"), *written]
    plain = np.array([FORM_PLAIN, *content], np.uint8)
    assert np.array_equal(
        decoded_planes(np.array(plane, np.uint8), None, n_bytes, U8), decoded_planes(plain, None, n_bytes, U8)
    )


@given(seed=seeds, data=st.data(), dtype=st.sampled_from([BF16, F32, U8]))
def test_decode_planes__lying_content_is_refused_or_gives_other_values_never_more(
    seed: int, data: st.DataObject, dtype: DType
) -> None:
    rng = np.random.default_rng(seed)
    forms = data.draw(st.permutations(list(PLANES)))
    words = np.stack([PLANES[form](rng, 3000).astype(np.uint8) for form in forms[: dtype.itemsize]], axis=-1)
    expert = np.ascontiguousarray(words).reshape(-1)
    content = encode_planes(None, expert, dtype)
    for _ in range(data.draw(st.integers(1, 8))):
        content = content.copy()
        content[rng.integers(0, min(len(content), data.draw(st.sampled_from([16, 10**9]))))] = rng.integers(0, 256)
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    room = np.full(len(expert) + 64, 7, np.uint8)
    try:
        decode_planes(content[:cut], None, dtype, "test", room[: len(expert)])
    except CorruptError as error:
        codes = {error.code}
    else:
        codes = set()
    assert codes <= {"store.damaged"}
    assert (room[len(expert) :] == 7).all()


def test_encode_planes__sizes_grow_with_the_distance_from_the_base() -> None:
    base = weights(BLOCK_ELEMENTS, F32)
    moved = [base.view(np.float32) + weights(BLOCK_ELEMENTS, F32, 1, step).view(np.float32) for step in (1e-5, 1e-3)]
    sizes = [len(encode_planes(base, as_bytes(expert), F32)) for expert in (base.view(np.float32), *moved)]
    assert sizes[0] < 100
    assert all(near < far for near, far in pairwise(sizes))
    assert sizes[1] < 0.52 * len(base)
