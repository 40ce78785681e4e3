"""Compile kernels, all with the same settings, and name the array types of their signatures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.errors import UnsupportedError
from mergepipe.kernels.compilation.listeners import mark_compilation
from mergepipe.kernels.compilation.machine_code import (
    Entry,
    Signature,
    file_name,
    folders_for,
    load,
    signature_of,
    store,
)

P = ParamSpec("P")
R = TypeVar("R")

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits16 = NDArray[np.uint16]
Bits32 = NDArray[np.uint32]
Bits64 = NDArray[np.uint64]
Counts = NDArray[np.int64]


class Kernel:
    """A compiled function: called from Python, or from other kernels.

    Its machine code is loaded from disk where an earlier process has kept it. numba is imported only to compile what is
    not there, and for calls whose code cannot be kept.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._source = Path(function.__code__.co_filename)
        self.sources = sources_of(self._source)
        self._entries: dict[Signature, Entry] = {}
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel."""
        signature = signature_of(arguments)
        entry = self._entries.get(signature) or self._prepare(signature, arguments)
        return entry(*arguments)

    @cached_property
    def dispatcher(self) -> Any:
        """numba's dispatcher of the function.

        Raises:
            UnsupportedError: `kernel.interpreted`.
        """
        from mergepipe.kernels.compilation.compiler import declare_intrinsic, njit, numba, register_kernels

        if getattr(numba.config, "DISABLE_JIT", 0):  # Python's integers do not wrap around: results would be others
            message = "it turns the compiler off, and kernels run only compiled"
            raise UnsupportedError.of("kernel.interpreted", "NUMBA_DISABLE_JIT", message, "unset it")
        register_kernels(Kernel)
        with _declaring:
            while _undeclared:
                declare_intrinsic(_undeclared.pop())
        compile_function = partial(njit, nogil=True, error_model="numpy", boundscheck=False)
        try:
            compiled: Any = compile_function(cache=True)(self.function)
            compiled._cache._cache_file._source_stamp = self.sources
        except RuntimeError:  # numba found no folder for its cache that can be written
            compiled = compile_function()(self.function)
        _announce_compiling(compiled)
        return compiled

    def _prepare(self, signature: Signature, arguments: tuple[Any, ...]) -> Entry:
        """Load the code for such arguments from disk, or compile and keep it."""
        with self._lock:
            if signature not in self._entries:
                name = file_name(f"{self._source.stem}.{self.__name__}", self.sources, signature)
                folders = folders_for(self._source)
                entry = None if name is None else load(folders, name, signature)
                self._entries[signature] = entry or self._compile(signature, name, folders, arguments)
            return self._entries[signature]

    def _compile(
        self, signature: Signature, name: str | None, folders: list[Path], arguments: tuple[Any, ...]
    ) -> Entry:
        """Compile for such arguments, or load what numba has cached, and keep the machine code under `name`."""
        entry: Entry = self.dispatcher
        if name is not None:
            types = tuple(self.dispatcher.typeof_pyval(argument) for argument in arguments)
            self.dispatcher.compile(types)
            store(folders, name, self.dispatcher.overloads[types])
            entry = load(folders, name, signature) or entry
        return entry


class Template(Kernel):
    """A function that is compiled into each kernel that calls it."""

    @cached_property
    def dispatcher(self) -> Any:
        """numba's dispatcher of the function, which is not cached itself: its callers are."""
        from mergepipe.kernels.compilation.compiler import njit

        return njit(nogil=True, error_model="numpy", boundscheck=False, forceinline=True)(self.function)


class Intrinsic:
    """A function that kernels call, written in LLVM's language by `definition`, as numba's intrinsics are."""

    def __init__(self, definition: Callable[..., Any]) -> None:
        self.definition = definition
        self.__doc__, self.__name__ = definition.__doc__, definition.__name__


_undeclared: list[Intrinsic] = []
_declaring = threading.Lock()


def intrinsic(definition: Callable[..., Any]) -> Any:
    """Make an intrinsic; numba hears of it before it first compiles a kernel."""
    _undeclared.append(Intrinsic(definition))
    return _undeclared[-1]


def template(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` into each kernel that calls it, where its constant arguments are known.

    So loops are vectorized for one dtype.
    """
    compiled: Any = Template(function)
    template_function: Callable[P, R] = compiled
    return template_function


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` on first use, without the interpreter lock, cached on disk for this machine.

    Floating point is strict (no reassociation, no contraction): results are the same on every machine.
    """
    compiled: Any = Kernel(function)
    kernel_function: Callable[P, R] = compiled
    return kernel_function


KERNELS = Path(__file__).parents[1]


@cache
def sources_digest(directory: Path = KERNELS) -> str:
    """A hash of all kernel sources in a directory and in those below it."""
    files = sorted(directory.rglob("*.py"))
    return blake3(b"".join(file.read_bytes() for file in files)).hexdigest()


def sources_of(file: Path) -> str:
    """A hash of all files that the code of kernels in `file` can depend on: kernels inline those of their rooms.

    It is taken when a kernel is defined: code that is compiled later is of the files as they were imported.
    """
    return "".join(sources_digest(room) for room in sorted({KERNELS, room_of(file)}))


def room_of(file: Path) -> Path:
    """The room of this package that a file belongs to: kernels inline those of their whole room."""
    package = KERNELS.parent
    return package / file.relative_to(package).parts[0] if file.is_relative_to(package) else file.parent


def _announce_compiling(compiled: Any) -> None:
    """Let listeners know while `compiled` is really compiled, which numba does where its cache on disk has no entry."""
    compiler = compiled._compiler
    compile_function = compiler.compile

    def announced(*arguments: Any) -> Any:
        with mark_compilation():
            return compile_function(*arguments)

    compiler.compile = announced
