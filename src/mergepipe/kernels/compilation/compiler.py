"""Import numba and LLVM, after checking that they fit into the address space; no other module imports them."""

from __future__ import annotations

from mergepipe.kernels.compilation.address_space import check_address_space

check_address_space(threads=1)  # loading LLVM would abort the process

import numba  # noqa: E402
import numba.core  # noqa: E402
from llvmlite import binding, ir  # noqa: E402
from numba import njit  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

__all__ = ["binding", "intrinsic", "ir", "njit", "numba"]
