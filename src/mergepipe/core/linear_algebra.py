"""numpy's linear algebra: keep it to one thread, so that its last bits are the same for any number; name its build."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

_SETTERS = (
    ("scipy_openblas_set_num_threads64_", "scipy_openblas_get_num_threads64_"),  # numpy's wheels
    ("scipy_openblas_set_num_threads", "scipy_openblas_get_num_threads"),
    ("openblas_set_num_threads64_", "openblas_get_num_threads64_"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),  # packages of distributions
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
    ("bli_thread_set_num_threads", "bli_thread_get_num_threads"),
)
_CORE_NAMES = (
    "scipy_openblas_get_corename64_",
    "scipy_openblas_get_corename",
    "openblas_get_corename64_",
    "openblas_get_corename",
)
_lock = threading.Lock()
_earlier_threads: list[int] = []
"""For each context that is open, how many threads there were before the first of them."""


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let numpy's BLAS and LAPACK use one thread, in this process, until the last such context is left.

    Sums are split among threads, so that their number decides the last bits. In a BLAS that keeps its number for each
    thread of the process (OpenBLAS with OpenMP) only the calling thread's changes. A BLAS whose threads cannot be set
    (Accelerate) stays as it is.
    """
    library = _library()
    names = _setting_of(library)
    if names is None:
        yield
        return
    set_threads = getattr(library, names[0])
    with _lock:
        before = _earlier_threads[0] if _earlier_threads else int(getattr(library, names[1])())
        _earlier_threads.append(before)
        set_threads(1)
    try:
        yield
    finally:
        with _lock:
            _earlier_threads.pop()
            if not _earlier_threads:
                set_threads(before)


def linear_algebra_build() -> str:
    """Name what decides the last bits of numpy's linear algebra: numpy's version, its BLAS, the processor's kernels."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    parts = [f"numpy {np.__version__}", " ".join(str(blas.get(key, "")) for key in ("name", "version"))]
    library = _library()
    for name in _CORE_NAMES:
        function = getattr(library, name, None)
        if function is not None:
            function.restype = ctypes.c_char_p
            parts.append(function().decode("ascii", "replace"))
            break
    return ", ".join(parts)


@cache
def _library() -> ctypes.CDLL:
    """Return numpy's own LAPACK module: a symbol that is looked up in it is found in the libraries that it loaded."""
    module = np.linalg._umath_linalg
    return ctypes.CDLL(module.__file__)


def _setting_of(library: ctypes.CDLL) -> tuple[str, str] | None:
    return next((names for names in _SETTERS if all(hasattr(library, name) for name in names)), None)
