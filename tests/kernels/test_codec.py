"""Tiles decoded and encoded as numpy, ml_dtypes and torch do; exponentials and logarithms against the platform's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F8_E4M3, F8_E5M2, F16, F32, F64, DType
from mergepipe.kernels.codec import TILE_ELEMENTS, decode_all, decode_tile, encode_all, encode_tile
from mergepipe.kernels.numerics import exp_tile, log_tile
from support.late_modules import torch
from support.rounding import NUMPY_DTYPES, canonical_bits, decode, encode

SMALL_FLOATS = (F16, BF16, F8_E4M3, F8_E5M2)
FLOATS = (F64, F32, *SMALL_FLOATS)
TORCH_NAMES = {F8_E4M3: "float8_e4m3fn", F8_E5M2: "float8_e5m2"}
GUARD = 0xA5


def decoded_by_kernel(raw: bytes, dtype: DType, offset: int = 0) -> NDArray[np.float32]:
    """Decode tile by tile from a buffer in which the elements start at `offset`."""
    buffer = np.frombuffer(bytes(offset) + raw, np.uint8).copy()
    n = len(raw) // dtype.itemsize
    result = np.empty(n, np.float32)
    for start in range(0, n, TILE_ELEMENTS):
        m = min(TILE_ELEMENTS, n - start)
        tile = np.full(TILE_ELEMENTS, 7.0, np.float32)
        decode_tile(buffer, offset + start * dtype.itemsize, dtype.kernel_code, m, tile)
        assert np.all(tile[m:] == 7.0)
        result[start : start + m] = tile[:m]
    return result


def encoded_by_kernel(values: NDArray[np.float32], dtype: DType, offset: int = 0) -> NDArray[Any]:
    """Encode tile by tile at `offset` of a guarded buffer; the stored elements."""
    nbytes = len(values) * dtype.itemsize
    buffer = np.full(offset + nbytes + 8, GUARD, np.uint8)
    for start in range(0, len(values), TILE_ELEMENTS):
        tile = np.zeros(TILE_ELEMENTS, np.float32)
        m = min(TILE_ELEMENTS, len(values) - start)
        tile[:m] = values[start : start + m]
        encode_tile(tile, m, buffer, offset + start * dtype.itemsize, dtype.kernel_code)
    assert np.all(buffer[:offset] == GUARD)
    assert np.all(buffer[offset + nbytes :] == GUARD)
    return np.frombuffer(buffer[offset : offset + nbytes].tobytes(), encode(values[:0], dtype).dtype)


def assert_same(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    """Equal bit by bit, all NaN being one."""
    np.testing.assert_array_equal(canonical_bits(found), canonical_bits(wanted))


def hard_values() -> NDArray[np.float32]:
    """Every bfloat16 and float16 value, the middles between neighbours, and one float32 step to either side."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    exact = np.concatenate([decode(patterns.tobytes(), BF16), decode(patterns.tobytes(), F16)])
    with np.errstate(all="ignore"):
        middles_bf16 = (patterns.astype(np.uint32) << 16 | np.uint32(0x8000)).view(np.float32)
        halves = decode(patterns.tobytes(), F16).astype(np.float64)
        middles_f16 = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
        tiny = np.concatenate([_and_middles(F8_E4M3), _and_middles(F8_E5M2)])
        edges = np.array([65519.996, 65520.0, 448, 464, 480, 57344, 61440, 65536], np.float32)
        centers = np.concatenate([exact, middles_bf16, middles_f16, tiny, edges, -edges])
        up, down = np.nextafter(centers, np.float32(np.inf)), np.nextafter(centers, np.float32(-np.inf))
    return np.concatenate([centers, up, down])


def _and_middles(dtype: DType) -> NDArray[np.float32]:
    """Every value of an 8-bit format, and the middles between neighbours."""
    values = decode(np.arange(256, dtype=np.uint8).tobytes(), dtype).astype(np.float64)
    return np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32)


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda dtype: dtype.name)
def test_decode_tile__is_right_for_every_pattern_of_8_and_16_bits(dtype: DType) -> None:
    raw = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").tobytes()
    assert_same(decoded_by_kernel(raw, dtype), decode(raw, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_encode_tile__rounds_hard_values_as_the_libraries_do(dtype: DType) -> None:
    values = hard_values()
    assert_same(encoded_by_kernel(values, dtype), encode(values, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_encode_tile__writes_one_nan(dtype: DType) -> None:
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0x7FC01234], np.uint32).view(np.float32)
    stored = encoded_by_kernel(nans, dtype)
    assert np.array_equal(stored.view(f"u{dtype.itemsize}"), canonical_bits(stored))
    assert np.all(np.isnan(stored.astype(np.float64)))


@given(st.sampled_from(FLOATS), st.binary(min_size=8, max_size=4096), st.integers(0, 7))
def test_codec__decodes_and_encodes_any_bytes_as_the_libraries_do(dtype: DType, content: bytes, offset: int) -> None:
    raw = content[: len(content) // dtype.itemsize * dtype.itemsize]
    values = decode(raw, dtype)
    assert_same(decoded_by_kernel(raw, dtype, offset), values)
    assert_same(encoded_by_kernel(values, dtype, offset), encode(values, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("n", [0, 1, 2048, 2049, 70_001])
def test_encode_all__takes_more_than_a_tile(dtype: DType, n: int) -> None:
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    raw, again = np.zeros(n * dtype.itemsize, np.uint8), np.zeros(n, np.float32)
    encode_all(values, raw, dtype.kernel_code)
    assert raw.tobytes() == encode(values, dtype).tobytes()
    decode_all(raw, dtype.kernel_code, n, again)
    np.testing.assert_array_equal(again, decode(raw.tobytes(), dtype))


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", TORCH_NAMES, ids=lambda dtype: dtype.name)
def test_encode_tile__stores_8_bits_as_torch_does(dtype: DType) -> None:
    values = hard_values()
    theirs = torch.from_numpy(values).to(getattr(torch, TORCH_NAMES[dtype])).view(torch.uint8).numpy()
    assert_same(encoded_by_kernel(values, dtype), theirs.view(NUMPY_DTYPES[dtype.name]))


Numbers = NDArray[np.float64]


def of_all(tile_function: Callable[[Numbers, int, Numbers], None], values: Numbers) -> Numbers:
    out = np.empty_like(values)
    for start in range(0, len(out), TILE_ELEMENTS):
        tile = values[start : start + TILE_ELEMENTS]
        tile_function(tile, len(tile), out[start:])
    return out


def units_off(found: Numbers, wanted: Numbers) -> float:
    """The largest distance in units of the last place."""
    return float(np.max(np.abs(found - wanted) / np.spacing(np.abs(wanted))))


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-1e-6, 1e-6), (-700, 709), (-745, -700)])
def test_exp_and_log_tile__are_within_two_units_of_the_platform(low: float, high: float) -> None:
    values = np.random.default_rng(1).uniform(low, high, 50_000)
    assert units_off(of_all(exp_tile, values), np.exp(values)) <= 2
    powers = np.exp(np.maximum(values, -700.0))
    powers = powers[powers != 1.0]
    assert units_off(of_all(log_tile, powers), np.log(powers)) <= 2


def test_exp_and_log_tile__know_their_limits() -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 710.0, 1e300, -746.0, -1e300])
    np.testing.assert_array_equal(of_all(exp_tile, values), [1, 1, np.inf, 0, np.nan, np.inf, np.inf, 0, 0])
    np.testing.assert_array_equal(of_all(log_tile, np.array([1.0, np.inf, np.nan])), [0, np.inf, np.nan])


@pytest.mark.parametrize("length", [1, 3, 8, 100])
def test_tiles__do_not_depend_on_how_they_are_cut(length: int) -> None:
    values = np.random.default_rng(3).uniform(0.1, 3, 100)
    for function in (exp_tile, log_tile):
        cut = np.empty_like(values)
        for start in range(0, 100, length):
            function(values[start:], min(length, 100 - start), cut[start:])
        np.testing.assert_array_equal(cut, of_all(function, values))
