"""A bounded reader of pickles that executes nothing: opcodes in, values that can do nothing out."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mergepipe.core.blocks import BF16, DTYPES, F16, F32, F64, DType
from mergepipe.errors import MergePipeError, UnsupportedError, damaged
from mergepipe.storage.contract import PICKLE_BYTES

_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 1 << 62
_LARGEST_INTEGER_KEY = 1 << 60  # an integer below 2^61 - 1 is its own hash


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function a pickle names. It is a pair of strings: nothing is ever imported or called."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """The inert form of an instance of `kind`: its constructor arguments and, once built, its state.

    Compared and hashed by identity. `state` is filled once, by the unpickler.
    """

    kind: Global
    args: tuple[object, ...]
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class PickledStorage:
    """A storage a pickle refers to by `key`; its bytes are elsewhere. `dtype` is None for an untyped storage."""

    key: str
    dtype: DType | None
    n_elements: int


@dataclass(frozen=True, slots=True, eq=False)
class PickledTensor:
    """A view of a storage, in elements of `dtype`."""

    storage: PickledStorage
    dtype: DType
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


STORAGE_DTYPES: Mapping[str, DType | None] = MappingProxyType({
    "DoubleStorage": F64, "FloatStorage": F32, "HalfStorage": F16, "BFloat16Storage": BF16,
    "LongStorage": DTYPES["I64"], "IntStorage": DTYPES["I32"], "ShortStorage": DTYPES["I16"],
    "CharStorage": DTYPES["I8"], "ByteStorage": DTYPES["U8"], "BoolStorage": DTYPES["BOOL"],
    "ComplexFloatStorage": DTYPES["C64"], "UntypedStorage": None,
})  # fmt: skip

TORCH_DTYPES: Mapping[str, DType] = MappingProxyType({
    "float64": F64, "float32": F32, "float16": F16, "bfloat16": BF16, "int64": DTYPES["I64"], "int32": DTYPES["I32"],
    "int16": DTYPES["I16"], "int8": DTYPES["I8"], "uint8": DTYPES["U8"], "uint16": DTYPES["U16"],
    "uint32": DTYPES["U32"], "uint64": DTYPES["U64"], "bool": DTYPES["BOOL"], "complex64": DTYPES["C64"],
    "float8_e4m3fn": DTYPES["F8_E4M3"], "float8_e5m2": DTYPES["F8_E5M2"],
    "float8_e4m3fnuz": DTYPES["F8_E4M3FNUZ"], "float8_e5m2fnuz": DTYPES["F8_E5M2FNUZ"],
    "float8_e8m0fnu": DTYPES["F8_E8M0"],
})  # fmt: skip

_DCP = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset({
    ("torch", "device"),
    ("argparse", "Namespace"),
    ("torch.serialization", "_get_layout"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    (_DCP, "Metadata"),
    (_DCP, "MetadataIndex"),
    (_DCP, "StorageMeta"),
    (_DCP, "TensorStorageMetadata"),
    (_DCP, "BytesStorageMetadata"),
    (_DCP, "ChunkStorageMetadata"),
    (_DCP, "TensorProperties"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
})  # fmt: skip

_DISTRIBUTED = frozenset({
    "DTensor", "DTensorSpec", "DeviceMesh", "_MeshLayout", "_FlatLayout", "TensorMeta", "ShardOrderEntry", "Shard",
    "Replicate", "Partial", "_StridedShard", "ShardedTensor", "ShardedTensorMetadata", "ShardMetadata",
    "TensorProperties", "MEM_FORMAT_ENCODING", "ChunkShardingSpec", "_remote_device", "ShardedTensor.ProcessGroupState",
})  # fmt: skip
"""Records of tensors that are spread over ranks. Their modules changed with torch's versions."""


def resolve_global(module: str, name: str, where: str) -> Global:
    """Accept a name of the closed list."""
    qualified_name = (module, name)
    is_listed = _is_record(qualified_name) or qualified_name in _CONSTRUCTORS or qualified_name in _TYPES
    is_constant = module == "torch" and (name in STORAGE_DTYPES or name in TORCH_DTYPES)
    if not (is_listed or is_constant or (module == "torch.storage" and name in ("UntypedStorage", "TypedStorage"))):
        raise _refused(f"{module[:80]}.{name[:80]}", where)
    return Global(module, name)


def _refused(name: str, where: str) -> Exception:
    message = f"the pickle names {name!r}, which is not on the list of inert types"
    hint = "nothing was executed; save the checkpoint without this object"
    return UnsupportedError.of("pickle.refused", where, message, hint)


def _is_record(qualified_name: tuple[str, str]) -> bool:
    module, name = qualified_name
    return qualified_name in _RECORDS or (module.startswith("torch.distributed.") and name in _DISTRIBUTED)


def construct(kind: object, args: object, where: str) -> object:
    """Return the inert value for `kind(*args)`."""
    if not isinstance(kind, Global) or not isinstance(args, tuple):
        raise damaged(where, "something that is not a listed type is called")
    qualified_name = (kind.module, kind.name)
    if qualified_name in _CONSTRUCTORS:
        return _CONSTRUCTORS[qualified_name](args, where)
    if _is_record(qualified_name):
        return Record(kind, args)
    raise damaged(where, f"'{kind}' is called, and only names something")


def storage_of(reference: object, where: str) -> PickledStorage:
    """Read the persistent id of a storage: `("storage", type, key, location, n_elements)`."""
    if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
        raise damaged(where, "a persistent id is not a storage")
    _, kind, key, _location, n_elements = reference
    if not isinstance(kind, Global) or kind.name not in STORAGE_DTYPES:
        raise damaged(where, "a storage has no storage type")
    if not isinstance(key, str) or not _is_count(n_elements):
        raise damaged(where, "a storage has no key or no size")
    assert isinstance(n_elements, int)
    return PickledStorage(key, STORAGE_DTYPES[kind.name], n_elements)


def is_key(value: object) -> bool:
    """Say whether a value may be a mapping key: hashing it is cheap, cannot recurse and cannot be made to collide."""
    if isinstance(value, int):
        return -_LARGEST_INTEGER_KEY < value < _LARGEST_INTEGER_KEY
    return value is None or isinstance(value, str | bytes | Record | Global)


def put_item(mapping: dict[object, object], key: object, value: object, where: str) -> None:
    """Store `mapping[key] = value` after checking the key."""
    if not is_key(key):
        raise damaged(where, f"a {type(key).__name__} is used as a mapping key")
    mapping[key] = value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ELEMENTS


def _counts(value: object, where: str, what: str) -> tuple[int, ...]:
    """Check a tuple of dimensions or strides."""
    if not isinstance(value, tuple | list) or len(value) > _MAX_DIMENSIONS or not all(map(_is_count, value)):
        raise damaged(where, f"{what} is not a short tuple of sizes")
    return tuple(int(v) for v in value)


def _tensor(args: tuple[object, ...], where: str) -> object:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    if not 6 <= len(args) <= 7 or not isinstance(args[0], PickledStorage) or args[0].dtype is None:
        raise damaged(where, "a tensor is rebuilt from the wrong arguments")
    return _view(args, args[0].dtype, where)


def _untyped_tensor(args: tuple[object, ...], where: str) -> object:
    """`_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])`."""
    if not 7 <= len(args) <= 8 or not isinstance(args[0], PickledStorage):
        raise damaged(where, "a tensor is rebuilt from the wrong arguments")
    kind = args[6]
    if not isinstance(kind, Global) or kind.module != "torch" or kind.name not in TORCH_DTYPES:
        raise damaged(where, "a tensor is rebuilt with no dtype")
    return _view(args, TORCH_DTYPES[kind.name], where)


def _view(args: tuple[object, ...], dtype: DType, where: str) -> PickledTensor:
    storage, offset = args[0], args[1]
    if not isinstance(storage, PickledStorage) or not isinstance(offset, int) or not _is_count(offset):
        raise damaged(where, "a tensor is rebuilt from the wrong arguments")
    shape, stride = _counts(args[2], where, "a tensor's shape"), _counts(args[3], where, "a tensor's stride")
    if len(shape) != len(stride):
        raise damaged(where, f"a tensor has {len(shape)} dimensions and {len(stride)} strides")
    return PickledTensor(storage, dtype, offset, shape, stride)


def _subclassed_tensor(args: tuple[object, ...], where: str) -> object:
    """`_rebuild_from_type_v2(function, type, arguments, state)`: the plain tensor inside, or a tensor of many ranks."""
    if len(args) == 4 and args[0] == _REBUILD_WRAPPER and isinstance(args[1], Global) and isinstance(args[2], tuple):
        return Record(args[1], args[2], args[3])
    if len(args) != 4 or args[0] not in (_REBUILD_V2, _REBUILD_V3) or not isinstance(args[2], tuple):
        raise damaged(where, "a tensor subclass is rebuilt by something that is not a tensor constructor")
    return construct(args[0], args[2], where)


def _parameter(args: tuple[object, ...], where: str) -> object:
    """`_rebuild_parameter(tensor, requires_grad, hooks)`: the tensor."""
    if len(args) != 3 or not isinstance(args[0], PickledTensor):
        raise damaged(where, "a parameter is rebuilt from something that is not a tensor")
    return args[0]


def _size(args: tuple[object, ...], where: str) -> object:
    return _counts(args[0] if args else (), where, "a torch.Size")


def _mapping(args: tuple[object, ...], where: str) -> object:
    """`OrderedDict()` or `OrderedDict(pairs)`, as a dict."""
    made: dict[object, object] = {}
    for pair in _sequence(args, where):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise damaged(where, "an ordered mapping is made of something that is not pairs")
        put_item(made, pair[0], pair[1], where)
    return made


def _default_mapping(args: tuple[object, ...], where: str) -> object:
    """`defaultdict(factory)`, as a dict; its factory is a name and is dropped."""
    if len(args) > 1 or not all(isinstance(a, Global) or a is None for a in args):
        raise damaged(where, "a default mapping is made of something that is not a type")
    return {}


def _collection(args: tuple[object, ...], where: str) -> object:
    """A set or frozen set, as the list of its members."""
    return list(_sequence(args, where))


def _sequence(args: tuple[object, ...], where: str) -> list[object]:
    if not args:
        return []
    if len(args) > 1 or not isinstance(args[0], list | tuple):
        raise damaged(where, "a collection is made of something that is not a sequence")
    return list(args[0])


def _latin1(args: tuple[object, ...], where: str) -> object:
    """`_codecs.encode(text, "latin1")`: how protocol 2 writes bytes."""
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise damaged(where, "bytes are made of something that is not latin-1 text")
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError as error:
        raise damaged(where, "bytes are made of something that is not latin-1 text") from error


def _no_bytes(args: tuple[object, ...], where: str) -> object:
    """`bytes()`: how protocol 2 writes empty bytes."""
    if args:
        raise damaged(where, "bytes are made of something that is not latin-1 text")
    return b""


def _attribute(args: tuple[object, ...], where: str) -> object:
    """`getattr(ShardedTensor, "ProcessGroupState")`: the name of a class inside a class, and nothing else."""
    match args:
        case (Global(module, "ShardedTensor"), "ProcessGroupState"):
            return Global(module, "ShardedTensor.ProcessGroupState")
    raise _refused("__builtin__.getattr", where)


_REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_REBUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")

Constructor = Callable[[tuple[object, ...], str], object]
_CONSTRUCTORS: Mapping[tuple[str, str], Constructor] = MappingProxyType({
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _untyped_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclassed_tensor,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _mapping,
    ("collections", "defaultdict"): _default_mapping,
    ("builtins", "set"): _collection,
    ("builtins", "frozenset"): _collection,
    ("__builtin__", "set"): _collection,
    ("__builtin__", "frozenset"): _collection,
    ("_codecs", "encode"): _latin1,
    ("__builtin__", "bytes"): _no_bytes,
    ("__builtin__", "getattr"): _attribute,
})  # fmt: skip

_COPYING = frozenset(key for key, make in _CONSTRUCTORS.items() if make in (_mapping, _collection, _latin1))
"""Constructors whose result is as large as their first argument."""

_TYPES = frozenset({
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    *((module, name) for module in ("builtins", "__builtin__") for name in ("dict", "list", "int", "float", "str")),
})  # fmt: skip


# --- a bounded reader of pickles that executes nothing: opcodes in, inert values out ---

_LONGEST_INTEGER_BITS = 256
_LONGEST_NAME_BYTES = 1024
# They fit the metadata of a sharded checkpoint of some 100 000 pieces.
_MOST_OPCODES = 20_000_000
_MOST_MARKS = 1_000
_MOST_STACKED = 100_000


def load_inert(pickled: bytes, where: str) -> object:
    """Return the value a pickle describes, built of None, bool, int, float, str, bytes, tuple, list, dict and inert
    values. Sets become lists. The result may share parts and may contain itself: walk it with care.

    Memory: a small multiple of `len(pickled)`, of at most `PICKLE_BYTES`: calls copy no more items and characters than
    the pickle has bytes.
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

    __slots__ = ("marked", "memo", "n_bytes", "n_copied", "stack", "stream", "where")

    def __init__(self, pickled: bytes, where: str) -> None:
        self.stream = io.BytesIO(pickled)
        self.n_bytes = len(pickled)
        self.n_copied = 0
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
        if isinstance(kind, Global) and (kind.module, kind.name) in _COPYING and args:
            self._charge_copy(args[0])
        self.push(construct(kind, args, self.where))

    def _charge_copy(self, source: object) -> None:
        """Count what a call copies: of a value that is remembered and copied again and again it is no longer bounded.

        In a pickle that Python wrote every item and every character was a byte of the pickle at least.
        """
        if isinstance(source, list | tuple | str):
            self.n_copied += len(source)
        if self.n_copied > self.n_bytes:
            raise self.corrupt(f"calls copy more than the {self.n_bytes} items and characters that a pickle can hold")

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
