"""Copy, compare and look up bytes inside kernels, with vector instructions where the machine has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from mergepipe.deltastore.codec.llvm_vectors import (
    I8,
    I64,
    array_pointers,
    call_intrinsic,
    constant_vector,
    core,
    has_features,
    load_vector,
    store_vector,
)
from mergepipe.kernels.compiled import Bytes, intrinsic, kernel

# --- copy bytes inside kernels: assigning a slice takes a loop of single bytes ---


def _copy_bytes_intrinsic(_typing: Any, content: Any, n: Any, out: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: copy the first `n` bytes of `content` to `out`, from byte `at` on; the two do not overlap."""
    signature = core.types.void(content, n, out, at)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        content_pointer, count, out_pointer, start = array_pointers(context, builder, signature, arguments)
        core.cgutils.raw_memcpy(builder, builder.gep(out_pointer, [start]), content_pointer, count, 1)
        return context.get_dummy_value()

    return signature, generate


copy_bytes: Any = intrinsic(_copy_bytes_intrinsic)


# --- compare byte arrays without allocating, stopping at the first difference ---


_PART_BYTES = 4096


@kernel
def bytes_equal(first: Bytes, second: Bytes) -> bool:
    """Whether two arrays hold the same bytes; neither may be written to meanwhile."""
    n = len(first)
    if len(second) != n:
        return False
    for start in range(0, n, _PART_BYTES):
        stop = min(start + _PART_BYTES, n)
        first_part, second_part = first[start:stop], second[start:stop]
        difference = np.uint8(0)
        for i in range(stop - start):
            difference |= first_part[i] ^ second_part[i]
        if difference:
            return False
    return True


# --- look up bytes in a table of 256 entries, 64 at a time on machines with AVX-512 VBMI ---


_LANES = 64
_V8 = ir.VectorType(I8, _LANES)
_PERMUTE_TWO_REGISTERS = "llvm.x86.avx512.vpermi2var.qi.512"  # takes the low seven bits of an index


def _look_up_intrinsic(_typing: Any, table: Any, indices: Any, n: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table_pointer, indices_pointer, count, out_pointer = array_pointers(context, builder, signature, arguments)
        rows = [load_vector(builder, table_pointer, I64(row * _LANES), _V8) for row in range(4)]
        with core.cgutils.for_range_slice(builder, I64(0), count, I64(_LANES), I64) as (i, _):
            index_vector = load_vector(builder, indices_pointer, i, _V8)
            low, high = (
                call_intrinsic(builder, _PERMUTE_TWO_REGISTERS, _V8, rows[row], index_vector, rows[row + 1])
                for row in (0, 2)
            )
            store_vector(
                builder,
                builder.select(builder.icmp_unsigned("<", index_vector, constant_vector(128, _V8)), low, high),
                out_pointer,
                i,
            )
        return context.get_dummy_value()

    return core.types.void(table, indices, n, out), generate


_look_up_lanes: Any = intrinsic(_look_up_intrinsic)


@kernel
def look_up_scalar(table: Bytes, indices: Bytes, n: int, out: Bytes) -> None:
    """Look bytes up like `look_up`, on any machine."""
    for i in range(n):
        out[i] = table[indices[i]]


@kernel
def look_up_vector(table: Bytes, indices: Bytes, n: int, out: Bytes) -> None:
    """Look bytes up like `look_up`, on machines with AVX-512 VBMI."""
    whole = n // _LANES * _LANES
    _look_up_lanes(table, indices, whole, out)
    for i in range(whole, n):
        out[i] = table[indices[i]]


HAS_VECTOR_LOOKUP = has_features("avx512bw", "avx512vbmi")
look_up = look_up_vector if HAS_VECTOR_LOOKUP else look_up_scalar
"""Write the entries of a table of 256 bytes at the first `n` indices to `out`."""
