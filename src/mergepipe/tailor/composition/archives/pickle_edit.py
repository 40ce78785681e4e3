"""Edit single values inside a pickle without executing it; all other bytes stay the same."""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from dataclasses import dataclass, field

from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.tailor.composition.archives.torch_writer import InertPickler
from mergepipe.tailor.formats.pickle_node import PicklePath

_PUTS = ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE")
_GETS = ("BINGET", "LONG_BINGET", "GET")
_MARKED = ("TUPLE", "LIST", "DICT", "FROZENSET", "SETITEMS", "APPENDS", "ADDITEMS")


def edit_pickle(raw: bytes, edits: Mapping[PicklePath, object], where: str) -> bytes:
    """Return `raw` with new values at some paths: keys of mappings and places in lists; the last step is a key.

    The key is stored once more behind its old value, as a mapping may: so nothing that refers to the old value, or
    to a part of it, breaks. `raw` must be a pickle that `load_inert` accepted.

    Law: `load_inert(edit_pickle(raw, {p: v}))` is `load_inert(raw)` with v at p.

    Raises:
        CorruptError: there is no such path.
    """
    if not edits:
        return raw
    root = _Outline(raw).root()
    pieces: list[tuple[int, bytes]] = []
    for path, value in edits.items():
        holder = _find(root, path[:-1])
        entry = holder.entries.get(path[-1]) if holder is not None else None
        if entry is None or entry.closing is None:
            shown = ".".join(map(str, path))[:200]
            raise CorruptError.of("tailor.structure", where, f"holds no {shown!r} that could be changed")
        pickler = InertPickler()
        pieces.append((entry.stop, pickler.fragment(path[-1]) + pickler.fragment(value) + entry.closing))
    out, position = [], 0
    for stop, inserted in sorted(pieces, key=lambda piece: piece[0]):
        out += [raw[position:stop], inserted]
        position = stop
    return b"".join([*out, raw[position:]])


def _find(value: _Value, path: PicklePath) -> _Value | None:
    for step in path:
        entry = value.entries.get(step)
        if entry is None:
            return None
        value = entry.value
    return value


@dataclass(slots=True, eq=False)
class _Value:
    """The outline of one value: the value itself if it can be a key, and the positions of a container's entries."""

    key: str | int | None = None
    entries: dict[str | int, _Entry] = field(default_factory=dict)
    n_items: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry: behind byte `stop` a new one may follow, which `closing` must end; None for an item of a sequence."""

    value: _Value
    stop: int
    closing: bytes | None


@dataclass(frozen=True, slots=True)
class _Pushed:
    """A value on the stack, and the byte offset of its first instruction. A mark has no value."""

    start: int
    value: _Value | None


class _Outline:
    """Interprets a pickle's instructions on outlines instead of values."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._stack: list[_Pushed] = []
        self._memo: dict[int, _Value] = {}

    def root(self) -> _Value:
        for opcode, argument, position in pickletools.genops(self._raw):
            if opcode.name == "STOP":
                break
            self._follow(opcode, argument, position or 0)
        return self._pop()

    def _pop(self) -> _Value:
        value = self._stack.pop().value
        if value is None:
            raise _unreadable()
        return value

    def _top(self) -> _Value:
        value = self._stack[-1].value
        if value is None:
            raise _unreadable()
        return value

    def _follow(self, opcode: pickletools.OpcodeInfo, argument: object, position: int) -> None:
        name = opcode.name
        if name in _PUTS:
            self._memo[len(self._memo) if name == "MEMOIZE" else _index(argument)] = self._top()
        elif name in _GETS:
            self._stack.append(_Pushed(position, self._memo[_index(argument)]))
        elif name == "MARK":
            self._stack.append(_Pushed(position, None))
        elif name == "SETITEM":
            value, key = self._pop(), self._pop()
            self._store(key, value, position + 1, b"s")
        elif name == "APPEND":
            self._add(self._pop(), position)
        elif name == "BUILD":
            self._pop()
        elif name in _MARKED:
            self._close(name, position)
        else:
            self._apply(opcode, argument, position)

    def _close(self, name: str, position: int) -> None:
        """Close the container that a mark opened; an item ends where the next one begins."""
        at = next(i for i in reversed(range(len(self._stack))) if self._stack[i].value is None)
        mark, items = self._stack[at], self._stack[at + 1 :]
        del self._stack[at:]
        if name in ("TUPLE", "LIST", "DICT", "FROZENSET"):
            self._stack.append(_Pushed(mark.start, _Value()))
        stops = [*(item.start for item in items[1:]), position][: len(items)]
        values = [item.value for item in items if item.value is not None]
        if name in ("SETITEMS", "DICT"):
            for key, value, stop in zip(values[::2], values[1::2], stops[1::2], strict=True):
                self._store(key, value, stop, b"")
        else:
            for value, stop in zip(values, stops, strict=True):
                self._add(value, stop)

    def _store(self, key: _Value, value: _Value, stop: int, closing: bytes) -> None:
        if key.key is not None:
            self._top().entries[key.key] = _Entry(value, stop, closing)

    def _add(self, value: _Value, stop: int) -> None:
        """Add an item of a sequence: addressed by index, never replaced itself."""
        target = self._top()
        target.entries[target.n_items] = _Entry(value, stop, None)
        target.n_items += 1

    def _apply(self, opcode: pickletools.OpcodeInfo, argument: object, position: int) -> None:
        """Apply any other instruction: pop its arguments, push at most one value."""
        start = position
        for _ in opcode.stack_before:
            start = self._stack[-1].start
            self._pop()
        if opcode.stack_after:
            is_plain = not opcode.stack_before and opcode.name != "GLOBAL"
            key = argument if is_plain and isinstance(argument, str | int) else None
            self._stack.append(_Pushed(start, _Value(key)))


def _index(argument: object) -> int:
    if not isinstance(argument, int):
        raise _unreadable()
    return argument


def _unreadable() -> MergePipeError:
    return CorruptError.of("tailor.structure", "a pickle", "its instructions do not fit together")
