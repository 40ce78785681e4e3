"""The only module that loads the compiler, after it has seen that the compiler fits into the address space."""

from __future__ import annotations

from mergepipe.kernels.address_space import check_address_space

check_address_space(threads=1)  # the compiler would end the process by force

import numba  # noqa: E402
import numba.core  # noqa: E402
from llvmlite import binding, ir  # noqa: E402
from numba import njit  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

__all__ = ["binding", "intrinsic", "ir", "njit", "numba"]
