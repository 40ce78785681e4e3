"""Compile kernels, all with the same settings, and name the array types of their signatures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.kernels.compilation.compiler import njit
from mergepipe.kernels.compilation.listeners import mark_compilation

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
    _renew_with_any_kernel(compiled)
    _announce_compiling(compiled)
    return compiled


KERNELS = Path(__file__).parents[1]


@cache
def sources_digest(directory: Path = KERNELS) -> str:
    """A hash of all kernel sources in a directory and in those below it."""
    files = sorted(directory.rglob("*.py"))
    return blake3(b"".join(file.read_bytes() for file in files)).hexdigest()


def room_of(file: Path) -> Path:
    """The room of this package that a file belongs to: kernels inline those of their whole room."""
    package = KERNELS.parent
    return package / file.relative_to(package).parts[0] if file.is_relative_to(package) else file.parent


def _renew_with_any_kernel(compiled: Any) -> None:
    """Invalidate the cached code of a kernel when any kernel source changes."""
    # numba's cache checks only the file of the kernel itself, though kernels inline kernels from other files: the stamp
    # of this file is replaced by one of all files in its room and in this one.
    rooms = {KERNELS, room_of(Path(compiled.py_func.__code__.co_filename))}
    compiled._cache._cache_file._source_stamp = "".join(sources_digest(room) for room in sorted(rooms))


def _announce_compiling(compiled: Any) -> None:
    """Let listeners know while `compiled` is really compiled, which numba does where its cache on disk has no entry."""
    compiler = compiled._compiler
    compile_function = compiler.compile

    def announced(*arguments: Any) -> Any:
        with mark_compilation():
            return compile_function(*arguments)

    compiler.compile = announced
