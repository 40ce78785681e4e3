"""Tiles decoded and encoded as numpy, ml_dtypes and torch do; exponentials and logarithms against the platform's.

Stochastic rounding is held to its laws."""

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
from mergepipe.kernels.rounding import encode_all_by
from support.late_modules import torch
from support.rounding import NUMPY_DTYPES, canonical_bits, decode, encode

SMALL_FLOATS = (F16, BF16, F8_E4M3, F8_E5M2)
FLOATS = (F64, F32, *SMALL_FLOATS)
TORCH_NAMES = {F8_E4M3: "float8_e4m3fn", F8_E5M2: "float8_e5m2"}
GUARD = 0xA5
LARGEST = {"BF16": 3.3895313892515355e38, "F16": 65504.0, "F8_E4M3": 448.0, "F8_E5M2": 57344.0}


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


def keys(n: int, seed: int = 0) -> list[int]:
    """Keys as merges have them: odd, of 64 bits."""
    return [int(key) | 1 for key in np.random.default_rng(seed).integers(0, 2**63, n)]


def rounded(values: NDArray[np.float32], dtype: DType, key: int, first: int = 0) -> NDArray[Any]:
    raw = np.zeros(len(values) * dtype.itemsize, np.uint8)
    encode_all_by(values, first, np.uint64(key), raw, dtype.kernel_code)
    return raw.view(NUMPY_DTYPES[dtype.name])


def rounded_to_nearest(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    raw = np.zeros(len(values) * dtype.itemsize, np.uint8)
    encode_all(values, raw, dtype.kernel_code)
    return raw.view(NUMPY_DTYPES[dtype.name])


def every_value(dtype: DType) -> NDArray[np.float32]:
    """All values of a dtype of 8 or 16 bits, NaN and infinities too."""
    bits = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        values: NDArray[np.float32] = bits.view(NUMPY_DTYPES[dtype.name]).astype(np.float32)
        return values


def neighbours(dtype: DType) -> NDArray[np.float64]:
    """The finite values of a dtype, ascending."""
    values = every_value(dtype)
    return np.unique(values[np.isfinite(values)]).astype(np.float64)


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda dtype: dtype.name)
def test_encode_stochastic__leaves_what_the_dtype_holds(dtype: DType) -> None:
    values = every_value(dtype)
    for key in keys(3):
        assert rounded(values, dtype, key).tobytes() == rounded_to_nearest(values, dtype).tobytes()


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda dtype: dtype.name)
def test_encode_stochastic__rounds_to_nearest_beyond_the_largest_number(dtype: DType) -> None:
    largest = np.float32(LARGEST[dtype.name])
    with np.errstate(over="ignore"):
        beyond = largest * (1 + np.linspace(0, 1, 999, dtype=np.float32) / 16)
    values = np.concatenate((beyond, -beyond, [np.float32(np.inf), np.float32(-np.inf), np.float32(np.nan)]))
    values = values.astype(np.float32)
    assert rounded(values, dtype, keys(1)[0]).tobytes() == rounded_to_nearest(values, dtype).tobytes()


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda dtype: dtype.name)
def test_encode_stochastic__takes_a_neighbour_with_the_sign_of_the_value(dtype: DType) -> None:
    rng = np.random.default_rng(1)
    exponents = rng.uniform(-30, 4, 40_000) if dtype is not BF16 else rng.uniform(-145, 100, 40_000)
    values = (rng.choice([-1.0, 1.0], 40_000) * np.exp2(exponents)).astype(np.float32)
    values[:4] = [0.0, -0.0, 1e-45, -1e-45]
    known = neighbours(dtype)
    above = np.searchsorted(known, values.astype(np.float64))
    for key in keys(4):
        result = rounded(values, dtype, key).astype(np.float64)
        assert ((result == known[above]) | (result == known[above - 1])).all()
        assert (np.signbit(result) == np.signbit(values)).all()


@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda dtype: dtype.name)
def test_encode_stochastic__rounds_nothing_to_float32_and_float64(dtype: DType) -> None:
    values = np.random.default_rng(2).standard_normal(5000).astype(np.float32)
    assert (rounded(values, dtype, keys(1)[0]).astype(np.float32) == values).all()


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("scale", [1.0, 2.0**-12], ids=("normal", "small"))
def test_encode_stochastic__has_the_value_as_its_mean(dtype: DType, scale: float) -> None:
    """z-tests on 4 million roundings: of all elements, by sign, by magnitude, and by element over seeds."""
    n, n_seeds = 1 << 17, 32
    values = (np.random.default_rng(3).standard_normal(n) * scale).astype(np.float32)
    known, exact = neighbours(dtype), values.astype(np.float64)
    above = np.searchsorted(known, exact)
    low, high = known[above - 1], known[above]
    share = (exact - low) / (high - low)
    ups = np.zeros(n)
    for key in keys(n_seeds, seed=4):
        ups += rounded(values, dtype, key).astype(np.float64) == high
    excess, variance = ups - n_seeds * share, n_seeds * share * (1 - share)
    median = np.median(np.abs(values))
    groups = (np.ones(n, bool), values > 0, values < 0, np.abs(values) > median, np.abs(values) <= median)
    for group in groups:
        assert abs(excess[group].sum()) < 4.5 * np.sqrt(variance[group].sum())
    away = np.sign(values) * excess
    assert abs(away.sum()) < 4.5 * np.sqrt(variance.sum())
    inside = variance > 1.0
    squares = excess[inside] ** 2 / variance[inside]
    assert abs(squares.mean() - 1) < 4.5 * np.sqrt(2 / inside.sum()) + 0.01


def test_encode_stochastic__has_exact_probabilities_in_bf16() -> None:
    """A value a quarter above its lower neighbour goes up for a quarter of the 16-bit words, and so on."""
    for sixteenths in (1, 4, 8, 15):
        bits = np.full(1 << 21, 0x3F800000 + (sixteenths << 12), np.uint32)
        share = (rounded(bits.view(np.float32), BF16, keys(1)[0]).astype(np.float32) > 1.0).mean()
        deviation = np.sqrt(sixteenths / 16 * (1 - sixteenths / 16) / len(bits))
        assert abs(share - sixteenths / 16) < 4.5 * deviation


def test_encode_stochastic__is_independent_across_keys_and_neighbours() -> None:
    """Errors of two tensors, and of elements up to 64 apart, are uncorrelated, on a million elements each."""
    n = 1 << 20
    values = np.full(n, 1.0 + 2.0**-8, np.float32)  # halfway
    errors = [rounded(values, BF16, key).astype(np.float64) - values for key in keys(5)]
    errors = [error / np.abs(error).mean() for error in errors]
    for i, first in enumerate(errors):
        for second in errors[i + 1 :]:
            assert abs((first * second).mean()) < 5 / np.sqrt(n)
        for lag in (1, 2, 3, 16, 32, 64):
            assert abs((first[lag:] * first[:-lag]).mean()) < 5 / np.sqrt(n)


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("cut", [1, 7, 2047, 2048, 3000])
def test_encode_stochastic__depends_on_the_index_of_an_element_alone(dtype: DType, cut: int) -> None:
    values = np.random.default_rng(5).standard_normal(6001).astype(np.float32)
    first = 12345678901
    whole = rounded(values, dtype, 77, first)
    parts = [rounded(values[:cut], dtype, 77, first), rounded(values[cut:], dtype, 77, first + cut)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


KNOWN = {
    (1, 0): [1, 0, 0, 0, 1, 0, 0, 1],
    (0x0123456789ABCDEF, 0): [1, 1, 1, 0, 1, 1, 0, 1],
    (0x0123456789ABCDEF, 1): [1, 1, 0, 1, 1, 0, 1, 0],
    (2**63 + 5, 2**32 + 3): [1, 0, 1, 0, 0, 1, 1, 1],
}
"""By key and first element: which of eight values halfway between two numbers are rounded up."""


@pytest.mark.parametrize(("place", "ups"), KNOWN.items())
def test_encode_stochastic__has_the_same_bits_on_every_machine(place: tuple[int, int], ups: list[int]) -> None:
    values = np.full(8, 1.0 + 2.0**-8, np.float32)
    assert (rounded(values, BF16, *place).astype(np.float32) > 1).astype(int).tolist() == ups
