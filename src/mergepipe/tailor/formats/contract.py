"""The contract of training formats: how a directory is recognised, opened, or refused; and what all of them read."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.directory import STORE_HEADER_NAME
from mergepipe.checkpoints.inert_pickle import Global, PickledTensor, Record
from mergepipe.checkpoints.torch_file import TorchArchive
from mergepipe.core.blocks import DTYPES, DType, Span
from mergepipe.errors import MergePipeError, damaged, unsupported
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import AdamStep, Framework, PicklePath, Piece, TrainingCheckpoint


@dataclass(frozen=True, slots=True)
class TrainingFormat:
    """A framework's layout of training state. `TrainingCheckpoint.format` is its name.

    `recognise` tells by the names in a directory, no file is read, or by the path being a file. `open` takes where the
    checkpoint will lie, too, and raises as `open_training_checkpoint`. `looked_for` are the files that it is recognised
    by, for the message about an unknown directory. `state_file` holds the state of the run: of partial checkpoints
    only those with it can resume, under `partial_frameworks`. `records_step` says whether the step is recorded in a
    place of its own, not only in the newest counter.
    """

    name: str
    looked_for: str
    recognise: Callable[[Store, Location], bool]
    open: Callable[[Store, Location, Location], TrainingCheckpoint]
    state_file: str = ""
    records_step: bool = False
    partial_frameworks: frozenset[Framework] = frozenset()


# --- checkpoints that are recognised and not read: each is refused by its name ---


_MEGATRON_RANK = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}", re.ASCII)
_FOREIGN: tuple[tuple[str, Callable[[frozenset[str]], bool], str], ...] = (
    (
        "a packed checkpoint", lambda names: STORE_HEADER_NAME in names,
        "unpack it first: mergepipe unpack PACK -o FOLDER",
    ),
    (
        "a Megatron checkpoint of its format `torch`",
        lambda names: "model_optim_rng.pt" in names or any(map(_MEGATRON_RANK.fullmatch, names)),
        "convert it to torch_dist or to a Hugging Face model with Megatron's own tools",
    ),
    (
        "an FSDP checkpoint of Accelerate with a file for each rank",
        lambda names: bool({"pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_0_rank0.bin"} & names),
        "save full or sharded state dicts: state_dict_type FULL_STATE_DICT or SHARDED_STATE_DICT",
    ),
)  # fmt: skip
"""Formats with what shows them, by the names in a directory, and what can be done."""


def refuse_foreign(store: Store, path: Location) -> None:
    """Refuse a directory of another program's format that is not read, and say whose it is.

    Raises:
        UnsupportedError: `checkpoint.unsupported`.
    """
    names = frozenset(entry.name for entry in store.list(path))
    for name, is_shown_by, hint in _FOREIGN:
        if is_shown_by(names):
            raise unsupported(path, f"is {name}, which is not read", hint)


# --- weights alone, as `save_only_model` leaves them ---


NO_OPTIMIZER = "the optimizer's state: only weights are here"
_NUMBERED = re.compile(r".*?(\d{1,12})", re.ASCII)


def step_of_name(name: str) -> int | None:
    """Return the number that a directory's name ends in, as `checkpoint-400` and `global_step400` do."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])


def recorded_step(root: object, keys: Sequence[str]) -> int | None:
    """Return the first count that a pickle records under one of the keys."""
    recorded = (root.get(key) for key in keys) if isinstance(root, dict) else ()
    return next((step for step in recorded if type(step) is int and step >= 0), None)


def tied_by_place(places: Mapping[str, object]) -> dict[str, str]:
    """Map names of weights to the first one that lies in the same place, where that is another."""
    owners: dict[object, str] = {}
    for name, place in places.items():
        owners.setdefault(place, name)
    return {name: owners[place] for name, place in places.items() if owners[place] != name}


# --- what optimizers keep

_FOREIGN_STATES = {
    "exp_avg_sq_row": "Adafactor", "exp_avg_sq_col": "Adafactor", "qmap1": "an 8-bit optimizer",
    "absmax1": "an 8-bit optimizer", "state1": "an 8-bit optimizer", "shadow": "an optimizer with shadow weights",
    "__bnb_optimizer_quant_state__": "bitsandbytes",
}  # fmt: skip
_ONLY_ALIKE = "only optimizers whose states have their parameter's shape are composed, as AdamW"


def refuse_foreign_states(kinds: frozenset[str], where: object) -> None:
    """Refuse the states of an optimizer whose states are not arrays of the parameter's shape.

    Raises:
        UnsupportedError: `checkpoint.unsupported`, with the optimizer's name.
    """
    kind = next((kind for kind in _FOREIGN_STATES if kind in kinds), None)
    if kind is not None:
        raise unsupported(where, f"holds the state {kind!r} of {_FOREIGN_STATES[kind]}", _ONLY_ALIKE)


def optimizer_tensors(archive: TorchArchive, entry: Node) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the states of a parameter, or of a flat group, that are tensors, but for its step: by kind.

    Raises:
        UnsupportedError: `checkpoint.unsupported`: a state is neither a tensor nor a number, or a foreign one.
    """
    states = dict(entry.named_items())
    refuse_foreign_states(frozenset(states), archive.file)
    for kind, node in states.items():
        if isinstance(node.value, PickledTensor):
            if kind != "step":
                yield kind, located(archive, node)
        elif not isinstance(node.value, int | float | None):
            raise unsupported(archive.file, f"holds the state {kind[:80]!r}: no tensor and no number", _ONLY_ALIKE)


def located(archive: TorchArchive, node: Node) -> TensorEntry:
    """Return the byte range of the tensor that a node of an archive's pickle must be."""
    return archive.locate(node.tensor(), node.path)


def read_counter(archive: TorchArchive, node: Node, path: PicklePath, parameters: tuple[str, ...] = ()) -> AdamStep:
    """Read the step counter at `path` of an archive's pickle: a number there, or a tensor of one element."""
    if not isinstance(node.value, PickledTensor):
        return AdamStep(float(node.integer()), parameters, DTYPES["I64"], entries=((archive.file, path),))
    tensor = located(archive, node)
    if tensor.n_elements != 1:
        raise node.error(f"a step counter has shape {tensor.shape}")
    value = read_scalar(archive.read, tensor.file, tensor.offset, tensor.dtype)
    cell = Piece(tensor.file, tensor.offset, tensor.nbytes, Span(0, 1))
    return AdamStep(value, parameters, tensor.dtype, (cell,))


def joined_counter(counters: Sequence[AdamStep], parameters: Iterable[str]) -> AdamStep:
    """Join the places of one counter of some parameters, which must have one value in all of them."""
    first, *others = counters
    files = [counter.cells[0].file if counter.cells else counter.entries[0][0] for counter in counters]
    for file, counter in zip(files[1:], others, strict=True):
        if counter.value != first.value:
            message = f"is at optimizer step {counter.value:g}, {files[0]} at {first.value:g}"
            raise damaged(file, message, "copy the files of one save again")
    cells = tuple(cell for counter in counters for cell in counter.cells)
    entries = tuple(entry for counter in counters for entry in counter.entries)
    return replace(first, parameters=tuple(parameters), cells=cells, entries=entries)


# --- small values read out of tensor files: step counters, which are one element each ---


STEP_FORMS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


def read_scalar(read: Callable[[Location, int, int], bytes], file: Location, offset: int, dtype: DType) -> float:
    """Read one element as a float."""
    if dtype.name not in STEP_FORMS:
        raise unsupported(file, f"a step counter of dtype {dtype.name}")
    raw = read(file, offset, dtype.itemsize)
    if len(raw) != dtype.itemsize:
        raise damaged(file, f"the file ends before byte {offset + dtype.itemsize}")
    (value,) = struct.unpack(STEP_FORMS[dtype.name], raw)
    if not abs(value) < 2.0**62:
        raise damaged(file, f"a step counter is {value}")
    return float(value)


# --- typed steps through an inert pickle: each says where it is and what it found when the file is not as expected ---


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
        """The value under `key`, or of a list at this place, which must be there."""
        if isinstance(key, int) and isinstance(self.value, list | tuple):
            values: Mapping[object, object] = dict(enumerate(self.value))
        else:
            values = self.mapping()
        if key not in values:
            raise self.error(f"{str(key)!r} is missing")
        return self._child(key, values[key])

    def at(self, path: PicklePath) -> Node:
        """The value at a path, which must be there."""
        node = self
        for step in path:
            node = node.get(step)
        return node

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
