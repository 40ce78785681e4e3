"""Looks up bytes in a table of 256, 64 at a time where the machine has the instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mergepipe.deltastore.codec.vector_registers import I8, I64, call, has_features, load, pointers_of, splat, store
from mergepipe.kernels.compiled import Bytes, kernel
from mergepipe.kernels.compiler import intrinsic, ir, numba

_core: Any = numba.core  # untyped
_LANES = 64
_V8 = ir.VectorType(I8, _LANES)
_TWO_ROWS = "llvm.x86.avx512.vpermi2var.qi.512"  # takes the low seven bits of an index


def _lanes(_typing: Any, table: Any, indices: Any, n: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own_table, own_indices, own_n, own_out = pointers_of(context, builder, signature, arguments)
        rows = [load(builder, own_table, I64(row * _LANES), _V8) for row in range(4)]
        with _core.cgutils.for_range_slice(builder, I64(0), own_n, I64(_LANES), I64) as (i, _):
            own = load(builder, own_indices, i, _V8)
            low, high = (call(builder, _TWO_ROWS, _V8, rows[row], own, rows[row + 1]) for row in (0, 2))
            store(builder, builder.select(builder.icmp_unsigned("<", own, splat(128, _V8)), low, high), own_out, i)
        return context.get_dummy_value()

    return _core.types.void(table, indices, n, out), generate


_look_up_lanes: Any = intrinsic(_lanes)


@kernel
def look_up_one_by_one(table: Bytes, indices: Bytes, n: int, out: Bytes) -> None:
    """As `look_up`, on any machine."""
    for i in range(n):
        out[i] = table[indices[i]]


@kernel
def look_up_by_64(table: Bytes, indices: Bytes, n: int, out: Bytes) -> None:
    """As `look_up`, for machines with AVX-512 VBMI."""
    whole = n // _LANES * _LANES
    _look_up_lanes(table, indices, whole, out)
    for i in range(whole, n):
        out[i] = table[indices[i]]


HAS_WIDE_LOOKUPS = has_features("avx512bw", "avx512vbmi")
look_up = look_up_by_64 if HAS_WIDE_LOOKUPS else look_up_one_by_one
"""Write what a table of 256 bytes holds at the first `n` indices."""
