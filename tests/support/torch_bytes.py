"""Files as `torch.save` lays them out, written by hand: honest ones, and ones that lie where a test wants a lie."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Named:
    """A global name in a pickle."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """`kind(*args)`, then its state if any; `new` writes it as an object rather than as a call."""

    kind: Named
    args: tuple[object, ...] = ()
    state: object = None
    new: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor: `shape` elements of `storage` from `start` on; `stride` row-major unless given."""

    storage: Array
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None


@dataclass(slots=True)
class PickleWriter:
    """Writes a value as protocol 2, its containers numbered; `storages` collects the arrays it refers to, by key."""

    storages: list[Array] = field(default_factory=list)
    n_containers: int = 0

    def write(self, value: object) -> bytes:
        """The whole pickle."""
        return b"\x80\x02" + self.encode(value) + b"."

    def encode(self, value: object) -> bytes:  # one branch a type
        """The instructions that push one value."""
        if value is None or isinstance(value, bool):
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value) if -(1 << 31) <= value < 1 << 31 else self._long(value)
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, str):
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        if isinstance(value, dict):
            items = (item for pair in value.items() for item in pair)
            return b"}" + self._number() + b"(" + b"".join(map(self.encode, items)) + b"u"
        if isinstance(value, list):
            return b"]" + self._number() + b"(" + b"".join(map(self.encode, value)) + b"e"
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.encode, value)) + b"t"
        if isinstance(value, np.ndarray):
            return self._view(View(value.reshape(-1), 0, value.shape))
        return self._object(value)

    def _number(self) -> bytes:
        self.n_containers += 1
        return b"r" + struct.pack("<I", self.n_containers)

    def _object(self, value: object) -> bytes:
        if isinstance(value, View):
            return self._view(value)
        if isinstance(value, Named):
            return f"c{value.module}\n{value.name}\n".encode()
        if isinstance(value, Call):
            made = self.encode(value.kind) + self.encode(value.args) + (b"\x81" if value.new else b"R")
            return made if value.state is None else made + self.encode(value.state) + b"b"
        raise TypeError(type(value).__name__)

    def _long(self, value: int) -> bytes:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw

    def _view(self, view: View) -> bytes:
        known = next((i for i, s in enumerate(self.storages) if s is view.storage or _same(s, view.storage)), None)
        if known is None:
            known = len(self.storages)
            self.storages.append(view.storage)
        stride = view.stride or row_major(view.shape)
        kind = "LongStorage" if view.storage.dtype == np.int64 else "FloatStorage"
        reference = ("storage", Named("torch", kind), str(known), "cpu", view.storage.size)
        rebuild = self.encode(Named("torch._utils", "_rebuild_tensor_v2"))
        hooks = Call(Named("collections", "OrderedDict"))
        rest = (view.start, view.shape, stride, False, hooks)
        arguments = b"(" + self.encode(reference) + b"Q" + b"".join(map(self.encode, rest)) + b"t"
        return rebuild + arguments + b"R"


def _same(a: Array, b: Array) -> bool:
    return a.size == b.size and a.ctypes.data == b.ctypes.data and a.size > 0


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Member:
    """One member to write. Fields left None are honest."""

    name: str
    content: bytes
    method: int = 0
    flags: int = 0x0808
    crc32: int | None = None
    local_name: str | None = None
    central_size: int | None = None
    header_offset: int | None = None


def zip_bytes(members: Iterable[Member], *, zip64: bool = False, comment: bytes = b"") -> bytes:
    """A zip file with data aligned to 64 bytes and sizes in data descriptors, as torch writes it."""
    out, central = bytearray(), bytearray()
    count = 0
    for member in members:
        offset = len(out)
        name = (member.local_name or member.name).encode()
        crc = zlib.crc32(member.content) if member.crc32 is None else member.crc32
        n_pad = -(offset + 34 + len(name)) % 64
        extra = b"FB" + struct.pack("<H", n_pad) + b"Z" * n_pad
        sizes = (0, 0, 0) if member.flags & 8 else (crc, len(member.content), len(member.content))
        out += struct.pack(
            "<4s5H3I2H", b"PK\x03\x04", 0, member.flags, member.method, 0, 0, *sizes, len(name), len(extra)
        )
        out += name + extra + member.content
        if member.flags & 8:
            out += struct.pack("<4s3I", b"PK\x07\x08", crc, len(member.content), len(member.content))
        central += _central(member, offset, crc)
        count += 1
    return bytes(out) + _end(len(out), bytes(central), count, zip64, comment)


def _central(member: Member, offset: int, crc: int) -> bytes:
    size = len(member.content) if member.central_size is None else member.central_size
    at = offset if member.header_offset is None else member.header_offset
    name = member.name.encode()
    numbers = (0, 0, member.flags, member.method, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *numbers) + name


def _end(start: int, central: bytes, count: int, zip64: bool, comment: bytes) -> bytes:
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(central), start, len(comment)) + comment
    if not zip64:
        return central + end
    wide = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 0, 0, 0, 0, count, count, len(central), start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(central), 1)
    saturated = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return central + wide + locator + saturated


def torch_members(value: object, stem: str = "archive") -> list[Member]:
    """The members of an honest file."""
    writer = PickleWriter()
    pickled = writer.write(value)
    storages = [Member(f"{stem}/data/{i}", s.tobytes()) for i, s in enumerate(writer.storages)]
    head = [Member(f"{stem}/data.pkl", pickled), Member(f"{stem}/byteorder", b"little")]
    return [*head, *storages, Member(f"{stem}/version", b"3\n")]


def torch_bytes(value: object, stem: str = "archive") -> bytes:
    """An honest file."""
    return zip_bytes(torch_members(value, stem))


def pickle_file(pickled: bytes, stem: str = "archive") -> bytes:
    """An honest archive around any pickle."""
    return zip_bytes([Member(f"{stem}/data.pkl", pickled), Member(f"{stem}/version", b"3\n")])
