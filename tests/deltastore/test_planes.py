"""Byte planes: every bit comes back in each form, sizes are near the entropy, and lies are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from packing_cases import as_bytes, weights

from mergepipe.core.blocks import BF16, DTYPES, F16, F32, DType
from mergepipe.deltastore.codec.block import RawBytes
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS
from mergepipe.deltastore.codec.planes import (
    FORM_COMPRESSED,
    FORM_PLAIN,
    FORM_QUARTERS,
    FORM_SPARSE,
    decode_planes,
    encode_planes,
)
from mergepipe.errors import CorruptError

U8 = DTYPES["U8"]
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(DTYPES.values(), key=lambda dtype: dtype.name))


def decoded(content: RawBytes, base: RawBytes | None, nbytes: int, dtype: DType) -> RawBytes:
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
    assert np.array_equal(decoded(encode_planes(base, expert, dtype), base, len(expert), dtype), expert)


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
    assert np.array_equal(decoded(content, None, n, U8), expert)


@pytest.mark.parametrize(("dtype", "share"), [(BF16, 0.664), (F16, 0.8435), (F32, 0.8325), (DTYPES["F8_E5M2"], 0.69)])
def test_encode_planes__normal_weights_take_little_more_than_their_entropy(dtype: DType, share: float) -> None:
    expert = weights(BLOCK_ELEMENTS, dtype)
    assert len(encode_planes(None, expert, dtype)) <= share * len(expert)


def test_encode_planes__low_bits_that_are_zero_cost_nothing() -> None:
    widened = weights(BLOCK_ELEMENTS, BF16).view(np.uint16).astype(np.uint32) << 16
    assert len(encode_planes(None, as_bytes(widened), F32)) < 0.36 * widened.nbytes


def frame(content: bytes) -> list[int]:
    compressed = zstandard.ZstdCompressor().compress(content)
    return [FORM_COMPRESSED, *len(compressed).to_bytes(4, "little"), *compressed]


def test_decode_planes__frames_of_another_size_and_bytes_outside_a_plane_are_refused() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
    lies = {
        "a frame of 1073741824 bytes": frame(bytes(1 << 30)),
        "a frame of -1 bytes": [FORM_COMPRESSED, *len(unsized).to_bytes(4, "little"), *unsized],
        "cannot be decompressed": [FORM_COMPRESSED, 8, 0, 0, 0, *b"notzstd!"],
        "unknown form 9": [9],
        "a byte at 99 of a plane of 64": [FORM_SPARSE, 1, 0, 0, 0, FORM_PLAIN, 99, FORM_PLAIN, 1],
        "65 gaps in a plane of 64": [FORM_SPARSE, 65, 0, 0, 0],
        "are needed": [FORM_QUARTERS, FORM_PLAIN, *[0xFF] * 16, FORM_PLAIN, *[1] * 63],
        "left over": [FORM_PLAIN] + [0] * 65,
    }
    for message, content in lies.items():
        with pytest.raises(CorruptError, match=message):
            decoded(np.array(content, np.uint8), None, 64, U8)
    doubled = frame(bytes(64))
    doubled[1] += len(doubled) - 5
    with pytest.raises(CorruptError, match="cannot be decompressed"):
        decoded(np.array(doubled + doubled[5:], np.uint8), None, 64, U8)


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
