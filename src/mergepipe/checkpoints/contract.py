"""The contract of checkpoints: named tensors, each stored in one byte range or computed from stored ones."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG, DType, Span, element_count
from mergepipe.storage.buffers import PAGE_BYTES
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.file_version import FileId
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location

# --- the contract of checkpoints: named tensors, each stored in one byte range or computed from stored ones ---


if TYPE_CHECKING:
    from abc import ABCMeta as ProtocolType
else:
    ProtocolType = type(Protocol)

_CONFORMING: dict[tuple[type, type], bool] = {}


class ByType(ProtocolType):
    """The type of protocols that all instances of a class keep, or none: one instance is looked at, once.

    Python looks at each attribute of each instance, which computes all properties.
    """

    def __instancecheck__(self, instance: object) -> bool:
        key = (self, type(instance))
        if key not in _CONFORMING:
            _CONFORMING[key] = super().__instancecheck__(instance)
        return _CONFORMING[key]


class CheckpointKind(StrEnum):
    """The meaning of a checkpoint's tensors: weights, or differences from its base."""

    FULL = "full"  # weights: every tensor of the base is expected
    DELTA = "delta"  # differences from the base; a tensor that is not there does not differ
    ADAPTER = "adapter"  # low-rank differences; a tensor that is not there does not differ


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: `nbytes` bytes at absolute `offset` of `file`, row-major, little-endian."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: Location
    offset: int
    nbytes: int
    is_delta: bool = False  # the stored values are differences from the base
    granularity_bytes: int = PAGE_BYTES  # reads of its file are charged in multiples of this: see `StoreTerms`

    def __post_init__(self) -> None:
        if self.nbytes != self.n_elements * self.dtype.itemsize:
            raise ValueError(f"{self.name}: {self.shape} {self.dtype.name} is not {self.nbytes} bytes")

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    @property
    def kernel_code(self) -> int:
        """Return the code by which kernels decode stored bytes: the dtype's, with `DELTA_FLAG` for a delta."""
        return self.dtype.kernel_code | (DELTA_FLAG if self.is_delta else 0)

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The byte ranges behind this tensor: itself."""
        return (self,)


class Fetch(Protocol):
    """Writes the elements `span` of a computed tensor into `out` (uint8, `span.n_elements * dtype.itemsize` bytes).

    Called from many threads. It reads through the files it was opened with, charging `purpose`.
    """

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None: ...


class ComputedTensor(Protocol):
    """A tensor that is not one byte range: an adapter's product, gathered rows, encoded deltas, another merge.

    `dtype` is that of the fetched elements. `is_unit`: its stored bytes are read all at once, on the first fetch of
    an opened tensor, and kept; a plan reads all of its blocks or none. Otherwise each block is read on its own.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_delta(self) -> bool: ...

    @property
    def is_unit(self) -> bool: ...

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The byte ranges it may be worked out from, for accounting and to open their files."""
        ...

    @property
    def n_elements(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Stored bytes that reading all of it needs."""
        ...

    @property
    def kernel_code(self) -> int: ...

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to fetch `span` on its own, in whole pages; for a unit, those of all of it."""
        ...

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Ready to be fetched for one job; may keep what it has read for as long as it lives (state how much)."""
        ...


class FetchOnBase(Protocol):
    """A `Fetch` that is given the base's stored bytes of the same elements, in the base's dtype."""

    def __call__(self, span: Span, base: BaseBytes, out: NDArray[np.uint8], purpose: Purpose) -> None: ...


Turns: TypeAlias = AbstractContextManager[object]
"""Entered for as long as a thread computes and does not wait, so that no more threads do than were allowed."""
NO_TURNS: Turns = nullcontext()


@runtime_checkable
class NeedsBase(Protocol, metaclass=ByType):
    """A computed tensor whose stored bytes mean something only together with another's: encoded differences.

    The engine hands it the bytes of `encoded_on` where that is the base it has read anyway. `opened` still works
    alone: it reads them too. Cut at multiples of `cut_elements`, nothing that is stored is read twice.
    """

    @property
    def encoded_on(self) -> TensorEntry: ...

    @property
    def files(self) -> frozenset[Location]:
        """The files that it may be read from, whatever the level, without its base's; known without reading."""
        ...

    @property
    def cut_elements(self) -> int: ...

    def opened_on_base(self, files: Mapping[Location, RangeFile], turns: Turns = NO_TURNS) -> FetchOnBase: ...


@runtime_checkable
class IndexedFiles(Protocol, metaclass=ByType):
    """A computed tensor whose byte ranges are located by an index that is read when first needed."""

    @property
    def files(self) -> frozenset[Location]:
        """Return the files that reads need; see `NeedsBase.files`."""
        ...


@runtime_checkable
class IndexedEntry(IndexedFiles, Protocol):
    """A computed tensor that is one byte range, located by an index that is read when first needed."""

    def entry(self) -> TensorEntry: ...


@runtime_checkable
class LeveledTensor(Protocol, metaclass=ByType):
    """A computed tensor that can be read less exactly for fewer bytes, by levels: small numbers above 0.

    Below the last level it is a delta in float32; read as it is, it is at the last.
    """

    def at_level(self, level: int) -> ComputedTensor:
        """The same tensor read at a level; the same object for the same level."""
        ...

    def exact_level(self, n_kept: int) -> int:
        """The least level at which the `n_kept` largest |deltas| are exact, and all others smaller or exact too."""
        ...

    def ladder(self, top: int) -> tuple[int, ...]:
        """Levels up to `top`, each of which reads all that the one before it reads."""
        ...

    @property
    def last_level(self) -> int: ...

    @property
    def cut_elements(self) -> int: ...

    def level_costs_bytes(self, level: int, stretches: int) -> NDArray[np.int64]:
        """`cost_bytes` at a level, of each `stretches` stretches of `cut_elements` that are fetched as one."""
        ...

    def squared_errors(self, level: int) -> NDArray[np.float64]:
        """Return the squared delta that a level omits, for each stretch of `cut_elements`; level 0 reads nothing."""
        ...


class PackedIndex(Protocol):
    """The index of a checkpoint of packed tensors, read when first needed."""

    @property
    def cost_bytes(self) -> int:
        """Bytes requested to read the index, in whole pages."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Return the stored size of all tensors, without the index."""
        ...

    @property
    def least_bytes(self) -> int:
        """Return the least cost of reading all tensors, at the lowest useful level, with the index."""
        ...

    @property
    def is_read(self) -> bool: ...

    @property
    def content(self) -> bytes:
        """The bytes of the index; the first access reads it."""
        ...

    def adopt(self, content: bytes) -> None:
        """Use the bytes of the index that another process has read."""
        ...

    @property
    def files(self) -> frozenset[Location]:
        """The files that the tensors are read from."""
        ...

    @property
    def index_file(self) -> Location: ...


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A tensor that an adapter or a delta checkpoint does not touch: its delta is zero, and nothing is read."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    is_delta: bool = True
    nbytes: int = 0
    stored: tuple[TensorEntry, ...] = ()

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    @property
    def kernel_code(self) -> int:
        return self.dtype.kernel_code | DELTA_FLAG


Readable: TypeAlias = TensorEntry | ComputedTensor
Source: TypeAlias = TensorEntry | ComputedTensor | Unchanged


@runtime_checkable
class HasStoredDtype(Protocol, metaclass=ByType):
    """A computed tensor whose elements are fetched in another dtype than its model is stored in."""

    @property
    def stored_dtype(self) -> DType: ...


def stored_dtype(tensor: Source) -> DType:
    """Return the dtype in which a tensor's model is stored, whatever it is fetched in."""
    return tensor.stored_dtype if isinstance(tensor, HasStoredDtype) else tensor.dtype


def as_leveled(source: Source | None) -> LeveledTensor | None:
    """Return a source that can be read by levels, None for any other; stored tensors cost no look at the protocol."""
    if source is None or isinstance(source, TensorEntry | Unchanged):
        return None
    return source if isinstance(source, LeveledTensor) else None


def files_of(sources: Iterable[Source]) -> set[Location]:
    """The files that reading these needs: of encoded ones also what they are encoded on."""
    files: set[Location] = set()
    for source in sources:
        if isinstance(source, TensorEntry | Unchanged):
            files.update(entry.file for entry in source.stored)
        elif isinstance(source, NeedsBase):
            files |= {*source.files, source.encoded_on.file}
        else:
            files |= source.files if isinstance(source, IndexedFiles) else {entry.file for entry in source.stored}
    return files


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Named tensors on storage. `tensors` is in storage order: file by file in order, by offset inside a file.

    `root` is the directory, or the directory that holds a bare file; `sidecars` are the names (relative to `root`,
    sorted) of configuration, tokenizer and chat-template files that belong to the model. A bare file has none.
    """

    path: Location
    root: Location
    tensors: Mapping[str, Readable]
    files: tuple[FileId, ...]
    sidecars: tuple[str, ...]
    kind: CheckpointKind = CheckpointKind.FULL
    encoded: PackedIndex | None = None  # of one whose tensors are encoded beside a base's
    content_id: str | None = None  # see `checkpoints.content_id`; None where it is unknown without reading tensors

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what the headers said: whoever unpickles it opens the files anew, at the versions in `files`."""
        values = (getattr(self, attribute.name) for attribute in fields(self))
        return Checkpoint, tuple(dict(value) if isinstance(value, MappingProxyType) else value for value in values)

    @property
    def tensor_bytes(self) -> int:
        """Bytes stored of all tensors."""
        if self.encoded is not None:  # without a look at the index
            return self.encoded.stored_bytes
        return sum(t.nbytes for t in self.tensors.values())


# --- compute the bytes that reading blocks of a file costs: the one cost function of planner and engine ---


def range_cost_bytes(start: int, stop: int, granularity_bytes: int = PAGE_BYTES) -> int:
    """Bytes requested to read `[start, stop)` of a file: rounded outwards at both ends, 0 if it is empty."""
    step = granularity_bytes
    return -(-stop // step) * step - start // step * step if stop > start else 0


def block_cost_bytes(entry: TensorEntry, span: Span) -> int:
    """Bytes requested to read the elements `span` of `entry` on their own.

    Law: blocks read together, in requests that are cut at block boundaries only, request at most the sum of their
    costs, since touching pages are joined.
    """
    start = entry.offset + span.start * entry.dtype.itemsize
    return range_cost_bytes(start, start + span.n_elements * entry.dtype.itemsize, entry.granularity_bytes)


def source_cost_bytes(source: Source, span: Span) -> int:
    """Bytes requested to have the elements `span` of any source on their own; none where nothing is read."""
    if isinstance(source, TensorEntry):
        return block_cost_bytes(source, span)
    return 0 if isinstance(source, Unchanged) else source.cost_bytes(span)


def block_costs_bytes(
    offset_B: NDArray[np.int64],
    itemsize_B: NDArray[np.int64],
    first_B: NDArray[np.int64],
    n_B: NDArray[np.int64],
    granularity_B: NDArray[np.int64],
) -> NDArray[np.int64]:
    """`block_cost_bytes` of many blocks.

    File offset and item size of their tensors, first element, elements (> 0), granularity of the files.
    """
    start_B = offset_B + first_B * itemsize_B
    stop_B = start_B + n_B * itemsize_B
    steps_B = -(-stop_B // granularity_B) - start_B // granularity_B
    return np.asarray(steps_B * granularity_B, np.int64)


# --- the base's stored bytes of some elements, as they are shared by all that is encoded on them ---


_DIGEST_BYTES = 16


class BaseBytes:
    """Stored bytes (uint8) that do not change while this is used. Safe to use from many threads.

    Memory beside the bytes: a digest for each range that was asked for.
    """

    def __init__(self, stored: NDArray[np.uint8]) -> None:
        self.stored = stored
        self._lock = threading.Lock()
        self._digests: dict[tuple[int, int], bytes] = {}

    def digest(self, start: int, stop: int) -> bytes:
        """BLAKE3-128 of the bytes `[start, stop)`, taken once."""
        with self._lock:  # who comes meanwhile would else take the same digest
            digest = self._digests.get((start, stop))
            if digest is None:
                digest = self._digests[start, stop] = blake3(self.stored[start:stop].data).digest(_DIGEST_BYTES)
            return digest
