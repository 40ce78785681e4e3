"""Vector registers, copies and look-ups inside kernels; importing this loads LLVM."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from mergepipe.kernels.address_space import load_llvm
from mergepipe.kernels.compiled import Bytes, intrinsic, kernel

# --- lLVM builders for vector registers, for loops that numba cannot express ---


class _NumbaCore:
    """numba's own modules, imported when code is generated."""

    def __getattr__(self, name: str) -> Any:
        from mergepipe.kernels.compiler import numba

        return getattr(numba.core, name)


core: Any = _NumbaCore()

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def has_features(*names: str) -> bool:
    """Whether the processor has these features and numba compiles for this processor."""
    if "NUMBA_CPU_NAME" in os.environ or "NUMBA_CPU_FEATURES" in os.environ:
        return False
    features = load_llvm().get_host_cpu_features()
    return all(features.get(name, False) for name in names)


def array_pointers(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Arguments of an intrinsic: arrays as pointers to their first element, others unchanged."""
    return [
        context.make_array(kind)(context, builder, argument).data if isinstance(kind, core.types.Array) else argument
        for kind, argument in zip(signature.args, arguments, strict=True)
    ]


def constant_vector(value: float, vector: Any) -> Any:
    """A vector with the same constant in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector with the same scalar in every lane."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), constant_vector(0, ir.VectorType(I32, vector.count))
    )


def vector_pointer(builder: Any, array: Any, index: Any, vector: Any) -> Any:
    """A pointer to the lanes that begin at an element of an array."""
    return builder.bitcast(builder.gep(array, [index]), vector.as_pointer())


def load_vector(builder: Any, array: Any, index: Any, vector: Any) -> Any:
    """Load lanes from an array of the same element type, at its alignment."""
    loaded = builder.load(vector_pointer(builder, array, index, vector))
    loaded.align = _scalar_bytes(vector.element)
    return loaded


def store_vector(builder: Any, value: Any, array: Any, index: Any) -> None:
    """Store lanes to an array of the same element type."""
    builder.store(value, vector_pointer(builder, array, index, value.type)).align = _scalar_bytes(value.type.element)


def mask_of(builder: Any, bits: Any, vector: Any) -> Any:
    """The bits of an integer as a mask of the lanes of a vector."""
    return builder.bitcast(bits, ir.VectorType(I1, vector.count))


def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call one of LLVM's intrinsic functions."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(core.cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _shift_left_intrinsic(_typing: Any, value: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: `shift_left`."""
    return value(value, bits), lambda _context, builder, _signature, arguments: builder.shl(*arguments)


shift_left: Any = intrinsic(_shift_left_intrinsic)
"""Shift an integer left by fewer bits than it has, in its own type, where numba's operator widens it to 64 bits."""


def _scalar_bytes(scalar: Any) -> int:
    if isinstance(scalar, ir.IntType):
        return int(scalar.width) // 8
    return 8 if isinstance(scalar, ir.DoubleType) else 4


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
