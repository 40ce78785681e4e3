"""Write pickles of inert values, and edit single values inside a pickle, without executing one."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from mergepipe.checkpoints.inert_pickle import (
    STORAGE_DTYPES,
    Global,
    PickledStorage,
    PickledTensor,
    Record,
    load_with_memo,
)
from mergepipe.core.blocks import DType, element_count
from mergepipe.errors import damaged
from mergepipe.tailor.checkpoint import PicklePath

_STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items() if dtype}
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_ORDERED = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")
_I32_LIMIT = 1 << 31
_STOP = b"."
_MARK = b"("
_TUPLE = b"t"
_SET_ITEM = b"s"


def torch_size(shape: tuple[int, ...]) -> Record:
    """Return the value of a shape that must come back as a `torch.Size`."""
    return Record(_SIZE, (shape,))


class InertPickler:
    """Writes one value as protocol 2: None, bool, int, float, str, bytes, tuple, list, dict and inert values.

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
        match value:
            case None | True | False:
                self._out.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
            case int():
                self._out.append(_integer(value))
            case float():
                self._out.append(b"G" + struct.pack(">d", value))
            case str() | Global():
                self._named(value)
            case dict():
                self._out.append(b"}" + self._number(self._next_number) + b"(")
                for key, item in value.items():
                    self._put(key)
                    self._put(item)
                self._out.append(b"u")
            case list():
                self._out.append(b"]" + self._number(self._next_number))
                self._many(value, b"e")
            case tuple():
                self._many(value, b"t")
            case Record():
                self._put(value.kind)
                self._put(value.args)
                self._out.append(b"R" if value.args else b"\x81")
                if value.state is not None:
                    self._put(value.state)
                    self._out.append(b"b")
            case PickledTensor():
                self._tensor(value)
            case bytes():
                self._call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))
            case _:
                raise TypeError(f"a {type(value).__name__} is not written")

    def _number(self, number: int) -> bytes:
        """Return the instruction that gives the value that was put last this number, the next one."""
        self._next_number = number + 1
        return b"r" + struct.pack("<I", number)

    def _many(self, values: Iterable[object], after: bytes) -> None:
        self._out.append(b"(")
        for value in values:
            self._put(value)
        self._out.append(after)

    def _named(self, value: str | Global) -> None:
        """A text or a global name: in full the first time, by number afterwards."""
        if value in self._memo:
            self._out.append(self.recall(self._memo[value]))
            return
        if isinstance(value, str):
            raw = value.encode()
            self._out.append(b"X" + struct.pack("<I", len(raw)) + raw)
        else:
            self._out.append(f"c{value.module}\n{value.name}\n".encode())
        self._memo[value] = self._next_number
        self._out.append(self._number(self._next_number))

    def _call(self, kind: Global, args: tuple[object, ...]) -> None:
        self._put(kind)
        self._put(args)
        self._out.append(b"R")

    def _tensor(self, tensor: PickledTensor) -> None:
        storage = tensor.storage
        dtype = storage.dtype
        if dtype not in _STORAGES:
            raise TypeError(f"a storage of {dtype.name if dtype else 'no dtype'} is not written")
        self._put(_REBUILD)
        self._out.append(b"(")
        self._put(("storage", Global("torch", _STORAGES[dtype]), storage.key, "cpu", storage.n_elements))
        self._out.append(b"Q")
        for value in (tensor.storage_offset, tensor.shape, tensor.stride, False):
            self._put(value)
        self._call(_ORDERED, ())
        self._out.append(b"tR")


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -_I32_LIMIT <= value < _I32_LIMIT:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def edit_pickle(raw: bytes, edits: Mapping[PicklePath, object], where: str) -> bytes:
    """Return `raw` with new values at some paths: keys of mappings and places in lists; the last step is a key.

    A pickle is a program, which ends with the mapping that it makes on the stack. Instructions before its end recall
    the mapping that holds a value by its number, and store the new value there. So nothing that refers to the old
    value, or to a part of it, breaks. `raw` must be a pickle that `load_inert` accepted.

    Law: `load_inert(edit_pickle(raw, {p: v}))` is `load_inert(raw)` with v at p.
    """
    if not edits:
        return raw
    root, memo = load_with_memo(raw, where)
    number_of = {id(value): number for number, value in memo.items()}
    recall = InertPickler.recall
    put = InertPickler(1 + max(memo, default=-1)).fragment
    pieces = [raw[:-1]]
    for path, value in edits.items():
        try:
            first = _item(root, path[0])
            holder = root
            for step in path[:-1]:
                holder = _item(holder, step)
            _item(holder if isinstance(holder, dict) else {}, path[-1])
            if holder is root:
                pieces += [put(path[-1]), put(value), _SET_ITEM]
                continue
            # what holds it is consumed as a value of the root's first key, which then is as it was
            pieces += [put(path[0]), _MARK, recall(number_of[id(holder)]), put(path[-1]), put(value), _SET_ITEM]
            pieces += [_TUPLE, _SET_ITEM, put(path[0]), recall(number_of[id(first)]), _SET_ITEM]
        except KeyError:
            shown = ".".join(map(str, path))[:200]
            raise damaged(where, f"holds no {shown!r} that could be changed") from None
    return b"".join([*pieces, _STOP])


def _item(holder: object, step: str | int) -> object:
    items = dict(enumerate(holder)) if isinstance(holder, list) else holder
    if not isinstance(items, dict):
        raise KeyError(step)
    return items[step]


def new_tensor(key: str, dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
    """Make the value of a contiguous tensor with a storage of its own."""
    stride = tuple(element_count(shape[place + 1 :]) for place in range(len(shape)))
    return PickledTensor(PickledStorage(key, dtype, element_count(shape)), dtype, 0, shape, stride)
