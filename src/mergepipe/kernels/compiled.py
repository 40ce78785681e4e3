"""Compile kernels, all with the same settings, and name the array types of their signatures."""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.errors import LimitError, UnsupportedError
from mergepipe.storage.owned import write_all
from mergepipe.storage.ranges import read_up_to

# --- refuse an address space limit that is too small for LLVM before it is loaded ---


COMPILER_ADDRESS_BYTES = 1 << 30  # LLVM and numpy, mapped; most of it is never touched
THREAD_ADDRESS_BYTES = 64 << 20  # a stack and a malloc arena


def address_space_limit_bytes() -> int | None:
    """Return the address space limit of this process (`ulimit -v`); None if there is none."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_address_space(threads: int) -> None:
    """Refuse an address space limit under which the loaded compiler would abort the process."""
    limit = address_space_limit_bytes()
    needed = COMPILER_ADDRESS_BYTES + threads * THREAD_ADDRESS_BYTES
    if limit is None or limit >= needed or "llvmlite" in sys.modules:
        return
    message = f"the address space is limited to {limit >> 20} MiB; {threads} threads need {needed >> 20} MiB"
    raise LimitError.of("memory.too-small", "ulimit -v", message, "raise `ulimit -v`, or lower --threads")


# --- compile kernels, and name the array types of their signatures ---


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
_LONGEST_SECONDS = 60  # that a second process is waited for


class Kernel:
    """A compiled function: called from Python, or from other kernels.

    numba is imported for the first call of any kernel. It compiles what no earlier process has kept on disk.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._source = Path(function.__code__.co_filename)
        self.sources = sources_of(self._source)
        self.before_compiling: Callable[[], object] = lambda: None
        self._elsewhere: subprocess.Popen[bytes] | None = None
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
        numba = _numba()
        if getattr(numba.config, "DISABLE_JIT", 0):  # Python's integers do not wrap around: results would be others
            message = "it turns the compiler off, and kernels run only compiled"
            raise UnsupportedError.of("platform.unsupported", "NUMBA_DISABLE_JIT", message, "unset it")
        dispatcher: Any = numba.njit(**_SETTINGS)(self.function)
        dispatcher._cache = CodeCache(f"{self._source.stem}.{self.__name__}", self.sources, self._wait)
        _announce_compiling(dispatcher, self.before_compiling)
        return dispatcher

    def compile_elsewhere(self, statement: str) -> None:
        """Run, once, a statement that calls this kernel in a process of its own, where a second core and a cache are.

        A call in this process waits for it.
        """
        is_python = sys.executable and not getattr(sys, "frozen", False)  # not a program that has Python in it
        if self._elsewhere is None and is_python and (os.cpu_count() or 1) > 1:
            command, null = [sys.executable, "-P", "-c", statement], subprocess.DEVNULL
            with suppress(OSError), _open_folder(make=True):
                self._elsewhere = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)

    def _wait(self) -> bool:
        """Wait until the kernel is compiled elsewhere; return whether it was asked to be."""
        if self._elsewhere is not None and self._elsewhere.poll() is None:
            with mark_compilation(), suppress(subprocess.TimeoutExpired):
                self._elsewhere.wait(_LONGEST_SECONDS)
        return self._elsewhere is not None


@cache
def _numba() -> Any:
    """Import numba, if LLVM fits into the address space; no other function imports it."""
    check_address_space(threads=1)  # loading LLVM would abort the process
    import numba
    from numba.core import types
    from numba.extending import typeof_impl

    @typeof_impl.register(Kernel)
    def _dispatcher_type(value: Any, _context: Any) -> Any:
        """Let compiled functions call kernels by their dispatchers."""
        return types.Dispatcher(value.dispatcher)

    return numba


class Template(Kernel):
    """A function that is compiled into each kernel that calls it."""

    def _make_dispatcher(self) -> Any:
        """Make numba's dispatcher of the function, which is not cached itself: its callers are."""
        return _numba().njit(**_SETTINGS, forceinline=True)(self.function)


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


def compile_in_parallel(first: Callable[..., Any], then: Callable[..., Any], call: Callable[[], None]) -> None:
    """Let a second process compile kernel `then` as soon as `first` is compiled because it is not kept.

    numba compiles one kernel at a time in a process. `call` calls `then` with arguments of the types that it will have.
    """
    statement = f"from {call.__module__} import {call.__name__} as call; call()"
    cast(Kernel, first).before_compiling = partial(cast(Kernel, then).compile_elsewhere, statement)


KERNELS = Path(__file__).parent
BLOCKS = KERNELS.with_name("core") / "blocks.py"


@cache
def sources_digest(place: Path = KERNELS) -> str:
    """Hash a source file, or all source files in a directory and in those below it."""
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return blake3(b"".join(file.read_bytes() for file in files)).hexdigest()


def sources_of(file: Path) -> str:
    """A hash of all files that the code of kernels in `file` can depend on.

    Kernels inline others of their rooms, and constants of `core.blocks`. The hash is taken when a kernel is defined:
    code that is compiled later is of the files as they were imported.
    """
    return "".join(sources_digest(room) for room in sorted({BLOCKS, KERNELS, room_of(file)}))


def room_of(file: Path) -> Path:
    """The room of this package that a file belongs to: kernels inline those of their whole room."""
    package = KERNELS.parent
    return package / file.relative_to(package).parts[0] if file.is_relative_to(package) else file.parent


def _announce_compiling(compiled: Any, before: Callable[[], object]) -> None:
    """Call `before` a kernel is really compiled, as its code is not on disk, and let listeners know while it is."""
    compiler = compiled._compiler
    compile_function = compiler.compile

    def announced(*arguments: Any) -> Any:
        before()
        with mark_compilation():
            return compile_function(*arguments)

    compiler.compile = announced


# --- tell listeners when kernels are being compiled: on the first use on a machine, later ones load them from disk ---


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


# --- keep the code of compiled kernels in a private folder of the user, and load it from there alone ---


CACHE_BYTES = 256 << 20
"""The most that is kept, some ten times the code of all kernels; what was not used for longest is removed first."""
_DIGEST_BYTES = 32
_OF_OTHERS = 0o077  # permissions
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WITHOUT_EFFECT = {"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS"}  # on the code that is made


class CodeCache:
    """The cache of one kernel, as numba's dispatchers call it."""

    def __init__(self, kernel: str, sources: str, wait: Callable[[], bool]) -> None:
        """`wait` returns when nobody else compiles the kernel: True where somebody may have."""
        self._kernel = kernel
        self._sources = sources
        self._wait = wait

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the kernel compiled for a signature; None if its code is not kept."""
        target.refresh()
        key = self._key(signature, target.codegen())
        content = _read(self._kernel, key)
        if content is None and self._wait():
            content = _read(self._kernel, key)
        try:
            result = _numba().core.compiler.CompileResult
            return None if content is None else result._rebuild(target, *pickle.loads(content))
        except ImportError:  # of a kernel whose module cannot be imported by its name
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a compiled kernel, where its code has no addresses of this process and a folder takes it."""
        if not compiled.library.has_dynamic_globals:
            _write(
                self._kernel, self._key(signature, compiled.codegen), _numba().core.serialize.dumps(compiled._reduce())
            )

    def _key(self, signature: Any, codegen: Any) -> bytes:
        """Return a digest of all that the code depends on; `codegen` knows the processor and its features."""
        import llvmlite

        versions = (_numba().__version__, llvmlite.__version__, np.__version__)
        names = sorted(name for name in os.environ if name.startswith("NUMBA_") and name not in _WITHOUT_EFFECT)
        settings = [(name, os.environ[name]) for name in names]
        parts = (self._kernel, self._sources, signature, codegen.magic_tuple(), versions, sys.version, settings)
        return blake3(repr(parts).encode()).digest()


def _read(kernel: str, key: bytes) -> bytes | None:
    """Return what is kept of a kernel under a key; None where there is nothing, or nothing that can be trusted."""
    try:
        with _open_folder() as folder, _open_file(_file_name(kernel, key), _READ, folder) as file:
            _check_private(file, stat.S_IFREG)
            stored = read_up_to(file, 0, os.fstat(file).st_size)
    except OSError:
        return None
    content = stored[_DIGEST_BYTES:]
    return content if stored[:_DIGEST_BYTES] == _digest(key, content) else None


def _write(kernel: str, key: bytes, content: bytes) -> None:
    """Keep what belongs to a kernel under a key, in one step; where no folder takes it, nothing is kept."""
    temporary = f"{kernel}-{uuid.uuid4().hex}"
    with suppress(OSError), _open_folder(make=True) as folder:
        try:
            with _open_file(temporary, _WRITE, folder) as file:
                write_all(file, _digest(key, content) + content)
            os.rename(temporary, _file_name(kernel, key), src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(temporary, dir_fd=folder)
        _remove_oldest(folder)


def _file_name(kernel: str, key: bytes) -> str:
    return f"{kernel}-{key[:16].hex()}"


def _digest(key: bytes, content: bytes) -> bytes:
    return blake3(key + content).digest(_DIGEST_BYTES)


@contextmanager
def _open_folder(*, make: bool = False) -> Iterator[int]:
    """Open the folder of this user's code: one of the user's own, below a place that users share too."""
    configured = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    base = Path(configured or os.path.expanduser("~/.cache"))  # noqa: PTH111 - without a home, `Path.home` raises
    if not base.is_absolute() or not (configured or base.parent.is_dir()):
        raise FileNotFoundError(base)
    path = base / f"mergepipe-kernels-{os.geteuid()}"
    if make:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    with _open_file(path, _FOLDER) as folder:
        _check_private(folder, stat.S_IFDIR)
        yield folder


@contextmanager
def _open_file(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_private(descriptor: int, kind: int) -> None:
    """Refuse what is of another kind or another user's, or what others may read or write."""
    status = os.fstat(descriptor)
    if stat.S_IFMT(status.st_mode) != kind or status.st_uid != os.geteuid() or status.st_mode & _OF_OTHERS:
        raise PermissionError("code is taken only from files and folders that are the user's alone")


def _remove_oldest(folder: int) -> None:
    """Remove what was not used for longest, what killed writers left too, until the rest is within `CACHE_BYTES`."""
    entries = [(name, os.lstat(name, dir_fd=folder)) for name in os.listdir(folder)]
    left_bytes = CACHE_BYTES
    for name, status in sorted(entries, key=lambda entry: -max(entry[1].st_atime, entry[1].st_mtime)):
        left_bytes -= status.st_size
        if left_bytes < 0:
            os.unlink(name, dir_fd=folder)
