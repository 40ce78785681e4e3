"""Keep the machine code of compiled kernels on disk, and run it without importing numba.

numba's own cache stores pickles that only numba can open, and importing numba takes longer than a small merge. The
object files kept here hold the same instructions: the optimised LLVM module that numba made, less what unpacks Python
objects, with an entry that takes numpy's array structures. A kernel whose code cannot be kept runs through numba.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from mergepipe.core.values import dataclass

Signature = tuple[Any, ...]
"""For each argument, (dtype, dimensions, flags) of an array, or the class of a scalar, or `LARGE`."""

LARGE = "an integer of more than 63 bits"

Entry = Callable[..., Any]

OBJECT_HEADER_BYTES = 16  # of a PyObject, before the fields of an array: data, dimensions, shape, strides
ARRAY_FLAGS = 0x1 | 0x2 | 0x100 | 0x400  # C order, Fortran order, aligned, writeable: what numba's types depend on
SUFFIX = ".machine-code"

_INT64 = range(-(1 << 63), 1 << 63)
_C_TYPES: dict[type, Any] = {
    int: ctypes.c_int64, bool: ctypes.c_int64, np.bool_: ctypes.c_int64,
    float: ctypes.c_double, np.float64: ctypes.c_double, np.float32: ctypes.c_float,
    np.int64: ctypes.c_int64, np.int32: ctypes.c_int64, np.int16: ctypes.c_int64, np.int8: ctypes.c_int64,
    np.uint64: ctypes.c_uint64, np.uint32: ctypes.c_int64, np.uint16: ctypes.c_int64, np.uint8: ctypes.c_int64,
}  # fmt: skip
_RESULTS: dict[str, Any] = {
    "none": None, "bool": ctypes.c_bool, "float32": ctypes.c_float, "float64": ctypes.c_double,
    "int8": ctypes.c_int8, "int16": ctypes.c_int16, "int32": ctypes.c_int32, "int64": ctypes.c_int64,
    "uint8": ctypes.c_uint8, "uint16": ctypes.c_uint16, "uint32": ctypes.c_uint32, "uint64": ctypes.c_uint64,
}  # fmt: skip

_ALLOCATOR = """
declare ptr @malloc(i64)
declare void @free(ptr)
define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %step = zext i32 %align to i64
  %padded = add i64 %size, %step
  %total = add i64 %padded, 48
  %info = call ptr @malloc(i64 %total)
  %failed = icmp eq ptr %info, null
  br i1 %failed, label %end, label %fill
fill:
  %start = ptrtoint ptr %info to i64
  %body = add i64 %start, 47
  %past = add i64 %body, %step
  %down = sub i64 0, %step
  %aligned = and i64 %past, %down
  %data = inttoptr i64 %aligned to ptr
  store i64 1, ptr %info
  %slot = getelementptr i8, ptr %info, i64 24
  store ptr %data, ptr %slot
  %length = getelementptr i8, ptr %info, i64 32
  store i64 %size, ptr %length
  br label %end
end:
  ret ptr %info
}
define ptr @NRT_MemInfo_alloc(i64 %size) {
  %info = call ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 16)
  ret ptr %info
}
define void @NRT_MemInfo_call_dtor(ptr %info) {
  call void @free(ptr %info)
  ret void
}
define void @NRT_incref(ptr %info) alwaysinline {
  %none = icmp eq ptr %info, null
  br i1 %none, label %end, label %count
count:
  %before = load i64, ptr %info
  %after = add i64 %before, 1
  store i64 %after, ptr %info
  br label %end
end:
  ret void
}
define void @NRT_decref(ptr %info) alwaysinline {
  %none = icmp eq ptr %info, null
  br i1 %none, label %end, label %count
count:
  %before = load i64, ptr %info
  %after = sub i64 %before, 1
  store i64 %after, ptr %info
  %is_unused = icmp eq i64 %after, 0
  br i1 %is_unused, label %drop, label %end
drop:
  call void @free(ptr %info)
  br label %end
end:
  ret void
}
define ptr @NRT_Allocate(i64 %size) {
  %memory = call ptr @malloc(i64 %size)
  ret ptr %memory
}
define void @NRT_Free(ptr %memory) {
  call void @free(ptr %memory)
  ret void
}
"""
"""What numba's runtime does for temporary arrays: `{references, -, -, data, size, -}` before the data.

References are counted without atomic instructions: the thread that runs a kernel is the only one with its arrays.
"""


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The object code of one kernel for one signature, and the numba type of its result."""

    result: str
    code: bytes

    def to_bytes(self) -> bytes:
        """Return what `from_bytes` reads: a digest of the rest, the type of the result, the code."""
        body = self.result.encode() + b"\n" + self.code
        return blake3(body).digest() + body

    @classmethod
    def from_bytes(cls, stored: bytes) -> MachineCode | None:
        """Return the value that `to_bytes` stored; None if the bytes are damaged."""
        digest, body = stored[:32], stored[32:]
        if blake3(body).digest() != digest:
            return None
        result, _, code = body.partition(b"\n")
        return cls(result.decode(), code)


def signature_of(arguments: tuple[Any, ...]) -> Signature:
    """Return what the compiled code depends on of the arguments of a call."""
    return tuple(
        [
            (a.dtype.str, a.ndim, a.flags.num & ARRAY_FLAGS)
            if a.__class__ is np.ndarray
            else a.__class__
            if a.__class__ is not int or a in _INT64
            else LARGE
            for a in arguments
        ]
    )


def can_keep(signature: Signature) -> bool:
    """Whether every argument is an array of plain numbers or a scalar that an entry takes.

    Other dtypes are not told apart by what a signature keeps of them: two structures of one size are the same there.
    """
    return all(kind[0][1] in "biuf" if isinstance(kind, tuple) else kind in _C_TYPES for kind in signature)


@cache
def _platform_key() -> str:
    """What machine code depends on besides its sources; empty where none can be kept."""
    settings = {name for name in os.environ if name.startswith("NUMBA_")} - {"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS"}
    if settings or object.__basicsize__ != OBJECT_HEADER_BYTES or sys.implementation.name != "cpython":
        return ""
    numba = find_spec("numba")
    if numba is None or numba.origin is None:
        return ""
    binding = load_llvm()  # before llvmlite is imported: it checks that LLVM fits into the address space
    import llvmlite

    try:
        version = Path(numba.origin).with_name("_version.py").read_text(encoding="utf-8")
    except OSError:  # of a numba in an archive
        return ""
    cpu = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    versions = [version, llvmlite.__version__, sys.version, np.__version__]
    return "\n".join([*versions, cpu, platform.machine(), sys.platform])


@cache
def load_llvm() -> Any:
    """Import LLVM, ready for this machine's code."""
    from mergepipe.kernels.compilation.address_space import check_address_space

    check_address_space(threads=1)
    from llvmlite import binding

    with suppress(RuntimeError):  # needed no more from llvmlite 0.45 on
        binding.initialize()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


def file_name(kernel: str, sources: str, signature: Signature) -> str | None:
    """Return the name of the file for a kernel's code for a signature; None where none can be kept.

    Names of one folder agree in the part for the sources: files with another one are of other versions.
    """
    platform_key = _platform_key() if can_keep(signature) else ""
    if not platform_key:
        return None
    digest = blake3("\n".join([sources, platform_key, repr(signature)]).encode()).hexdigest()
    return f"{kernel}-{blake3(sources.encode()).hexdigest(8)}-{digest[:32]}{SUFFIX}"


def folders_for(source: Path) -> list[Path]:
    """Return the folders in which the code of kernels of a source file may be kept, the first choice first."""
    place = f"{source.parent.name}-{blake3(str(source.parent).encode()).hexdigest(8)}"
    configured = os.environ.get("NUMBA_CACHE_DIR")
    if configured:
        return [Path(configured) / "mergepipe" / place]
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - it never raises
    return [source.parent / "__pycache__", *([users / "mergepipe" / "kernels" / place] if users.is_absolute() else [])]


def load(folders: list[Path], name: str, signature: Signature) -> Entry | None:
    """Load the code kept under a name for calls with a signature; None if there is none that can be loaded."""
    for folder in folders:
        try:
            kept = MachineCode.from_bytes((folder / name).read_bytes())
            if kept is not None and kept.result in _RESULTS:
                return _entry_at(_link(kept.code), _RESULTS[kept.result], signature)
        except (OSError, RuntimeError):  # it is not there; it needs what this process lacks
            continue
    return None


_linked: list[Any] = []
_link_lock = threading.Lock()


@cache
def _linker() -> Any:
    return load_llvm().create_lljit_compiler()


def _link(code: bytes) -> int:
    """Link object code into this process, for as long as it lives; return the address of its entry.

    One thread at a time: a second linker, made meanwhile and forgotten, would take the code away that it has linked.
    """
    with _link_lock:
        builder = load_llvm().JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol("entry")
        tracker = builder.link(_linker(), f"kernel-{len(_linked)}")
        _linked.append(tracker)
        return int(tracker["entry"])


def _entry_at(address: int, result_type: Any, signature: Signature) -> Entry:
    """Return a function that calls the entry at an address, without the interpreter lock."""
    boxed = [i for i, kind in enumerate(signature) if isinstance(kind, type) and issubclass(kind, np.generic)]
    types = [ctypes.py_object if isinstance(kind, tuple) else _C_TYPES[kind] for kind in signature]
    entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *types)(address)

    def call(*arguments: Any) -> Any:
        if boxed:
            plain = list(arguments)
            for place in boxed:
                plain[place] = plain[place].item()
            arguments = tuple(plain)
        result = None if result_type is None else result_type()
        if entry(None if result is None else ctypes.addressof(result), *arguments):
            raise MemoryError("a compiled kernel could not allocate its temporary arrays")
        return None if result is None else result.value

    return call


def store(folders: list[Path], name: str, overload: Any) -> None:
    """Keep the code that numba compiled in the first folder that takes it; where none does, nothing is kept."""
    result = str(overload.signature.return_type)
    if result not in _RESULTS:
        return
    from mergepipe.kernels.compilation.compiler import object_code

    try:
        kept = MachineCode(result, object_code(overload, _ALLOCATOR)).to_bytes()
    except (RuntimeError, AttributeError, NotImplementedError):  # of a numba or an LLVM that works otherwise
        return
    for folder in folders:
        temporary = folder / f"{name}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(kept)
            temporary.replace(folder / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            continue
        remove_outdated(folder, name)
        return


def remove_outdated(folder: Path, name: str) -> None:
    """Remove the code of other versions of a folder's sources than that of `name`, and what killed writers left."""
    sources = name.split("-")[1]
    for path in folder.glob(f"*{SUFFIX}*"):
        writer = path.name.rpartition(f"{SUFFIX}.")[2]
        if path.name.split("-")[1] != sources or (writer.isdigit() and not _is_running(int(writer))):
            with suppress(OSError):
                path.unlink()


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
