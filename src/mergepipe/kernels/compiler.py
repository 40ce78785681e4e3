"""Import numba and LLVM, after checking that they fit into the address space; no other module imports numba."""

from __future__ import annotations

from functools import cache
from typing import Any

from mergepipe.kernels.compiled import check_address_space

check_address_space(threads=1)  # loading LLVM would abort the process

import llvmlite  # noqa: E402
import numba  # noqa: E402
import numba.core  # noqa: E402
import numpy as np  # noqa: E402
from numba.core import compiler, serialize, types  # noqa: E402
from numba.extending import typeof_impl  # noqa: E402

__all__ = ["VERSIONS", "CompileResult", "dumps", "numba", "register_kernels"]

CompileResult: Any = compiler.CompileResult  # untyped
dumps: Any = serialize.dumps
VERSIONS = (numba.__version__, llvmlite.__version__, np.__version__)
"""Versions of the packages that compile the code; those of Python and the processor are keys of their own."""


@cache
def register_kernels(kernel_class: type) -> None:
    """Let compiled functions call the kernels that are values of `kernel_class` by their dispatchers."""

    @typeof_impl.register(kernel_class)
    def _dispatcher_type(value: Any, _context: Any) -> Any:
        return types.Dispatcher(value.dispatcher)
