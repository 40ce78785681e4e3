"""Typed steps through inert pickles, and small values read out of tensor files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from mergepipe.checkpoints.inert_values import Global, PickledTensor, Record
from mergepipe.checkpoints.torch_file import TorchArchive
from mergepipe.core.blocks import DType
from mergepipe.errors import MergePipeError, damaged, unsupported
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

# --- small values read out of tensor files: step counters, which are one element each ---


_FORMS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


def read_scalar(store: Store, file: Location, offset: int, dtype: DType) -> float:
    """Read one element as a float."""
    if dtype.name not in _FORMS:
        raise unsupported(file, f"a step counter of dtype {dtype.name}")
    raw = store.read_metadata(file, offset, dtype.itemsize)
    if len(raw) != dtype.itemsize:
        raise damaged(file, f"the file ends before byte {offset + dtype.itemsize}")
    (value,) = struct.unpack(_FORMS[dtype.name], raw)
    if not abs(value) < 2.0**62:
        raise damaged(file, f"a step counter is {value}")
    return float(value)


# --- typed steps through an inert pickle: each says where it is and what it found when the file is not as expected ---


PicklePath: TypeAlias = tuple[str | int, ...]  # keys of mappings and places in lists, from the root on


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a pickle and its place: `file: a.b[3]`."""

    value: object
    file: str
    path: str = ""

    def error(self, message: str) -> MergePipeError:
        """The error of this place."""
        return damaged(f"{self.file}: {self.path or 'the pickle'}", message)

    def _wrong(self, needed: str) -> MergePipeError:
        return self.error(f"{needed} is needed, found a {type(self.value).__name__}")

    def _child(self, key: object, value: object) -> Node:
        step = f".{key}" if isinstance(key, str) else f"[{key}]"
        return Node(value, self.file, (self.path + step).removeprefix(".")[:400])

    def mapping(self) -> dict[object, object]:
        """The mapping itself."""
        if not isinstance(self.value, dict):
            raise self._wrong("a mapping")
        return self.value

    def find(self, key: object) -> Node | None:
        """The value under `key`; None if there is none, or if it is None."""
        value = self.mapping().get(key)
        return None if value is None else self._child(key, value)

    def get(self, key: object) -> Node:
        """The value under `key`, which must be there."""
        if key not in self.mapping():
            raise self.error(f"{str(key)!r} is missing")
        return self._child(key, self.mapping()[key])

    def at(self, path: PicklePath) -> Node:
        """The value at a path, which must be there."""
        node = self
        for step in path:
            node = (
                node._item(step) if isinstance(step, int) and isinstance(node.value, list | tuple) else node.get(step)
            )
        return node

    def _item(self, index: int) -> Node:
        items = self.elements()
        if index >= len(items):
            raise self.error(f"{len(items)} items, number {index} is needed")
        return items[index]

    def items(self) -> Iterator[tuple[object, Node]]:
        """The entries of a mapping."""
        return ((key, self._child(key, value)) for key, value in self.mapping().items())

    def named_items(self) -> Iterator[tuple[str, Node]]:
        """The entries of a mapping whose keys are texts."""
        for key, node in self.items():
            if not isinstance(key, str):
                raise self.error(f"a key is a {type(key).__name__}, a text is needed")
            yield key, node

    def elements(self) -> list[Node]:
        """The elements of a list or tuple."""
        if not isinstance(self.value, list | tuple):
            raise self._wrong("a list")
        return [self._child(index, value) for index, value in enumerate(self.value)]

    def fields(self, name: str) -> Node:
        """The state of a record of type `name` (without its module)."""
        if not isinstance(self.value, Record) or self.value.kind.name != name:
            raise self._wrong(f"a {name}")
        return Node(self.value.state, self.file, self.path)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self._wrong("a text")
        return self.value

    def integer(self) -> int:
        """An integer from 0 to 2**62."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not 0 <= self.value <= 1 << 62:
            raise self._wrong("a count")
        return self.value

    def shape(self) -> tuple[int, ...]:
        """A tuple of counts."""
        return tuple(node.integer() for node in self.elements())

    def tensor(self) -> PickledTensor:
        if not isinstance(self.value, PickledTensor):
            raise self._wrong("a tensor")
        return self.value

    def name(self) -> Global:
        """A global name, as `torch.float32`."""
        if not isinstance(self.value, Global):
            raise self._wrong("a type name")
        return self.value


def root_of(archive: TorchArchive) -> Node:
    """Return what a file holds."""
    return Node(archive.root, str(archive.file))
