"""Packed statistics: what goes in comes out, and nothing else passes for it."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from catalog_cases import make_statistics, same_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mergepipe.catalog.statistics_bytes import CHECKSUM_BYTES, HEADER_BYTES, pack, unpack
from mergepipe.core.blocks import BlockGrid
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.operators.statistics import BLOCK_RECORD, COMMON_DENSITIES, Cut, TensorStatistics


@st.composite
def any_statistics(draw: st.DrawFn) -> TensorStatistics:
    """Any bits a tensor's statistics can hold, NaN and infinity among them."""
    grid = BlockGrid(draw(st.integers(0, 300)), draw(st.sampled_from([1, 7, 64, 2**40])))
    nbytes = grid.n_blocks * BLOCK_RECORD.itemsize
    bits = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(nbytes)
    n_densities = draw(st.integers(0, 5))
    density = st.one_of(st.sampled_from(COMMON_DENSITIES), st.floats(0, 1), st.floats())
    return TensorStatistics(
        grid=grid,
        blocks_B=np.frombuffer(bits, BLOCK_RECORD, grid.n_blocks),
        densities_D=np.array(draw(st.lists(density, min_size=n_densities, max_size=n_densities)), np.float64),
        cuts_D3=np.where(
            draw(hnp.arrays(np.bool_, (n_densities, 1))),
            draw(hnp.arrays(np.uint32, (n_densities, 3))),
            np.array(Cut(7), np.uint32),
        ),
        products_3=draw(hnp.arrays(np.float64, 3)),
    )


@given(statistics=any_statistics(), subject=st.text())
def test_pack__unpack_gives_the_same_bits_back(statistics: TensorStatistics, subject: str) -> None:
    assert same_bits(unpack(pack(statistics, subject), subject), statistics)


@given(statistics=any_statistics())
def test_pack__the_same_statistics_are_the_same_bytes(statistics: TensorStatistics) -> None:
    assert pack(unpack(pack(statistics, "x"), "x"), "x") == pack(statistics, "x")


@given(statistics=any_statistics(), position=st.integers(0), bit=st.integers(0, 7))
def test_unpack__refuses_any_flipped_bit(statistics: TensorStatistics, position: int, bit: int) -> None:
    packed = bytearray(pack(statistics, "x"))
    packed[position % len(packed)] ^= 1 << bit
    with pytest.raises(CorruptError) as caught:
        unpack(bytes(packed), "x")
    assert caught.value.code == "catalog.corrupt-statistics"


@given(statistics=any_statistics(), length=st.integers(0), more=st.binary(min_size=1, max_size=100))
def test_unpack__refuses_any_other_length(statistics: TensorStatistics, length: int, more: bytes) -> None:
    packed = pack(statistics, "x")
    for wrong in (packed[: length % len(packed)], packed + more):
        with pytest.raises(CorruptError):
            unpack(wrong, "x")


@given(statistics=any_statistics(), subject=st.text())
def test_unpack__refuses_statistics_of_another_subject(statistics: TensorStatistics, subject: str) -> None:
    with pytest.raises(CorruptError):
        unpack(pack(statistics, subject), subject + "!")


def _with_head(position: int, value: bytes) -> bytes:
    """Packed statistics with a changed header and a checksum that fits: a lie that no checksum finds."""
    content = bytearray(pack(make_statistics(1), "x")[:-CHECKSUM_BYTES])
    assert position + len(value) <= HEADER_BYTES
    content[position : position + len(value)] = value
    return bytes(content) + blake3(bytes(content), key=blake3(b"x").digest()).digest(CHECKSUM_BYTES)


def test_unpack__accepts_what_the_lies_below_are_made_from() -> None:
    assert same_bits(unpack(_with_head(0, b""), "x"), make_statistics(1))


@pytest.mark.parametrize(
    ("position", "value"),
    [
        pytest.param(1, b"\x07", id="unknown density encoding"),
        pytest.param(2, b"\xff\xff", id="more densities than bytes"),
        pytest.param(4, b"\x4b", id="another record size"),
        pytest.param(8, bytes(8), id="blocks of no elements"),
        pytest.param(16, b"\xff" * 8, id="more blocks than bytes"),
    ],
)
def test_unpack__refuses_headers_that_lie_under_a_fitting_checksum(position: int, value: bytes) -> None:
    with pytest.raises(CorruptError):
        unpack(_with_head(position, value), "x")


def test_unpack__names_a_newer_format() -> None:
    with pytest.raises(UnsupportedError) as caught:
        unpack(_with_head(0, b"\x03"), "x")
    assert caught.value.code == "catalog.newer"


def test_pack__round_densities_take_two_bytes_each() -> None:
    few = len(pack(make_statistics(1, densities=()), "x"))
    assert len(pack(make_statistics(1, densities=(0.25, 0.1234)), "x")) == few + 2 * (4 + 2)
    assert len(pack(make_statistics(1, densities=(0.25, 1 / 3)), "x")) == few + 2 * (4 + 8)
    assert len(pack(make_statistics(1, densities=(0.25, 1 / 3), is_tied=True), "x")) == few + 2 * (4 + 8 + 8) + 1


def test_unpack__arrays_are_read_only() -> None:
    found = unpack(pack(make_statistics(1), "x"), "x")
    assert not found.blocks_B.flags.writeable
    assert not found.densities_D.flags.writeable
    assert found.blocks_B.ctypes.data % 4 == 0
