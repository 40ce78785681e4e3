"""Refuses a limit on address space in which the compiler cannot live, before it is loaded."""

from __future__ import annotations

import sys

from mergepipe.errors import LimitError

COMPILER_ADDRESS_BYTES = 1 << 30  # LLVM and numpy, mapped; most of it is never touched
THREAD_ADDRESS_BYTES = 64 << 20  # a stack, and an arena of the C library


def address_space_limit_bytes() -> int | None:
    """The most address space this process may have (`ulimit -v`); None where there is no limit."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_address_space(threads: int) -> None:
    """Refuse a limit on address space under which the compiler, once loaded, would end the process by force.

    Raises:
        LimitError: `memory.address-space`.
    """
    limit = address_space_limit_bytes()
    needed = COMPILER_ADDRESS_BYTES + threads * THREAD_ADDRESS_BYTES
    if limit is None or limit >= needed or "llvmlite" in sys.modules:
        return
    message = f"{limit >> 20} MiB of address space are allowed, {threads} threads need {needed >> 20} MiB"
    raise LimitError.of("memory.address-space", "ulimit -v", message, "raise `ulimit -v`, or lower --threads")
