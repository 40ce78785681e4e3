"""Numbers too large for 8 bits: as torch stores them, and where ml_dtypes stores something else."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F8_E4M3, F8_E5M2, F16, DType
from mergepipe.kernels.codec import encode_all
from support.rounding import canonical_bits, decode

ML_DTYPES = {F8_E4M3: ml_dtypes.float8_e4m3fn, F8_E5M2: ml_dtypes.float8_e5m2}
TORCH_NAMES = {F8_E4M3: "float8_e4m3fn", F8_E5M2: "float8_e5m2"}
FIRST_BEYOND_E4M3 = 464.0  # in the middle of 448 and 480; the tie is even at 448, which is what ml_dtypes makes of it
BOUNDARIES = (240, 256, 432, 448, 456, 464, 465, 480, 1e9, 49152, 57344, 61440, 65504, 65536, 3.4e38, np.inf, np.nan)


def all_values() -> NDArray[np.float32]:
    """Every bfloat16 and float16 number, and float32 numbers at and beside the boundaries; both signs."""
    patterns = np.arange(1 << 16, dtype=np.uint16).tobytes()
    edges = np.array(BOUNDARIES, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        beside = [np.nextafter(edges, np.float32(to)) for to in (np.inf, -np.inf)]
        values = np.concatenate([decode(patterns, BF16), decode(patterns, F16), edges, *beside])
        return np.concatenate([values, -values])


def stored(values: NDArray[np.float32], dtype: DType) -> NDArray[np.uint8]:
    raw = np.zeros(len(values), np.uint8)
    encode_all(values, raw, dtype.kernel_code)
    return raw


def one_nan(raw: NDArray[np.uint8], dtype: DType) -> NDArray[Any]:
    return canonical_bits(raw.view(ML_DTYPES[dtype]))


@pytest.mark.parametrize("dtype", [F8_E4M3, F8_E5M2], ids=lambda dtype: dtype.name)
def test_encode_all__stores_8_bits_as_torch_does(dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    values = all_values()
    theirs = torch.from_numpy(values).to(getattr(torch, TORCH_NAMES[dtype])).view(torch.uint8).numpy()
    np.testing.assert_array_equal(one_nan(stored(values, dtype), dtype), one_nan(theirs, dtype))


@pytest.mark.parametrize("dtype", [F8_E4M3, F8_E5M2], ids=lambda dtype: dtype.name)
def test_encode_all__differs_from_ml_dtypes_beyond_the_largest_e4m3_alone(dtype: DType) -> None:
    values = all_values()
    ours = stored(values, dtype)
    with np.errstate(all="ignore"):
        theirs = values.astype(ML_DTYPES[dtype]).view(np.uint8)
    differs = one_nan(ours, dtype) != one_nan(theirs, dtype)
    expected = np.abs(values) > FIRST_BEYOND_E4M3 if dtype == F8_E4M3 else np.zeros(len(values), bool)
    np.testing.assert_array_equal(differs, expected)
    if dtype == F8_E4M3:
        assert np.isnan(theirs[differs].view(ML_DTYPES[dtype]).astype(np.float32)).all()
        largest = ours[differs].view(ML_DTYPES[dtype]).astype(np.float32)
        np.testing.assert_array_equal(largest, np.copysign(np.float32(448), values[differs]))
