"""A bounded reader of pickles that executes nothing: opcodes in, inert values out."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from mergepipe.checkpoints.inert_values import Record, construct, put_item, resolve_global, storage_of
from mergepipe.errors import MergePipeError, UnsupportedError, damaged
from mergepipe.storage.contract import PICKLE_BYTES

_LONGEST_INTEGER_BYTES = 32


@dataclass(frozen=True, slots=True)
class PickleLimits:
    """Limits of parsing a pickle. The defaults fit the metadata of a sharded checkpoint of some 100 000 pieces."""

    max_bytes: int = PICKLE_BYTES
    max_opcodes: int = 20_000_000
    max_marks: int = 1_000
    max_stack: int = 100_000


DEFAULT_LIMITS = PickleLimits()


def load_inert(pickled: bytes, where: str, limits: PickleLimits = DEFAULT_LIMITS) -> object:
    """Return the value a pickle describes, built of None, bool, int, float, str, bytes, tuple, list, dict and inert
    values. Sets become lists. The result may share parts and may contain itself: walk it with care.

    Memory: a small multiple of `len(pickled)`, capped by `limits`.
    """
    if len(pickled) > limits.max_bytes:
        message = f"the pickle has {len(pickled)} bytes; at most {limits.max_bytes} are read"
        raise UnsupportedError.of("pickle.refused", where, message)
    return _Machine(pickled, where, limits).run()


def load_with_memo(pickled: bytes, where: str) -> tuple[object, dict[int, object]]:
    """Return the value a pickle describes, and the parts of it that the pickle numbers, by their numbers."""
    machine = _Machine(pickled, where, DEFAULT_LIMITS)
    return machine.run(), machine.memo


class _Machine:
    """The pickle virtual machine: a stack, a list of marked stacks and a memo."""

    __slots__ = ("limits", "marked", "memo", "pickled", "position", "stack", "where")

    def __init__(self, pickled: bytes, where: str, limits: PickleLimits) -> None:
        self.pickled = pickled
        self.where = where
        self.limits = limits
        self.position = 0
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        pickled, handlers = self.pickled, _HANDLERS
        try:
            for _ in range(self.limits.max_opcodes):
                opcode = pickled[self.position]
                self.position += 1
                if opcode == _STOP:
                    if len(self.stack) != 1 or self.marked:
                        raise self.corrupt("the pickle ends with an unfinished value")
                    if self.position != len(self.pickled):
                        raise self.corrupt(f"{len(self.pickled) - self.position} bytes follow the end of the pickle")
                    return self.stack[0]
                handler = handlers.get(opcode)
                if handler is None:
                    raise self._refused(opcode)
                handler(self)
        except (IndexError, struct.error) as error:
            raise self.corrupt("the pickle is cut or empties its own stack") from error
        raise damaged(self.where, f"the pickle has more than {self.limits.max_opcodes} instructions")

    def corrupt(self, message: str) -> MergePipeError:
        return damaged(self.where, f"{message} (byte {self.position} of the pickle)")

    def _refused(self, opcode: int) -> MergePipeError:
        at = self.position - 1
        message = f"instruction 0x{opcode:02x} at byte {at} of the pickle is not accepted"
        return UnsupportedError.of("pickle.refused", self.where, message)

    # --- operands

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if nbytes < 0 or end > len(self.pickled):
            raise self.corrupt(f"{nbytes} bytes are announced, {len(self.pickled) - self.position} are left")
        content = self.pickled[self.position : end]
        self.position = end
        return content

    def number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self.pickled, self.position)
        self.position += form.size
        return int(value)

    def text(self, nbytes: int) -> str:
        try:
            return self.take(nbytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt("a text is not UTF-8") from error

    def line(self) -> str:
        end = self.pickled.find(b"\n", self.position, self.position + 1024)
        if end < 0:
            raise self.corrupt("a name has no end")
        name = self.text(end - self.position)
        self.position += 1
        return name

    # --- stack

    def push(self, value: object) -> None:
        if len(self.stack) >= self.limits.max_stack:
            raise self.corrupt(f"more than {self.limits.max_stack} values are waiting")
        self.stack.append(value)

    def mark(self) -> None:
        if len(self.marked) >= self.limits.max_marks:
            raise self.corrupt(f"more than {self.limits.max_marks} values are nested")
        self.marked.append(self.stack)
        self.stack = []

    def pop_marked(self) -> list[object]:
        if not self.marked:
            raise self.corrupt("a value ends that never began")
        items, self.stack = self.stack, self.marked.pop()
        return items

    def pop_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise self.corrupt("the pickle empties its own stack")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    # --- memo

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise self.corrupt(f"value {index} is recalled and was never stored")
        self.push(self.memo[index])

    # --- containers

    def extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise self.corrupt(f"items are appended to a {type(target).__name__}")
        target.extend(items)

    def pop_pair(self) -> list[object]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise self.corrupt(f"items are stored in a {type(target).__name__}, or a key has no value")
        for index in range(0, len(items), 2):
            put_item(target, items[index], items[index + 1], self.where)

    def make_dict(self) -> None:
        items = self.pop_marked()
        self.push({})
        self.set_items(items)

    # --- what would execute

    def global_of(self, module: object, name: object) -> None:
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.corrupt("a name is not text")
        self.push(resolve_global(module, name, self.where))

    def call(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        self.push(construct(kind, args, self.where))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record) and target.state is None:
            target.state = state
        elif not isinstance(target, dict):  # attributes of an ordered mapping are dropped
            raise self.corrupt(f"a state is given to a {type(target).__name__}")

    def persistent(self) -> None:
        self.push(storage_of(self.stack.pop(), self.where))

    # --- scalars and framing

    def integer(self, nbytes: int) -> None:
        if not 0 <= nbytes <= _LONGEST_INTEGER_BYTES:
            raise self.corrupt(f"an integer has {nbytes} bytes")
        self.push(int.from_bytes(self.take(nbytes), "little", signed=True))

    def real(self) -> None:
        (value,) = _F64.unpack_from(self.pickled, self.position)
        self.position += 8
        self.push(float(value))

    def protocol(self) -> None:
        version = self.number(_U8)
        if not 2 <= version <= 5 or self.position != 2:
            raise self.corrupt(f"protocol {version} is not accepted here")

    def frame(self) -> None:
        announced = self.number(_U64)
        if announced > len(self.pickled) - self.position:
            raise self.corrupt(f"a frame of {announced} bytes is announced")


_U8, _U16, _I32, _U32, _U64 = (struct.Struct(f) for f in ("<B", "<H", "<i", "<I", "<Q"))
_F64 = struct.Struct(">d")
_STOP = ord(".")

_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(_U8)),
    ord("M"): lambda m: m.push(m.number(_U16)),
    ord("J"): lambda m: m.push(m.number(_I32)),
    0x8A: lambda m: m.integer(m.number(_U8)),
    0x8B: lambda m: m.integer(m.number(_I32)),
    ord("G"): _Machine.real,
    ord("X"): lambda m: m.push(m.text(m.number(_U32))),
    0x8C: lambda m: m.push(m.text(m.number(_U8))),
    0x8D: lambda m: m.push(m.text(m.number(_U64))),
    ord("B"): lambda m: m.push(m.take(m.number(_U32))),
    ord("C"): lambda m: m.push(m.take(m.number(_U8))),
    0x8E: lambda m: m.push(m.take(m.number(_U64))),
    ord("("): _Machine.mark,
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.pop_tuple(1),
    0x86: lambda m: m.pop_tuple(2),
    0x87: lambda m: m.pop_tuple(3),
    ord("t"): lambda m: m.push(tuple(m.pop_marked())),
    ord("]"): lambda m: m.push([]),
    ord("l"): lambda m: m.push(m.pop_marked()),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.pop_marked()),
    ord("}"): lambda m: m.push({}),
    ord("d"): _Machine.make_dict,
    ord("s"): lambda m: m.set_items(m.pop_pair()),
    ord("u"): lambda m: m.set_items(m.pop_marked()),
    0x8F: lambda m: m.push([]),
    0x90: lambda m: m.extend(m.pop_marked()),
    0x91: lambda m: m.push(m.pop_marked()),
    ord("q"): lambda m: m.remember(m.number(_U8)),
    ord("r"): lambda m: m.remember(m.number(_U32)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("h"): lambda m: m.recall(m.number(_U8)),
    ord("j"): lambda m: m.recall(m.number(_U32)),
    ord("c"): lambda m: m.global_of(m.line(), m.line()),
    0x93: lambda m: m.global_of(*m.pop_pair()),
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}
