"""A bounded reader of pickles that executes nothing: opcodes in, inert values out."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import Any

from mergepipe.checkpoints.inert_values import Record, construct, put_item, resolve_global, storage_of
from mergepipe.errors import MergePipeError, UnsupportedError, damaged
from mergepipe.storage.contract import PICKLE_BYTES

_LONGEST_INTEGER_BITS = 256
_LONGEST_NAME_BYTES = 1024
# They fit the metadata of a sharded checkpoint of some 100 000 pieces.
_MOST_OPCODES = 20_000_000
_MOST_MARKS = 1_000
_MOST_STACKED = 100_000


def load_inert(pickled: bytes, where: str) -> object:
    """Return the value a pickle describes, built of None, bool, int, float, str, bytes, tuple, list, dict and inert
    values. Sets become lists. The result may share parts and may contain itself: walk it with care.

    Memory: a small multiple of `len(pickled)`, of at most `PICKLE_BYTES`.
    """
    if len(pickled) > PICKLE_BYTES:
        message = f"the pickle has {len(pickled)} bytes; at most {PICKLE_BYTES} are read"
        raise UnsupportedError.of("pickle.refused", where, message)
    return _Machine(pickled, where).run()


def load_with_memo(pickled: bytes, where: str) -> tuple[object, dict[int, object]]:
    """Return the value a pickle describes, and the parts of it that the pickle numbers, by their numbers."""
    machine = _Machine(pickled, where)
    return machine.run(), machine.memo


class _Machine:
    """The pickle virtual machine: a stack, a list of marked stacks and a memo. `pickletools` reads the operands."""

    __slots__ = ("marked", "memo", "n_bytes", "stack", "stream", "where")

    def __init__(self, pickled: bytes, where: str) -> None:
        self.stream = io.BytesIO(pickled)
        self.n_bytes = len(pickled)
        self.where = where
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        stream, instructions = self.stream, _INSTRUCTIONS
        try:
            for _ in range(_MOST_OPCODES):
                code = stream.read(1)
                if code == b".":
                    if len(self.stack) != 1 or self.marked:
                        raise self.corrupt("the pickle ends with an unfinished value")
                    if stream.tell() != self.n_bytes:
                        raise self.corrupt(f"{self.n_bytes - stream.tell()} bytes follow the end of the pickle")
                    return self.stack[0]
                if code not in instructions:
                    raise self._refused(code)
                read, work = instructions[code]
                work(self, None if read is None else read(stream))
        except (IndexError, ValueError) as error:
            raise self.corrupt("the pickle is cut or empties its own stack") from error
        raise damaged(self.where, f"the pickle has more than {_MOST_OPCODES} instructions")

    def corrupt(self, message: str) -> MergePipeError:
        return damaged(self.where, f"{message} (byte {self.stream.tell()} of the pickle)")

    def _refused(self, code: bytes) -> MergePipeError:
        if not code:
            return self.corrupt("the pickle has no end")
        message = f"instruction 0x{code.hex()} at byte {self.stream.tell() - 1} of the pickle is not accepted"
        return UnsupportedError.of("pickle.refused", self.where, message)

    def push(self, value: object) -> None:
        if len(self.stack) >= _MOST_STACKED:
            raise self.corrupt(f"more than {_MOST_STACKED} values are waiting")
        self.stack.append(value)

    def push_integer(self, value: int) -> None:
        if value.bit_length() > _LONGEST_INTEGER_BITS:
            raise self.corrupt(f"an integer has {value.bit_length()} bits")
        self.push(value)

    def push_text(self, text: str) -> None:
        text.encode()  # `pickletools` lets halves of surrogate pairs pass, this does not
        self.push(text)

    def mark(self, _: object) -> None:
        if len(self.marked) >= _MOST_MARKS:
            raise self.corrupt(f"more than {_MOST_MARKS} values are nested")
        self.marked.append(self.stack)
        self.stack = []

    def pop_marked(self) -> list[Any]:
        items, self.stack = self.stack, self.marked.pop()
        return items

    def pop_last(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise self.corrupt(f"value {index} is recalled and was never stored")
        self.push(self.memo[index])

    def remember(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise self.corrupt(f"items are appended to a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise self.corrupt(f"items are stored in a {type(target).__name__}, or a key has no value")
        for index in range(0, len(items), 2):
            put_item(target, items[index], items[index + 1], self.where)

    def make_dict(self, _: object) -> None:
        items = self.pop_marked()
        self.push({})
        self.set_items(items)

    def global_of(self, names: list[Any]) -> None:
        module, name = names
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.corrupt("a name is not text")
        self.push(resolve_global(module, name, self.where))

    def call(self, _: object) -> None:
        kind, args = self.pop_last(2)
        self.push(construct(kind, args, self.where))

    def build(self, _: object) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record) and target.state is None:
            target.state = state
        elif not isinstance(target, dict):  # attributes of an ordered mapping are dropped
            raise self.corrupt(f"a state is given to a {type(target).__name__}")

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5 or self.stream.tell() != 2:
            raise self.corrupt(f"protocol {version} is not accepted here")

    def frame(self, announced: int) -> None:
        if announced > self.n_bytes - self.stream.tell():
            raise self.corrupt(f"a frame of {announced} bytes is announced")


def _read_names(stream: io.BytesIO) -> list[str]:
    lines = [stream.readline(_LONGEST_NAME_BYTES) for _ in range(2)]
    if not all(line.endswith(b"\n") for line in lines):
        raise ValueError("a name has no end")
    return [line[:-1].decode() for line in lines]


_Work = Callable[[_Machine, Any], None]
_WORK: dict[str, _Work] = {
    "PROTO": _Machine.protocol,
    "FRAME": _Machine.frame,
    "NONE": _Machine.push,
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "LONG1", "LONG4"), _Machine.push_integer),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine.push_text),
    **dict.fromkeys(("BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _Machine.push),
    "MARK": _Machine.mark,
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop_last(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.pop_last(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop_last(3))),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_marked())),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), lambda m, _: m.push([])),
    **dict.fromkeys(("LIST", "FROZENSET"), lambda m, _: m.push(m.pop_marked())),
    "APPEND": lambda m, _: m.extend([m.stack.pop()]),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda m, _: m.extend(m.pop_marked())),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "DICT": _Machine.make_dict,
    "SETITEM": lambda m, _: m.set_items(m.pop_last(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_marked()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": _Machine.global_of,
    "STACK_GLOBAL": lambda m, _: m.global_of(m.pop_last(2)),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "BUILD": _Machine.build,
    "BINPERSID": lambda m, _: m.push(storage_of(m.stack.pop(), m.where)),
}
_Read = Callable[[io.BytesIO], Any]
_INSTRUCTIONS: dict[bytes, tuple[_Read | None, _Work]] = {
    opcode.code.encode("latin-1"): (opcode.arg.reader if opcode.arg else None, _WORK[opcode.name])
    for opcode in pickletools.opcodes
    if opcode.name in _WORK
}
_INSTRUCTIONS[b"c"] = (_read_names, _Machine.global_of)
