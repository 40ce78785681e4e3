"""Cast elements between floating dtypes, rounding to nearest even, as optimizers cast master weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F16, F32, F64, DType
from mergepipe.errors import UnsupportedError

_NUMPY_TYPES: dict[DType, np.dtype[Any]] = {
    F64: np.dtype(np.float64), F32: np.dtype(np.float32), F16: np.dtype(np.float16),
}  # fmt: skip


def values_of(raw: NDArray[np.uint8], dtype: DType, where: object) -> NDArray[Any]:
    """Return the elements that `raw` holds, in a numpy dtype that holds them exactly; bfloat16 as float32.

    Raises:
        UnsupportedError: training uses no such dtype.
    """
    if dtype == BF16:
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(_numpy_type(dtype, where))


def cast_bytes(raw: NDArray[np.uint8], stored: DType, wanted: DType, where: object) -> NDArray[np.uint8]:
    """Return `raw` (elements of `stored`) as bytes of `wanted`; a new array unless the two are one.

    Raises:
        UnsupportedError: training uses no such dtype.
    """
    if stored == wanted:
        return raw
    values = values_of(raw, stored, where)
    with np.errstate(over="ignore", invalid="ignore"):  # to infinity, and NaN to NaN, as in training
        if wanted == BF16:
            return _as_bfloat16(values.astype(np.float32, copy=False)).view(np.uint8)
        return values.astype(_numpy_type(wanted, where)).view(np.uint8)


def _as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits  # wraps only for NaN
    rounded >>= np.uint32(16)
    halves = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    halves[is_nan] = (bits[is_nan] >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000) | np.uint16(0x7FC0)
    return halves


def _numpy_type(dtype: DType, where: object) -> np.dtype[Any]:
    if dtype not in _NUMPY_TYPES:
        raise UnsupportedError.of("tailor.cast", where, f"values of dtype {dtype.name} are not converted")
    return _NUMPY_TYPES[dtype]
