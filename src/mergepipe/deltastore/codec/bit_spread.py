"""Numbers of unequal widths from one stream, four at a time, by the instruction that spreads bits over a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mergepipe.deltastore.codec.rans import Halves
from mergepipe.deltastore.codec.vector_registers import I64, call, has_features, pointers_of
from mergepipe.kernels.compiled import Bytes, kernel
from mergepipe.kernels.compiler import intrinsic, numba

_core: Any = numba.core  # untyped
_SURE_BITS = 57
"""So many bits of a word are left wherever in a byte numbers begin."""


HAS_SPREADING = has_features("bmi2")


def _word(_typing: Any, stored: Any, _at: Any) -> tuple[Any, Callable[..., Any]]:
    """The 64 bits from a byte on."""
    signature = _core.types.uint64(stored, _core.types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at = pointers_of(context, builder, signature, arguments)
        loaded = builder.load(builder.bitcast(builder.gep(array, [at]), I64.as_pointer()))
        loaded.align = 1
        return loaded

    return signature, generate


def _spread(_typing: Any, bits: Any, mask: Any) -> tuple[Any, Callable[..., Any]]:
    """The lowest of `bits`, in order, put where `mask` has its ones; nothing where the machine cannot."""
    signature = _core.types.uint64(bits, mask)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if not HAS_SPREADING:
            return I64(0)
        return call(builder, "llvm.x86.bmi.pdep.64", I64, *arguments)

    return signature, generate


def _count(_typing: Any, mask: Any) -> tuple[Any, Callable[..., Any]]:
    """How many ones `mask` has."""
    return _core.types.uint64(mask), lambda _context, builder, _signature, arguments: builder.ctpop(arguments[0])


_word_at: Any = intrinsic(_word)
_spread_bits: Any = intrinsic(_spread)
count_ones: Any = intrinsic(_count)


@kernel
def add_numbers(stored: Bytes, position: np.uint64, ones: Halves, numbers: Halves) -> np.uint64:
    """Put in the numbers of one stream, from bit `position` of `stored` on, four at a time.

    `ones` are as many as a number has bits, 15 at most. Both arrays are a multiple of 4 long. Returns where the next
    number begins; `stored` has room for 16 bytes after the last.
    """
    ones64, numbers64 = ones.view(np.uint64), numbers.view(np.uint64)
    at, seven = np.uint64(position), np.uint64(7)
    for i in range(len(ones64)):
        place, passed, count = at >> np.uint64(3), at & seven, count_ones(ones64[i])
        bits = _word_at(stored, place) >> passed
        if count > np.uint64(_SURE_BITS):  # hardly ever
            bits |= (_word_at(stored, place + np.uint64(8)) << np.uint64(1)) << (np.uint64(63) - passed)
        numbers64[i] |= _spread_bits(bits, ones64[i])
        at += count
    return at
