"""The one way in which this project compiles a loop, and the types that kernel signatures are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits32 = NDArray[np.uint32]
Bits64 = NDArray[np.uint64]
Counts = NDArray[np.int64]


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` on first use, without the interpreter lock, cached on disk for this machine.

    Floating point is strict (no reassociation, no contraction): results are the same on every machine.
    """
    compiled: Callable[P, R] = njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)
    return compiled
