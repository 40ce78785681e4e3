"""Sparse patches of weights, as trainers send them to inference servers: new values at flat positions, by tensor.

A safetensors file has two vectors for each tensor that changed: "NAME.val", the values in its dtype, and "NAME.idx",
their positions in order. Positions are numbers of 32 bits (`raw`), or the number of unchanged elements before each
(`gap_delta`, of 16 bits or 32), as the header's `encoding` says. TRL writes and reads this form; that of its first
version, "NAME.values" and "NAME.indices", is read too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, ComputedTensor, Fetch, TensorEntry
from mergepipe.checkpoints.directory import SAFETENSORS_SUFFIXES, WeightFile, list_names, read_weight_file, stat_present
from mergepipe.checkpoints.open_files import once, read_elements, whole_cost_bytes
from mergepipe.core.blocks import DType, DTypeKind, Span
from mergepipe.core.strict_json import shown
from mergepipe.errors import MergePipeError, MismatchError, damaged, unsupported
from mergepipe.storage.contract import Store, is_folder
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

PATCH_NAME = "patch.safetensors"
PATCH_FORMAT = "sparse_weight_patch"
POSITIONS = ".idx"
VALUES = ".val"
GAPS = "gap_delta"
_ENDINGS = ((POSITIONS, VALUES), (".indices", ".values"))
_ENCODINGS = ("raw", GAPS)
_MOST_ELEMENTS = 1 << 31  # positions are numbers of 32 bits


def patch_file(store: Store, path: Location) -> Location | None:
    """Return the file of a patch: `path`, or the one in a folder; None where the name tells that there is none."""
    if is_folder(store, path):
        return path / PATCH_NAME if PATCH_NAME in list_names(store, path) else None
    return path if path.suffix in SAFETENSORS_SUFFIXES else None


def is_patch_of(names: Collection[str]) -> bool:
    """Whether tensors of these names are those of a patch: positions and values in pairs."""
    return any(_pairs(names, *ending) for ending in _ENDINGS)


def _pairs(names: Collection[str], positions: str, values: str) -> list[str]:
    """Return the tensors that have positions and values."""
    return [
        name.removesuffix(values)
        for name in names
        if name.endswith(values) and _other(name, values, positions) in names
    ]


def _other(name: str, ending: str, other: str) -> str:
    return name.removesuffix(ending) + other


@dataclass(frozen=True, slots=True)
class SparsePatch:
    """A patch as it is stored: positions and values by tensor, and tensors that are stored whole."""

    path: Location
    file: WeightFile
    parts: Mapping[str, tuple[TensorEntry, TensorEntry]]
    whole: Mapping[str, TensorEntry]
    encoding: str

    @property
    def names(self) -> list[str]:
        """The tensors that it changes."""
        return [*self.parts, *self.whole]


def read_patch(store: Store, path: Location) -> SparsePatch | None:
    """Read the header of the patch at `path`; None where there is no patch.

    Raises:
        UnsupportedError: `checkpoint.unsupported`, an encoding of positions that is not read.
        CorruptError: `checkpoint.damaged`, vectors that do not belong together.
    """
    location = patch_file(store, path)
    if location is None:
        return None
    file = read_weight_file(store, location.parent, location.name, stat_present(store, location.parent, location.name))
    entries = {entry.name: entry for entry in file.entries}
    parts: dict[str, tuple[TensorEntry, TensorEntry]] = {}
    for positions, values in _ENDINGS:
        for name in _pairs(entries, positions, values):
            parts[name] = (entries.pop(f"{name}{positions}"), entries.pop(f"{name}{values}"))
    if not parts:
        return None
    encoding = file.metadata.get("encoding", "raw")
    if encoding not in _ENCODINGS:
        message = f"has positions in the encoding {shown(encoding)}; {' and '.join(_ENCODINGS)} are read"
        raise unsupported(location, message, "send it with one of these")
    for name, (positions_of, values_of) in parts.items():
        is_sound = positions_of.shape == values_of.shape and len(values_of.shape) == 1
        if not is_sound or positions_of.dtype.name not in _POSITION_DTYPES:
            kinds = f"{positions_of.dtype.name} {list(positions_of.shape)} and {list(values_of.shape)}"
            raise damaged(location, f"the positions and values of {shown(name)} are {kinds}")
    return SparsePatch(path, file, parts, entries, encoding)


_POSITION_DTYPES: Mapping[str, type[np.integer]] = {
    "I32": np.int32, "I64": np.int64, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
}  # fmt: skip


def opened_patch(patch: SparsePatch, base: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the tensors of `base` that a patch changes, whole and with the new values; `names` are the base's.

    Raises:
        MismatchError: `base.mismatch`, a tensor of another dtype or size.
    """
    tensors: dict[str, PatchedTensor | TensorEntry] = {}
    for name, (positions, values) in patch.parts.items():
        weights = base.tensors[names[name]]
        if not isinstance(weights, TensorEntry) or weights.n_elements >= _MOST_ELEMENTS:
            message = f"{shown(name)} is computed in {base.path}, or too large for positions of 32 bits"
            raise unsupported(patch.path, message, "name the model itself as the base")
        if weights.dtype != values.dtype:
            raise _mismatch(patch.path, f"{shown(name)} is {values.dtype.name}, in the base {weights.dtype.name}")
        tensors[weights.name] = PatchedTensor(weights, positions, values, patch.encoding == GAPS)
    for name, entry in patch.whole.items():
        stored = base.tensors[names[name]]
        if (stored.shape, stored.stored_dtype) != (entry.shape, entry.dtype):
            message = f"{shown(name)} is {entry.dtype.name} {list(entry.shape)}, in the base {list(stored.shape)}"
            raise _mismatch(patch.path, message)
        tensors[stored.name] = replace(entry, name=stored.name)
    return Checkpoint(
        patch.path, patch.path, MappingProxyType(tensors), (patch.file.source,), (), CheckpointKind.ADAPTER
    )


def _mismatch(where: object, message: str) -> MergePipeError:
    return MismatchError.of("base.mismatch", where, message, "name the base that the patch was made on")


@dataclass(frozen=True, slots=True)
class PatchedTensor(ComputedTensor):
    """The `weights` of a base with other values at some positions, bit for bit.

    Positions and values are read whole, once for an opened tensor; a span costs them each time it is planned alone.
    """

    weights: TensorEntry
    positions: TensorEntry
    values: TensorEntry
    is_gaps: bool

    @property
    def name(self) -> str:
        return self.weights.name

    @property
    def dtype(self) -> DType:
        return self.weights.dtype

    @property
    def stored_dtype(self) -> DType:
        return self.weights.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    @property
    def is_delta(self) -> bool:
        return False

    @property
    def is_unit(self) -> bool:
        return False

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (self.weights, self.positions, self.values)

    def cost_bytes(self, span: Span) -> int:
        return self.weights.cost_bytes(span) + whole_cost_bytes((self.positions, self.values))

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps positions, 8 bytes each, and values from its first call on."""
        unchanged = self.weights.opened(files)
        changes = once(lambda purpose: self._read(files, purpose))

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            unchanged(span, out, purpose)
            positions, values = changes(purpose)
            first, last = np.searchsorted(positions, (span.start, span.stop))
            elements = out.reshape(-1, self.dtype.itemsize)
            elements[positions[first:last] - span.start] = values[first:last]

        return fetch

    def _read(
        self, files: Mapping[Location, RangeFile], purpose: Purpose
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Read all positions, in order, and the bytes of the values there."""
        whole = Span(0, self.values.n_elements)
        raw = read_elements(self.positions, whole, files, purpose)
        stored = raw.view(_POSITION_DTYPES[self.positions.dtype.name]).astype(np.int64)
        positions = np.cumsum(stored + 1) - 1 if self.is_gaps else stored
        values = read_elements(self.values, whole, files, purpose).reshape(-1, self.dtype.itemsize)
        is_sorted = bool(np.all(positions[1:] > positions[:-1]))
        if not is_sorted:
            order = np.argsort(positions, kind="stable")
            positions = positions[order]
            values = values[order]
        is_inside = not len(positions) or (positions[0] >= 0 and positions[-1] < self.n_elements)
        if not is_inside or np.any(positions[1:] == positions[:-1]):
            message = f"positions of {shown(self.name)} are outside its {self.n_elements} elements, or occur twice"
            raise damaged(self.positions.file, message)
        return positions, values


def differing(
    dtype: DType, pairs: Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the positions at which two tensors differ in a bit, and the bytes of the second there.

    `pairs` are the bytes of both, some at a time and in order. Memory: the result, and some times the pieces.
    """
    positions: list[NDArray[np.int64]] = []
    values: list[NDArray[np.uint8]] = []
    at = 0
    for first, second in pairs:
        changed = (first != second).reshape(-1, dtype.itemsize).any(axis=1)
        places = np.flatnonzero(changed)
        positions.append(places + at)
        values.append(second.reshape(-1, dtype.itemsize)[places])
        at += len(changed)
    none = np.empty(0, np.int64), np.empty((0, dtype.itemsize), np.uint8)
    return np.concatenate([none[0], *positions]), np.concatenate([none[1], *values])


def gaps_of(positions: NDArray[np.int64]) -> tuple[NDArray[np.unsignedinteger], str]:
    """Return the unchanged elements before each position, and the name of the dtype that holds them."""
    gaps = np.diff(positions, prepend=-1) - 1
    if gaps.max(initial=0) <= np.iinfo(np.uint16).max:
        return gaps.astype(np.uint16), "U16"
    return gaps.astype(np.uint32), "U32"


def can_be_patched(dtype: DType, shape: Sequence[int]) -> bool:
    """Whether positions and values can hold the change of a tensor."""
    return dtype.kind is not DTypeKind.OPAQUE and int(np.prod(shape, dtype=np.int64)) < _MOST_ELEMENTS
