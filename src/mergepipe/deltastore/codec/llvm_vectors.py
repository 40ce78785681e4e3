"""LLVM builders for vector registers, for loops that numba cannot express."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from mergepipe.kernels.address_space import load_llvm
from mergepipe.kernels.compiled import intrinsic


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
