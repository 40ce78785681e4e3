"""Import numba and LLVM, after checking that they fit into the address space; no other module imports numba."""

from __future__ import annotations

from functools import cache
from typing import Any

from mergepipe.kernels.compilation.address_space import check_address_space

check_address_space(threads=1)  # loading LLVM would abort the process

import numba  # noqa: E402
import numba.core  # noqa: E402
from llvmlite import binding  # noqa: E402
from numba import njit  # noqa: E402
from numba.core import types  # noqa: E402
from numba.core.typing import templates  # noqa: E402
from numba.extending import typeof_impl  # noqa: E402
from numba.np.numpy_support import as_dtype  # noqa: E402

__all__ = ["declare_intrinsic", "njit", "numba", "object_code", "register_kernels"]

ENTRY = "entry"
INLINING = ("add_always_inliner_pass", "add_ipsccp_pass", "add_simplify_cfg_pass")
"""Passes that inline the counting of references, where llvmlite has them; without them it is called."""
FOREIGN = {"malloc", "free", "memcpy", "memmove", "memset"}  # what the code may take from the process that loads it


@cache
def register_kernels(kernel_class: type) -> None:
    """Let compiled functions call the kernels that are values of `kernel_class` by their dispatchers."""

    @typeof_impl.register(kernel_class)
    def _dispatcher_type(value: Any, _context: Any) -> Any:
        return types.Dispatcher(value.dispatcher)


def declare_intrinsic(intrinsic: Any) -> None:
    """Let compiled functions call an intrinsic: an object with a `definition` and a name."""
    registry: Any = templates  # untyped
    definition, name = intrinsic.definition, intrinsic.__name__
    template = registry.make_intrinsic_template(intrinsic, definition, name, prefer_literal=False, kwargs={})
    registry.infer(template)
    registry.infer_global(intrinsic, types.Function(template))


def object_code(overload: Any, allocator: str) -> bytes:
    """Return the object code of a compiled kernel with the entry that `machine_code` calls.

    The functions are those that numba optimised, with the `allocator`'s counting of references instead of numba's;
    its wrappers for Python objects are left out.

    Raises:
        NotImplementedError: the code needs functions of numba's runtime that `allocator` does not define.
    """
    module = binding.parse_bitcode(overload.library._get_module_for_linking().as_bitcode())
    target_machine = overload.library._codegen._tm
    native = module.get_function(overload.fndesc.llvm_func_name)
    text = [f'target datalayout = "{module.data_layout}"', f'target triple = "{module.triple}"', allocator]
    text.append(entry_text(native, overload.signature.args))
    module.link_in(binding.parse_assembly("\n".join(text)))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:
            value.linkage = "external" if value.name == ENTRY else "internal"
    passes = binding.create_new_module_pass_manager()
    for name in INLINING:
        getattr(passes, name, lambda: None)()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, binding.create_pass_builder(target_machine, binding.create_pipeline_tuning_options()))
    foreign = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")} - FOREIGN
    if foreign:
        raise NotImplementedError(f"{overload.fndesc.llvm_func_name} needs {sorted(foreign)}")
    return bytes(target_machine.emit_object(module))


def entry_text(native: Any, argument_types: tuple[Any, ...]) -> str:
    """Write a function in LLVM's language that takes a result's address, arrays as objects of numpy, and numbers.

    The fields of an array follow the header of its object: data, number of dimensions, shape, strides.
    """
    native_types = iter([str(argument.type) for argument in native.arguments][2:])
    parameters, values = ["ptr %result"], []
    lines = ["  %error = alloca ptr", "  store ptr null, ptr %error", "  %nothing = alloca i64"]  # for results of None
    lines += ["  %has_none = icmp eq ptr %result, null", "  %to = select i1 %has_none, ptr %nothing, ptr %result"]
    for place, kind in enumerate(argument_types):
        if isinstance(kind, types.Array):
            parameters.append(f"ptr %a{place}")
            fields, loads = _array_fields(f"%a{place}", kind.ndim, as_dtype(kind.dtype).itemsize)
            lines += loads
            values += [f"{next(native_types)} {field}" for field in fields]
            continue
        native_type = next(native_types)
        wide_type = native_type if native_type in ("float", "double") else "i64"
        parameters.append(f"{wide_type} %a{place}")
        if native_type == wide_type:
            values.append(f"{native_type} %a{place}")
        else:
            lines.append(f"  %a{place}.narrow = trunc i64 %a{place} to {native_type}")
            values.append(f"{native_type} %a{place}.narrow")
    called = ", ".join(["ptr %to", "ptr %error", *values])
    lines += [f'  %status = call i32 @"{native.name}"({called})', "  ret i32 %status"]
    declared = ", ".join(str(argument.type) for argument in native.arguments)
    head = f'declare i32 @"{native.name}"({declared})\ndefine i32 @{ENTRY}({", ".join(parameters)}) {{'
    return "\n".join([head, *lines, "}"])


def _array_fields(array: str, n_dimensions: int, itemsize: int) -> tuple[list[str], list[str]]:
    """Return numba's fields of an array (owner, parent, elements, item size, data, shape, strides) and their loads."""
    lines = [
        f"  {array}.{name}.at = getelementptr i8, ptr {array}, i64 {offset}\n"
        f"  {array}.{name} = load ptr, ptr {array}.{name}.at"
        for name, offset in (("data", 16), ("shape", 32), ("strides", 40))
    ]
    sizes = []
    for name in ("shape", "strides"):
        for d in range(n_dimensions):
            sizes.append(f"{array}.{name}{d}")
            lines.append(f"  {sizes[-1]}.at = getelementptr i64, ptr {array}.{name}, i64 {d}")
            lines.append(f"  {sizes[-1]} = load i64, ptr {sizes[-1]}.at")
    product = "1"
    for d in range(n_dimensions):
        lines.append(f"  {array}.n{d} = mul i64 {product}, {sizes[d]}")
        product = f"{array}.n{d}"
    return ["null", "null", product, str(itemsize), f"{array}.data", *sizes], lines
