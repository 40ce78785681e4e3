"""Compile kernels, all with the same settings, and name the array types of their signatures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.errors import UnsupportedError
from mergepipe.kernels.code_cache import CodeCache

P = ParamSpec("P")
R = TypeVar("R")

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits16 = NDArray[np.uint16]
Bits32 = NDArray[np.uint32]
Bits64 = NDArray[np.uint64]
Counts = NDArray[np.int64]

_SETTINGS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_making = threading.RLock()


class Kernel:
    """A compiled function: called from Python, or from other kernels.

    numba is imported for the first call of any kernel. It compiles what no earlier process has kept on disk.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._source = Path(function.__code__.co_filename)
        self.sources = sources_of(self._source)
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel."""
        return (self._dispatcher or self.dispatcher)(*arguments)

    @property
    def dispatcher(self) -> Any:
        """numba's dispatcher of the function: one, whichever threads ask for it."""
        with _making:
            if self._dispatcher is None:
                self._dispatcher = self._make_dispatcher()
            return self._dispatcher

    def _make_dispatcher(self) -> Any:
        from mergepipe.kernels.compiler import numba, register_kernels

        if getattr(numba.config, "DISABLE_JIT", 0):  # Python's integers do not wrap around: results would be others
            message = "it turns the compiler off, and kernels run only compiled"
            raise UnsupportedError.of("platform.unsupported", "NUMBA_DISABLE_JIT", message, "unset it")
        register_kernels(Kernel)
        dispatcher: Any = numba.njit(**_SETTINGS)(self.function)
        dispatcher._cache = CodeCache(f"{self._source.stem}.{self.__name__}", self.sources)
        _announce_compiling(dispatcher)
        return dispatcher


class Template(Kernel):
    """A function that is compiled into each kernel that calls it."""

    def _make_dispatcher(self) -> Any:
        """Make numba's dispatcher of the function, which is not cached itself: its callers are."""
        from mergepipe.kernels.compiler import numba

        return numba.njit(**_SETTINGS, forceinline=True)(self.function)


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


KERNELS = Path(__file__).parent
CORE = KERNELS.with_name("core")


@cache
def sources_digest(directory: Path = KERNELS) -> str:
    """A hash of all kernel sources in a directory and in those below it."""
    files = sorted(directory.rglob("*.py"))
    return blake3(b"".join(file.read_bytes() for file in files)).hexdigest()


def sources_of(file: Path) -> str:
    """A hash of all files that the code of kernels in `file` can depend on.

    Kernels inline others of their rooms, and constants of `core`. The hash is taken when a kernel is defined: code that
    is compiled later is of the files as they were imported.
    """
    return "".join(sources_digest(room) for room in sorted({CORE, KERNELS, room_of(file)}))


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


# --- tell listeners when kernels are being compiled: on the first use on a machine, later ones load them from disk ---


TYPICAL_SECONDS = 10.0
"""How long compiling what a merge needs takes, measured on two cores: 8 to 9 s."""

Listener = Callable[[bool], None]

_lock = threading.Lock()
_listeners: list[Listener] = []
_n_compilations = 0


@contextlib.contextmanager
def mark_compilation() -> Iterator[None]:
    """Mark that a kernel is being compiled; listeners are called when the first begins and when none is left."""
    _change(+1)
    try:
        yield
    finally:
        _change(-1)


@contextlib.contextmanager
def listen_to_compilation(listener: Listener) -> Iterator[None]:
    """Call `listener(True)` when compiling begins, `listener(False)` when it ends, from the thread that compiles."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def _change(step: int) -> None:
    global _n_compilations
    with _lock:
        before, _n_compilations = _n_compilations, _n_compilations + step
        listeners = tuple(_listeners) if bool(before) != bool(_n_compilations) else ()
    for listener in listeners:
        listener(step > 0)
