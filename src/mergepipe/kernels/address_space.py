"""Refuse an address space limit that is too small for LLVM before it is loaded."""

from __future__ import annotations

import sys

from mergepipe.errors import LimitError

COMPILER_ADDRESS_BYTES = 1 << 30  # LLVM and numpy, mapped; most of it is never touched
THREAD_ADDRESS_BYTES = 64 << 20  # a stack and a malloc arena


def address_space_limit_bytes() -> int | None:
    """Return the address space limit of this process (`ulimit -v`); None if there is none."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_address_space(threads: int) -> None:
    """Refuse an address space limit under which the loaded compiler would abort the process."""
    limit = address_space_limit_bytes()
    needed = COMPILER_ADDRESS_BYTES + threads * THREAD_ADDRESS_BYTES
    if limit is None or limit >= needed or "llvmlite" in sys.modules:
        return
    message = f"the address space is limited to {limit >> 20} MiB; {threads} threads need {needed >> 20} MiB"
    raise LimitError.of("memory.too-small", "ulimit -v", message, "raise `ulimit -v`, or lower --threads")
