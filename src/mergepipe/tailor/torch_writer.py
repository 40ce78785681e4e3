"""Write inert values as pickles that torch reads, without importing torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mergepipe.checkpoints.inert_values import Global, PickledTensor, Record
from mergepipe.core.blocks import BF16, F16, F32, F64, DType

_STORAGES: Mapping[str, str] = MappingProxyType({
    F64.name: "DoubleStorage", F32.name: "FloatStorage", F16.name: "HalfStorage", BF16.name: "BFloat16Storage",
    "I64": "LongStorage", "I32": "IntStorage", "I16": "ShortStorage", "I8": "CharStorage", "U8": "ByteStorage",
    "BOOL": "BoolStorage", "C64": "ComplexFloatStorage",
})  # fmt: skip
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_ORDERED = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")
_I32_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Size:
    """A shape that must come back as a `torch.Size`."""

    shape: tuple[int, ...]


class InertPickler:
    """Writes one value as protocol 2: None, bool, int, float, str, bytes, tuple, list, dict, inert values and `Size`.

    Records without arguments are written as objects, others as calls: what `copyreg` and enumerations do. Sharing is
    kept for texts and names only. What can be recalled, texts, names and containers, is numbered from `first_number`
    on. Memory: a small multiple of the result.
    """

    def __init__(self, first_number: int = 0) -> None:
        self._out: list[bytes] = []
        self._memo: dict[str | Global, int] = {}
        self._next_number = first_number

    def dump(self, value: object) -> bytes:
        """Return the whole pickle."""
        return b"\x80\x02" + self.fragment(value) + b"."

    def fragment(self, value: object) -> bytes:
        """Return the instructions that push a value, to be put inside a pickle behind earlier fragments."""
        self._out = []
        self._put(value)
        return b"".join(self._out)

    @staticmethod
    def recall(number: int) -> bytes:
        """Return the instruction that pushes a value which the pickle has numbered."""
        return b"j" + struct.pack("<I", number)

    def _put(self, value: object) -> None:
        if value is None or isinstance(value, bool):
            self._out.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif isinstance(value, int):
            self._out.append(_integer(value))
        elif isinstance(value, float):
            self._out.append(b"G" + struct.pack(">d", value))
        elif isinstance(value, str | Global):
            self._named(value)
        elif isinstance(value, dict):
            self._mapping(value)
        elif isinstance(value, list):
            self._out.append(b"]")
            self._number()
            self._many(value, b"e")
        elif isinstance(value, tuple):
            self._many(value, b"t")
        else:
            self._object(value)

    def _number(self) -> int:
        """Number the value that was put last."""
        number = self._next_number
        self._out.append(b"r" + struct.pack("<I", number))
        self._next_number += 1
        return number

    def _many(self, values: list[object] | tuple[object, ...], after: bytes) -> None:
        self._out.append(b"(")
        for value in values:
            self._put(value)
        self._out.append(after)

    def _mapping(self, mapping: dict[object, object]) -> None:
        self._out.append(b"}")
        self._number()
        self._out.append(b"(")
        for key, value in mapping.items():
            self._put(key)
            self._put(value)
        self._out.append(b"u")

    def _named(self, value: str | Global) -> None:
        """A text or a global name: in full the first time, by number afterwards."""
        if value in self._memo:
            self._out.append(self.recall(self._memo[value]))
            return
        if isinstance(value, Global):
            self._out.append(f"c{value.module}\n{value.name}\n".encode())
        else:
            raw = value.encode("utf-8")
            self._out.append(b"X" + struct.pack("<I", len(raw)) + raw)
        self._memo[value] = self._number()

    def _object(self, value: object) -> None:
        if isinstance(value, Record):
            self._record(value)
        elif isinstance(value, PickledTensor):
            self._tensor(value)
        elif isinstance(value, Size):
            self._call(_SIZE, (value.shape,))
        elif isinstance(value, bytes):
            self._call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))
        else:
            raise TypeError(f"a {type(value).__name__} is not written")

    def _record(self, record: Record) -> None:
        self._put(record.kind)
        self._put(record.args)
        self._out.append(b"R" if record.args else b"\x81")
        if record.state is not None:
            self._put(record.state)
            self._out.append(b"b")

    def _call(self, kind: Global, args: tuple[object, ...]) -> None:
        self._put(kind)
        self._put(args)
        self._out.append(b"R")

    def _tensor(self, tensor: PickledTensor) -> None:
        storage = tensor.storage
        self._put(_REBUILD)
        self._out.append(b"(")
        self._put(("storage", Global("torch", _storage_name(storage.dtype)), storage.key, "cpu", storage.n_elements))
        self._out.append(b"Q")
        for value in (tensor.storage_offset, tensor.shape, tensor.stride, False):
            self._put(value)
        self._call(_ORDERED, ())
        self._out.append(b"tR")


def _storage_name(dtype: DType | None) -> str:
    if dtype is None or dtype.name not in _STORAGES:
        raise TypeError(f"a storage of {dtype.name if dtype else 'no dtype'} is not written")
    return _STORAGES[dtype.name]


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -_I32_LIMIT <= value < _I32_LIMIT:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw
