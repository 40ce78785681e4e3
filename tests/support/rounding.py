"""Conversions between stored elements and numbers by numpy and ml_dtypes, independent of the kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
}
if importlib.util.find_spec("ml_dtypes"):  # absent where the wheel is tried alone
    import ml_dtypes

    NUMPY_DTYPES |= {
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    }

LARGEST_E4M3 = np.float32(448.0)


def decode(raw: bytes | NDArray[Any], dtype: DType) -> NDArray[np.float32]:
    """The stored elements as float32."""
    with np.errstate(all="ignore"):
        return np.frombuffer(raw, NUMPY_DTYPES[dtype.name]).astype(np.float32)


def encode(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Float32 numbers rounded to nearest even into `dtype`; what is too large for E4M3 becomes its largest number."""
    with np.errstate(all="ignore"):
        if dtype.name == "F8_E4M3":
            values = np.clip(values, -LARGEST_E4M3, LARGEST_E4M3)  # NaN stays NaN
        return values.astype(NUMPY_DTYPES[dtype.name])


def canonical_bits(stored: NDArray[Any]) -> NDArray[Any]:
    """The bit patterns of stored elements, with every NaN replaced by the quiet one with a clear sign."""
    with np.errstate(all="ignore"):
        bits = stored.view(f"u{stored.dtype.itemsize}").copy()
        quiet = np.array([np.nan]).astype(stored.dtype).view(bits.dtype)[0]
        sign = np.array(1, bits.dtype) << np.array(8 * stored.dtype.itemsize - 1, bits.dtype)
        bits[np.isnan(stored)] = quiet & ~sign
    return bits
