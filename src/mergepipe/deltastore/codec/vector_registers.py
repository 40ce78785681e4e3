"""Words of LLVM for whole vector registers, for loops that numba has no word for."""

from __future__ import annotations

from typing import Any

from mergepipe.kernels.compiler import binding, ir, numba

_core: Any = numba.core  # untyped

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def has_features(*names: str) -> bool:
    """Whether this machine, and not another one that numba was told to compile for, has these instructions."""
    if _core.config.CPU_NAME is not None or _core.config.CPU_FEATURES is not None:
        return False
    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in names)


def pointers_of(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Arguments of an intrinsic: arrays as pointers to their first element, others as they are."""
    return [
        context.make_array(kind)(context, builder, argument).data if isinstance(kind, _core.types.Array) else argument
        for kind, argument in zip(signature.args, arguments, strict=True)
    ]


def splat(value: float, vector: Any) -> Any:
    """The same constant in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def spread(builder: Any, scalar: Any, vector: Any) -> Any:
    """A value that is not constant in every lane."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), splat(0, ir.VectorType(I32, vector.count)))


def place(builder: Any, array: Any, index: Any, vector: Any) -> Any:
    """Pointer to the lanes that begin at an element of an array."""
    return builder.bitcast(builder.gep(array, [index]), vector.as_pointer())


def load(builder: Any, array: Any, index: Any, vector: Any) -> Any:
    """Lanes from an array of the same elements, of any alignment that these have."""
    loaded = builder.load(place(builder, array, index, vector))
    loaded.align = _bytes_of(vector.element)
    return loaded


def store(builder: Any, value: Any, array: Any, index: Any) -> None:
    """Put lanes into an array of the same elements."""
    builder.store(value, place(builder, array, index, value.type)).align = _bytes_of(value.type.element)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call one of LLVM's own functions."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(_core.cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _bytes_of(scalar: Any) -> int:
    if isinstance(scalar, ir.IntType):
        return int(scalar.width) // 8
    return 8 if isinstance(scalar, ir.DoubleType) else 4
