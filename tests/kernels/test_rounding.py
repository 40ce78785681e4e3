"""Laws of stochastic rounding, on the encoded values of every dtype that is rounded."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F8_E4M3, F8_E5M2, F16, F32, F64, DType
from mergepipe.kernels.codec import encode_all
from mergepipe.kernels.rounding import encode_all_by

NUMPY: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F32": np.float32, "F64": np.float64,
}  # fmt: skip
ROUNDED = (BF16, F16, F8_E4M3, F8_E5M2)
LARGEST = {"BF16": 3.3895313892515355e38, "F16": 65504.0, "F8_E4M3": 448.0, "F8_E5M2": 57344.0}


def keys(n: int, seed: int = 0) -> list[int]:
    """Keys as merges have them: odd, of 64 bits."""
    return [int(key) | 1 for key in np.random.default_rng(seed).integers(0, 2**63, n)]


def rounded(values: NDArray[np.float32], dtype: DType, key: int, first: int = 0) -> NDArray[Any]:
    raw = np.zeros(len(values) * dtype.itemsize, np.uint8)
    encode_all_by(values, first, np.uint64(key), raw, dtype.kernel_code)
    return raw.view(NUMPY[dtype.name])


def nearest(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    raw = np.zeros(len(values) * dtype.itemsize, np.uint8)
    encode_all(values, raw, dtype.kernel_code)
    return raw.view(NUMPY[dtype.name])


def every_value(dtype: DType) -> NDArray[np.float32]:
    """All values of a dtype of 8 or 16 bits, NaN and infinities too."""
    bits = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        values: NDArray[np.float32] = bits.view(NUMPY[dtype.name]).astype(np.float32)
        return values


def neighbours(dtype: DType) -> NDArray[np.float64]:
    """The finite values of a dtype, ascending."""
    values = every_value(dtype)
    return np.unique(values[np.isfinite(values)]).astype(np.float64)


@pytest.mark.parametrize("dtype", ROUNDED, ids=lambda dtype: dtype.name)
def test_encode_stochastic__leaves_what_the_dtype_holds(dtype: DType) -> None:
    values = every_value(dtype)
    for key in keys(3):
        assert rounded(values, dtype, key).tobytes() == nearest(values, dtype).tobytes()


@pytest.mark.parametrize("dtype", ROUNDED, ids=lambda dtype: dtype.name)
def test_encode_stochastic__rounds_to_nearest_beyond_the_largest_number(dtype: DType) -> None:
    largest = np.float32(LARGEST[dtype.name])
    with np.errstate(over="ignore"):
        beyond = largest * (1 + np.linspace(0, 1, 999, dtype=np.float32) / 16)
    values = np.concatenate((beyond, -beyond, [np.float32(np.inf), np.float32(-np.inf), np.float32(np.nan)]))
    values = values.astype(np.float32)
    assert rounded(values, dtype, keys(1)[0]).tobytes() == nearest(values, dtype).tobytes()


@pytest.mark.parametrize("dtype", ROUNDED, ids=lambda dtype: dtype.name)
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


@pytest.mark.parametrize("dtype", ROUNDED, ids=lambda dtype: dtype.name)
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


@pytest.mark.parametrize("dtype", ROUNDED, ids=lambda dtype: dtype.name)
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
