"""Compile every exported kernel for one level of the instruction set: `python -m tools.kernels.compiling LEVEL OBJECT`.

numba types and lowers the Python source, and LLVM optimises it as it does in a process that runs it. The code by which
the interpreter calls a kernel is left out: each has a function instead that takes the address of 8-byte words, as
`mergepipe.kernels.compiled` packs them, and one of its results.

It uses parts of numba that are not documented, so that the build requires the releases that it was tested with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[2] / "src"
OPTIMIZATION = 3
# The processor that code of a level is tuned for, and what it has beyond the level. LLVM tunes `x86-64-v4` for the
# first processors with AVX-512, which slowed down where its whole width was used: packing took a fifth longer.
_BEYOND_V4 = "avx512vbmi avx512vbmi2 avx512bitalg avx512ifma avx512vpopcntdq avx512vnni avx512bf16 gfni vaes sse4a"
_TUNED_FOR = {"x86-64-v4": ("znver4", ",".join(f"-{feature}" for feature in _BEYOND_V4.split()))}
_SETTINGS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def compile_level(level: str, target: Path) -> None:
    """Write an object file with all exported kernels for processors of a level."""
    processor, features = _TUNED_FOR.get(level, (level, ""))
    # numba reads these when it is imported.
    os.environ.update(NUMBA_CPU_NAME=processor, NUMBA_CPU_FEATURES=features, NUMBA_DISABLE_INTEL_SVML="1")
    from llvmlite import binding
    from numba.core.compiler_lock import global_compiler_lock

    from mergepipe.kernels.compiled import EXPORTED
    from mergepipe.kernels.library import MODULES, sources_digest

    for module in MODULES:
        import_module(f"mergepipe.{module}")
    prepare_numba()
    linked = binding.parse_assembly(_digest_module(sources_digest()))
    symbols = {"mergepipe_sources"}
    for kernel in EXPORTED:
        for specialization in kernel.specializations.values():
            with global_compiler_lock:
                _link_kernel(linked, kernel, specialization)
            symbols.add(specialization.symbol)
    _keep_only(linked, symbols)
    target.write_bytes(_machine(level).emit_object(linked))


def _digest_module(digest: str) -> str:
    """Return a module with the digest of the sources as a string."""
    size = len(digest) + 1
    return f'@mergepipe_sources = constant [{size} x i8] c"{digest}\\00"\n'


@cache
def prepare_numba() -> None:
    """Let compiled functions call kernels by their names, and have no code made for this process."""
    from numba.core.cpu import CPUContext
    from numba.extending import typeof_impl

    from mergepipe.kernels.compiled import Kernel

    # numba tells functions apart by their entry points, and wants functions of C.
    CPUContext.get_executable = lambda *_: [].append

    def dispatcher_type(kernel: Any, _context: Any) -> Any:
        return _numba_types().Dispatcher(dispatcher_of(kernel))

    typeof_impl.register(Kernel)(dispatcher_type)


@cache
def dispatcher_of(kernel: Any) -> Any:
    """Return numba's dispatcher of a kernel: always the same one."""
    import numba

    settings = {**_SETTINGS, "forceinline": True} if kernel.is_inlined else _SETTINGS
    return numba.njit(**settings)(kernel.function)


def _numba_types() -> Any:
    return import_module("numba.core.types")


def numba_type(parameter: Any) -> Any:
    """Return numba's type of a parameter."""
    import numba

    from mergepipe.kernels.compiled import Array, Record

    types = _numba_types()
    if isinstance(parameter, Record):
        return types.NamedTuple([numba_type(field) for field in parameter.fields], parameter.kind)
    if isinstance(parameter, Array):
        return types.Array(numba.from_dtype(parameter.dtype), parameter.n_dims, "C")
    return numba.from_dtype(parameter.dtype)


def _link_kernel(linked: Any, kernel: Any, specialization: Any) -> None:
    """Compile a kernel, and add its code and the function by which Python calls it to a module."""
    from llvmlite import binding
    from numba.core import cgutils

    types = tuple(numba_type(parameter) for parameter in specialization.parameters)
    dispatcher = dispatcher_of(kernel)
    dispatcher.compile(types)
    compiled = dispatcher.overloads[types]
    entry = _entry_module(compiled, specialization)
    linked.link_in(binding.parse_assembly(cgutils.normalize_ir_text(entry)))
    linked.link_in(compiled.library._get_module_for_linking(), preserve=True)


def _entry_module(compiled: Any, specialization: Any) -> str:
    """Write the function that reads the words of the arguments, calls the kernel, and writes those of its results.

    It returns 1 where the kernel has raised, which it does only if there is no memory for its arrays.
    """
    import numba
    from llvmlite import ir

    types = _numba_types()
    context, descriptor = compiled.target_context, compiled.fndesc
    module = context.create_module(specialization.symbol)
    word = ir.IntType(64)
    status_type = ir.IntType(32)
    entry_type = ir.FunctionType(status_type, [word.as_pointer(), word.as_pointer()])
    entry = ir.Function(module, entry_type, specialization.symbol)
    kernel_type = context.call_conv.get_function_type(descriptor.restype, descriptor.argtypes)
    callee = ir.Function(module, kernel_type, descriptor.llvm_func_name)
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    reader = _WordReader(context, builder, entry.args[0])
    arguments = [reader.read(argument) for argument in descriptor.argtypes]
    status, returned = context.call_conv.call_function(
        builder, callee, descriptor.restype, descriptor.argtypes, arguments
    )
    returned_types = (descriptor.restype,)
    values = [returned]
    if isinstance(descriptor.restype, types.BaseTuple):
        returned_types = tuple(descriptor.restype)
        values = [builder.extract_value(returned, place) for place in range(len(returned_types))]
    for place, dtype in enumerate(specialization.results):
        result_type = numba.from_dtype(dtype)
        result = context.cast(builder, values[place], returned_types[place], result_type)
        stored = context.data_model_manager[result_type].as_data(builder, result)
        address = builder.gep(entry.args[1], [ir.Constant(word, place)])
        builder.store(stored, builder.bitcast(address, stored.type.as_pointer()))
    builder.ret(builder.zext(status.is_error, status_type))
    return str(module)


class _WordReader:
    """Reads arguments from words, one after the other."""

    def __init__(self, context: Any, builder: Any, words: Any) -> None:
        self._context = context
        self._builder = builder
        self._words = words
        self._n_read = 0

    def read(self, numba_type: Any) -> Any:
        """Return the next argument, of a type."""
        types = _numba_types()
        if isinstance(numba_type, types.BaseTuple):
            return self._context.make_tuple(self._builder, numba_type, [self.read(field) for field in numba_type])
        if isinstance(numba_type, types.Array):
            return self._read_array(numba_type)
        model = self._context.data_model_manager[numba_type]
        return model.from_data(self._builder, self._load(self._context.get_data_type(numba_type)))

    def _read_array(self, array_type: Any) -> Any:
        from llvmlite import ir
        from numba.np import arrayobj

        element = self._context.get_data_type(array_type.dtype)
        data = self._load(element.as_pointer())
        shape = [self._load(ir.IntType(64)) for _ in range(array_type.ndim)]
        itemsize = ir.Constant(ir.IntType(64), self._context.get_abi_sizeof(element))
        strides = [itemsize]
        for length in reversed(shape[1:]):
            strides.insert(0, self._builder.mul(strides[0], length))
        array = arrayobj.make_array(array_type)(self._context, self._builder)
        arrayobj.populate_array(array, data, shape, strides, itemsize, meminfo=None)
        return array._getvalue()

    def _load(self, loaded_type: Any) -> Any:
        from llvmlite import ir

        address = self._builder.gep(self._words, [ir.Constant(ir.IntType(64), self._n_read)])
        self._n_read += 1
        return self._builder.load(self._builder.bitcast(address, loaded_type.as_pointer()))


def _keep_only(linked: Any, symbols: set[str]) -> None:
    """Remove from a module what the named functions do not need, and hide the rest."""
    from llvmlite import binding

    for value in (*linked.functions, *linked.global_variables):
        if not value.is_declaration:
            value.linkage = "external" if value.name in symbols else "internal"
    linked.verify()
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    machine = binding.Target.from_default_triple().create_target_machine()
    passes.run(linked, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))


def _machine(level: str) -> Any:
    from llvmlite import binding

    processor, features = _TUNED_FOR.get(level, (level, ""))
    target = binding.Target.from_default_triple()
    return target.create_target_machine(
        cpu=processor, features=features, opt=OPTIMIZATION, reloc="pic", codemodel="default"
    )


def main(arguments: Sequence[str]) -> None:
    """Compile one level into an object file."""
    level, target = arguments
    # pip's environment for builds takes the folder of an editable installation out of the search path.
    sys.path.insert(0, str(SOURCES))
    compile_level(level, Path(target))


if __name__ == "__main__":
    main(sys.argv[1:])
