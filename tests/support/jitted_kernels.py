"""Kernels as numba compiles them in the process that runs them: the reference of the libraries that are built ahead.

As a program, repeat the calls that `python -m support.jitted_kernels CALLS RESULTS` finds in a file, and write what
they gave.
"""

from __future__ import annotations

import pickle
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
from numba.core import types
from numba.extending import typeof_impl

from mergepipe.kernels.compiled import EXPORTED, Kernel
from mergepipe.kernels.library import MODULES
from support.kernel_calls import Call, outcome

_SETTINGS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


@cache
def jitted(kernel: Kernel) -> Any:
    """Return a kernel as numba compiles it for this process."""
    return numba.njit(**_SETTINGS, forceinline=kernel.is_inlined)(kernel.function)


def _type_of_kernel(kernel: Kernel, _context: Any) -> Any:
    """Let compiled functions call kernels."""
    return types.Dispatcher(jitted(kernel))


typeof_impl.register(Kernel)(_type_of_kernel)


def repeat(call: Call) -> list[bytes]:
    """Return what a call gives in this process."""
    kernel = next(kernel for kernel in EXPORTED if kernel.__name__ == call.kernel)
    return outcome(call, jitted(kernel))


def main(calls: str, results: str) -> None:
    """Repeat the calls in a file."""
    for module in MODULES:
        import_module(f"mergepipe.{module}")
    recorded: list[Call] = pickle.loads(Path(calls).read_bytes())
    Path(results).write_bytes(pickle.dumps([repeat(call) for call in recorded]))


if __name__ == "__main__":
    main(*sys.argv[1:])
