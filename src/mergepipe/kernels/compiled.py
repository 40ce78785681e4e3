"""Declare kernels and call them from Python: arguments are checked, then passed to the library that was built ahead.

A kernel is written in Python, in the part of it that numba compiles. Nothing is compiled at run time: `tools/kernels`
builds a shared library of all exported kernels, and `kernels.library` loads it.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mergepipe.kernels.library import loaded_library

P = ParamSpec("P")
R = TypeVar("R")

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits16 = NDArray[np.uint16]
Bits32 = NDArray[np.uint32]
Bits64 = NDArray[np.uint64]
Counts = NDArray[np.int64]

# --- parameters: what the library reads of an argument, one 8-byte word each ---

_PACKED = {"i": {1: "b7x", 2: "h6x", 4: "i4x", 8: "q"}, "u": {1: "B7x", 2: "H6x", 4: "I4x", 8: "Q"}} | {
    "f": {4: "f4x", 8: "d"},
    "b": {1: "?7x"},
}
_CALL_TYPES = (
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p,
)  # fmt: skip
_REFUSED = 2
"""From here on, what a call returns is the number of an argument that is not as it should be."""
_DIMENSIONS = re.compile(r"_([A-Z0-9]+)$")
_PYTHON_TYPES: dict[Any, type[np.generic]] = {int: np.int64, float: np.float64, bool: np.bool_}
_GENERIC: dict[Any, str] = {np.signedinteger: "i", np.unsignedinteger: "u"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number."""

    name: str
    dtype: np.dtype[Any]

    def layout(self) -> bytes:
        """How the library reads the word: `struct argument` of `tools/kernels/runtime.c`."""
        return b"s\0\0\0"

    def packed(self) -> str:
        """The word in the notation of `struct`."""
        return _PACKED[self.dtype.kind][self.dtype.itemsize]


@dataclass(frozen=True, slots=True)
class Array:
    """A contiguous array, which the library reads by its capsule. Its dimensions are the last letters of its name."""

    name: str
    dtype: np.dtype[Any]
    n_dims: int
    is_written: bool

    def layout(self) -> bytes:
        """How the library reads the array, and what it refuses."""
        return bytes([ord(self.dtype.kind), self.dtype.itemsize, self.n_dims, self.is_written])

    def packed(self) -> str:
        """The word in the notation of `struct`."""
        return "Q"

    def refusal(self, value: NDArray[Any]) -> str:
        """Say why the library refuses an array."""
        flags = value.flags
        laid_out = f"contiguous {flags.c_contiguous}, aligned {flags.aligned}, writeable {flags.writeable}"
        needed = "contiguous, aligned" + (", writeable" if self.is_written else "")
        return (
            f"{self.name}: an array of {value.ndim} dimensions of {value.dtype} ({laid_out}); "
            f"needed are {self.n_dims} of {self.dtype} ({needed})"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """A named tuple of numbers and arrays, which has checks of its own.

    These are its methods `check_bounds`, and `check_output_bounds` where its array `out` is written.
    """

    name: str
    kind: type[Any]
    fields: tuple[Scalar | Array, ...]
    checks: tuple[Callable[[Any], None], ...]


Parameter = Scalar | Array | Record


def _parameter(name: str, annotation: Any, written: Sequence[str], itemsize: int) -> Parameter:
    """Return the parameter of an annotation; `written` are the arrays that are written to, as `exported` has them."""
    if hasattr(annotation, "_fields"):
        return _record(name, annotation, written)
    return _number_or_array(name, annotation, name in written, itemsize)


def _record(name: str, kind: Any, written: Sequence[str]) -> Record:
    # Some modules import numpy for types alone.
    hints = get_type_hints(kind, localns={"np": np, "NDArray": NDArray})
    fields = tuple(_number_or_array(field, hints[field], f"{name}.{field}" in written) for field in kind._fields)
    names = ("check_bounds", "check_output_bounds") if f"{name}.out" in written else ("check_bounds",)
    checks = tuple(getattr(kind, check) for check in names if hasattr(kind, check))
    return Record(name, kind, fields, checks)


def _number_or_array(name: str, annotation: Any, is_written: bool, itemsize: int = 0) -> Scalar | Array:
    if get_origin(annotation) is np.ndarray:
        dimensions = _DIMENSIONS.search(name)
        n_dims = len(dimensions[1]) if dimensions else 1
        return Array(name, _dtype(_element(annotation), itemsize), n_dims, is_written)
    return Scalar(name, _dtype(annotation, itemsize))


def _element(annotation: Any) -> Any:
    """Return the class of an array's elements."""
    return get_args(get_args(annotation)[1])[0]


def _dtype(annotation: Any, itemsize: int) -> np.dtype[Any]:
    """Return the dtype of an element or number; those of abstract classes have the size of the specialization."""
    if annotation in _GENERIC:
        return np.dtype(f"{_GENERIC[annotation]}{itemsize}")
    element: type[np.generic] = _PYTHON_TYPES.get(annotation, annotation)
    return np.dtype(element)


# --- kernels: functions that kernels call, and those that Python calls too ---


class Kernel:
    """A function that is compiled ahead of time, on its own. Only other kernels call it."""

    is_inlined = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __call__(self, *arguments: Any) -> Any:
        """Refuse: Python's integers do not wrap around, so results would be others."""
        raise TypeError(f"{self.__name__} is compiled into other kernels, and called by these alone")


class Template(Kernel):
    """A function that is compiled into each kernel that calls it."""

    is_inlined = True


@dataclass(frozen=True)
class Specialization:
    """An exported kernel with the types of its parameters and results, as one function of the library."""

    symbol: str
    parameters: tuple[Parameter, ...]
    results: tuple[np.dtype[Any], ...]

    def call(self, arguments: Sequence[Any], library: ctypes.CDLL | None = None) -> Any:
        """Run the function, without the interpreter lock, after checking the arguments."""
        call = self._call if library is None else self.call_in(library)
        for place, check in self._checks:
            check(arguments[place])
        words: list[Any] = []
        for is_record, argument in zip(self._are_records, arguments, strict=True):
            if is_record:
                words.extend(argument)
            else:
                words.append(argument)
        capsules = [words[place].__array_struct__ for place in self._arrays]
        for place, capsule in zip(self._arrays, capsules, strict=True):
            words[place] = id(capsule)  # its address, while it is held here
        results = ctypes.create_string_buffer(self._results.size) if self.results else None
        code = call(self._arguments.pack(*words), results)
        if code:
            raise self._failure(code, arguments)
        if results is None:
            return None
        values = self._results.unpack(results)
        return values if len(values) > 1 else values[0]

    def call_in(self, library: ctypes.CDLL) -> Callable[[bytes, Any], int]:
        """Return what calls the function in a library."""
        address = ctypes.cast(library[self.symbol], ctypes.c_void_p)
        reader = ctypes.cast(ctypes.pythonapi.PyCapsule_GetPointer, ctypes.c_void_p)
        layout = b"".join(item.layout() for item in self._items)
        function = library.mergepipe_call
        function.argtypes = _CALL_TYPES
        return partial(function, address, reader, layout, len(self._items))

    @cached_property
    def _call(self) -> Callable[[bytes, Any], int]:
        return self.call_in(loaded_library())

    @cached_property
    def _are_records(self) -> tuple[bool, ...]:
        return tuple(isinstance(parameter, Record) for parameter in self.parameters)

    @cached_property
    def _checks(self) -> tuple[tuple[int, Callable[[Any], None]], ...]:
        """The checks of records, with the places of these among the arguments."""
        records = ((place, p) for place, p in enumerate(self.parameters) if isinstance(p, Record))
        return tuple((place, check) for place, record in records for check in record.checks)

    @cached_property
    def _items(self) -> tuple[Scalar | Array, ...]:
        """The numbers and arrays of all parameters, one word each."""
        nested = (parameter.fields if isinstance(parameter, Record) else (parameter,) for parameter in self.parameters)
        return tuple(itertools.chain.from_iterable(nested))

    @cached_property
    def _arrays(self) -> tuple[int, ...]:
        """The places of the words of arrays."""
        return tuple(place for place, item in enumerate(self._items) if isinstance(item, Array))

    @cached_property
    def _arguments(self) -> struct.Struct:
        return struct.Struct("=" + "".join(item.packed() for item in self._items))

    @cached_property
    def _results(self) -> struct.Struct:
        return struct.Struct("=" + "".join(_PACKED[dtype.kind][dtype.itemsize] for dtype in self.results))

    def _failure(self, code: int, arguments: Sequence[Any]) -> Exception:
        """Return the error of a call that was refused, or in which a kernel raised."""
        if code < _REFUSED:
            return MemoryError(f"no memory for the arrays of {self.symbol}")
        values: list[Any] = []
        for parameter, argument in zip(self.parameters, arguments, strict=True):
            values.extend(argument if isinstance(parameter, Record) else (argument,))
        item, value = self._items[code - _REFUSED], values[code - _REFUSED]
        return TypeError(item.refusal(value) if isinstance(item, Array) else f"{self.symbol} has too many parameters")


class ExportedKernel(Kernel):
    """A kernel that Python calls; `written` are the arrays that it writes to, those of records as record.field."""

    def __init__(self, function: Callable[..., Any], written: Sequence[str], itemsizes: Sequence[int]) -> None:
        super().__init__(function)
        self.written = tuple(written)
        self.itemsizes = tuple(itemsizes)

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel."""
        return self.specialization_of(arguments).call(arguments)

    def specialization_of(self, arguments: Sequence[Any]) -> Specialization:
        """Return the function of the library that takes these arguments."""
        itemsize = arguments[self._generic_place].dtype.itemsize if self.itemsizes else 0
        if itemsize not in self.specializations:
            raise TypeError(f"{self.__name__}: elements of {itemsize} bytes; it is compiled for {self.itemsizes}")
        return self.specializations[itemsize]

    @cached_property
    def _generic_place(self) -> int:
        """The place of the first argument whose elements have the size of the specialization."""
        hints = list(get_type_hints(self.function).values())
        is_generic = [get_origin(hint) is np.ndarray and _element(hint) in _GENERIC for hint in hints]
        return is_generic.index(True)

    @cached_property
    def specializations(self) -> dict[int, Specialization]:
        """The functions of this kernel in the library, by the itemsize of its elements; 0 of one without such."""
        return dict(self._specialize())

    def _specialize(self) -> Iterator[tuple[int, Specialization]]:
        hints = get_type_hints(self.function)
        returned = hints.pop("return")
        for itemsize in self.itemsizes or (0,):
            suffix = f"_{itemsize}" if itemsize else ""
            parameters = tuple(_parameter(name, hint, self.written, itemsize) for name, hint in hints.items())
            kinds = get_args(returned) if get_origin(returned) is tuple else (returned,)
            results = tuple(_dtype(kind, itemsize) for kind in kinds if kind is not type(None))
            yield itemsize, Specialization(f"mergepipe_{self.__name__.strip('_')}{suffix}", parameters, results)


EXPORTED: list[ExportedKernel] = []
"""Every kernel that Python calls, as far as their modules are imported."""


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Have `function` compiled for the kernels that call it.

    Floating point is strict (no reassociation, no contraction): results are the same on every machine.
    """
    return cast(Callable[P, R], Kernel(function))


def template(function: Callable[P, R]) -> Callable[P, R]:
    """Have `function` compiled into each kernel that calls it, where its constant arguments are known.

    So loops are vectorized for one dtype.
    """
    return cast(Callable[P, R], Template(function))


def exported(*written: str, itemsizes: Sequence[int] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have the decorated function compiled as a kernel that Python calls, with the types of its annotations.

    `written` are the arrays that it writes to, those of records as record.field. With `itemsizes` it is compiled once
    for each: numpy's abstract integers among the annotations have that size.
    """

    def export(function: Callable[P, R]) -> Callable[P, R]:
        compiled = ExportedKernel(function, written, itemsizes)
        EXPORTED.append(compiled)
        return cast(Callable[P, R], compiled)

    return export
