"""Elements of one floating dtype rounded to another, nearest even: what an optimizer makes of its master weights."""

from __future__ import annotations

from importlib import import_module

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mergepipe.blocks import BF16, F16, F32, F64, DType
from mergepipe.errors import UnsupportedError


def numpy_type(dtype: DType, where: object) -> DTypeLike:
    """The numpy dtype of a floating dtype.

    Raises:
        UnsupportedError: it is not one that training uses.
    """
    if dtype == BF16:
        kind: DTypeLike = import_module("ml_dtypes").bfloat16
        return kind
    known: dict[DType, DTypeLike] = {F64: np.float64, F32: np.float32, F16: np.float16}
    if dtype not in known:
        raise UnsupportedError.of("tailor.cast", where, f"values of dtype {dtype.name} are not converted")
    return known[dtype]


def cast_bytes(raw: NDArray[np.uint8], stored: DType, wanted: DType, where: object) -> NDArray[np.uint8]:
    """Return `raw` (elements of `stored`) as bytes of `wanted`; a new array unless the two are one."""
    if stored == wanted:
        return raw
    with np.errstate(over="ignore", invalid="ignore"):  # to infinity, and NaN to NaN, as in training
        return raw.view(numpy_type(stored, where)).astype(numpy_type(wanted, where)).view(np.uint8)
