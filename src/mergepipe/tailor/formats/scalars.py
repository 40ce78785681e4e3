"""Small values read out of tensor files: step counters, which are one element each."""

from __future__ import annotations

import struct

from mergepipe.core.blocks import DType
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

_FORMS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


def read_scalar(store: Store, file: Location, offset: int, dtype: DType) -> float:
    """Read one element as a float.

    Raises:
        CorruptError: the file ends before it, or it is not a finite number.
        UnsupportedError: no number of this dtype is read.
    """
    if dtype.name not in _FORMS:
        raise UnsupportedError.of("tailor.scalar.dtype", file, f"a step counter of dtype {dtype.name}")
    raw = store.read_metadata(file, offset, dtype.itemsize)
    if len(raw) != dtype.itemsize:
        raise CorruptError.of("tailor.scalar.cut", file, f"the file ends before byte {offset + dtype.itemsize}")
    (value,) = struct.unpack(_FORMS[dtype.name], raw)
    if not abs(value) < 2.0**62:
        raise CorruptError.of("tailor.scalar.value", file, f"a step counter is {value}")
    return float(value)
