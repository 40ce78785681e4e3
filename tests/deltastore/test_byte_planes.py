"""Planes of bytes: short and contextual forms come back, stay small, and are refused where they are damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.core.blocks import DTYPES
from mergepipe.deltastore.codec.block import BlockContext, decode_block, encode_block
from mergepipe.deltastore.codec.byte_planes import (
    FORM_BESIDE,
    FORM_PLAIN,
    FORM_SHORT,
    FORM_ZERO,
    decode_plane,
    encode_plane,
    encode_plane_beside,
    plane_room,
)
from mergepipe.deltastore.codec.byte_reader import ByteReader
from mergepipe.deltastore.codec.levels import Codec, Piece
from mergepipe.errors import CorruptError

Octets = NDArray[np.uint8]


def encoded(plane_N: Octets, beside_N: Octets | None = None) -> Octets:
    room = plane_room(len(plane_N))
    room[: len(plane_N)] = plane_N
    if beside_N is None:
        return encode_plane(room, len(plane_N))
    return encode_plane_beside(room, len(plane_N), beside_N)


def decoded(content: Octets, n: int, beside_N: Octets | None = None) -> Octets:
    reader = ByteReader(content, "test")
    plane_N = decode_plane(reader, n, "test", beside_N)
    reader.end()
    return np.zeros(n, np.uint8) if plane_N is None else plane_N


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 3000), spread=st.floats(0, 100), zeros=st.floats(0, 1))
def test_encode_plane__short_planes_come_back_from_no_more_bytes(
    seed: int, n: int, spread: float, zeros: float
) -> None:
    rng = np.random.default_rng(seed)
    plane_N = np.abs(rng.standard_normal(n) * spread).astype(np.int64).astype(np.uint8)
    plane_N[rng.random(n) < zeros] = 0
    content = encoded(plane_N)
    assert content[0] in (FORM_ZERO, FORM_PLAIN, FORM_SHORT)
    assert len(content) <= n + 1
    assert np.array_equal(decoded(content, n), plane_N)


def test_encode_plane__tables_and_state_of_a_short_plane_take_few_bytes() -> None:
    plane_N = np.random.default_rng(0).binomial(1, 0.5, 4000).astype(np.uint8)
    assert len(encoded(plane_N)) <= 4000 / 8 + 50


def slightly_changed(n: int) -> tuple[Octets, Octets]:
    """Bytes, and folded differences that are other than 0 beside a few of them only."""
    rng = np.random.default_rng(n)
    beside_N = rng.integers(0, 256, n).astype(np.uint8)
    return beside_N, np.where(beside_N < 16, rng.integers(0, 3, n), 0).astype(np.uint8)


@pytest.mark.parametrize("n", [2000, 70_000])
def test_encode_plane_beside__bytes_beside_it_tell_where_a_plane_is_zero(n: int) -> None:
    beside_N, plane_N = slightly_changed(n)
    content = encoded(plane_N, beside_N)
    assert np.array_equal(decoded(content, n, beside_N), plane_N)
    if n == 70_000:
        assert content[0] == FORM_BESIDE
        assert len(content) < 0.6 * len(encoded(plane_N))


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 3000), spread=st.floats(0, 100))
def test_encode_block__single_bytes_beside_their_base_come_back(seed: int, n: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, n).astype(np.uint8)
    expert = (base + (rng.standard_normal(n) * spread).astype(np.int64)).astype(np.uint8)
    dtype, out = DTYPES["U8"], np.empty(n, np.uint8)
    block = encode_block(base, expert, dtype, None)
    decode_block(block.codec, block.pieces, BlockContext(base, dtype, None, "test"), out)
    assert np.array_equal(out, expert)


@pytest.mark.parametrize("n", [3000, 70_000])
@given(seed=st.integers(0, 2**32 - 1))
def test_decode_plane__damage_is_refused_or_gives_other_bytes_and_never_more(n: int, seed: int) -> None:
    beside_N, plane_N = slightly_changed(n)
    content = encoded(plane_N, beside_N if n == 70_000 else None).copy()
    assert content[0] == (FORM_BESIDE if n == 70_000 else FORM_SHORT)
    rng = np.random.default_rng(seed)
    damaged = content[: rng.integers(1, len(content))] if rng.random() < 0.3 else content
    damaged[rng.integers(0, len(damaged), 2)] ^= rng.integers(1, 256, 2).astype(np.uint8)
    try:
        assert len(decoded(damaged, n, beside_N)) == n
    except CorruptError as error:
        refused = error
    else:
        return
    assert refused.code == "store.damaged"


def test_decode_plane__refuses_contexts_without_frequencies_and_tables_that_do_not_add_up() -> None:
    beside_N, plane_N = slightly_changed(70_000)
    content = encoded(plane_N, beside_N)
    contexts = content.copy()
    contexts[1] = 0xFF  # the first two bytes in context 15
    short = encoded(plane_N[:3000])
    frequencies = short.copy()
    frequencies[33] ^= 1
    for damaged, n, message in ((contexts, 70_000, "in context 15"), (frequencies, 3000, "do not add up")):
        with pytest.raises(CorruptError, match=message):
            decoded(damaged, n, beside_N)
    with pytest.raises(CorruptError, match="unknown form 3"):
        decoded(content, 70_000)


def test_encode_block__a_single_byte_dtype_is_coded_beside_its_base() -> None:
    beside_N, plane_N = slightly_changed(100_000)
    block = encode_block(beside_N, beside_N + plane_N, DTYPES["U8"], None)
    assert block.codec is Codec.BYTES
    assert block.pieces[Piece.WHOLE][0] == FORM_BESIDE
