"""The contract of checkpoints: named tensors, each stored in one byte range or computed from stored ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG, DType, Span, element_count
from mergepipe.storage.contract import FileId
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import PAGE_BYTES, read_exact

GGUF_SUFFIX = ".gguf"


class CheckpointKind(StrEnum):
    """The meaning of a checkpoint's tensors: weights, or differences from its base."""

    FULL = "full"  # weights: every tensor of the base is expected
    DELTA = "delta"  # differences from the base; a tensor that is not there does not differ
    ADAPTER = "adapter"  # low-rank differences; a tensor that is not there does not differ


class Tensor:
    """One named tensor: where its bytes are, what reading them costs, and how exactly they can be read.

    What a kind does not say otherwise is that of a tensor that is read block by block, in one way, without its base.

    Attributes:
        dtype: of the elements as they are read.
        is_delta: whether the values are differences from the base.
        is_unit: whether the stored bytes are read all at once, on the first fetch of an opened tensor, and kept; a plan
            reads all of its blocks or none.
        stored: the byte ranges that it may be worked out from, for accounting and to open their files.
        nbytes: the stored bytes that reading all of it needs.
        encoded_on: the tensor whose bytes it is decoded with; see `LeveledTensor`.
        cut_elements: cut at multiples of this, nothing that is stored is read twice.
    """

    __slots__ = ()
    if TYPE_CHECKING:  # fields of some kinds, properties of others

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
        def stored(self) -> tuple[TensorEntry, ...]: ...
        @property
        def nbytes(self) -> int: ...
        @property
        def cut_elements(self) -> int: ...
    else:
        is_delta, is_unit, cut_elements = False, False, 1

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    @property
    def kernel_code(self) -> int:
        """The code by which kernels decode the bytes: the dtype's, with `DELTA_FLAG` for a delta."""
        return self.dtype.kernel_code | (DELTA_FLAG if self.is_delta else 0)

    @property
    def stored_dtype(self) -> DType:
        """The dtype in which its model is stored, whatever it is read in."""
        return self.dtype

    @property
    def encoded_on(self) -> TensorEntry | None:
        return None

    @property
    def files(self) -> frozenset[Location]:
        """The files that reads need, whatever the level, without that of `encoded_on`."""
        return frozenset(entry.file for entry in self.stored)

    def entry(self) -> TensorEntry | None:
        """The byte range that it is; None for one that is computed."""
        return None

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to read the elements `span` on their own, in whole pages; for a unit, those of all of it."""
        raise NotImplementedError

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Ready to be fetched for one job; may keep what it has read for as long as it lives (state how much)."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TensorEntry(Tensor):
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
    def stored(self) -> tuple[TensorEntry, ...]:
        """The byte ranges behind this tensor: itself."""
        return (self,)

    def entry(self) -> TensorEntry:
        return self

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to read the elements `span` on their own, in whole pages.

        Law: blocks read together, in requests that are cut at block boundaries only, request at most the sum of their
        costs, since touching pages are joined.
        """
        start = self.offset + span.start * self.dtype.itemsize
        return range_cost_bytes(start, start + span.n_elements * self.dtype.itemsize, self.granularity_bytes)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps nothing."""

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            start = self.offset + span.start * self.dtype.itemsize
            out[:] = read_exact(files[self.file], start, start + len(out), purpose)

        return fetch


@dataclass(frozen=True, slots=True)
class WeightHeader:
    """What one file of weights says it holds: its tensors by offset, and a BLAKE3-128 (32 hex digits) of that.

    Of a shard that torch's Hugging Face writer has saved, `offsets` says where in the whole tensors its own begin.
    `metadata` are the texts in it that say how its tensors are read.
    """

    entries: tuple[TensorEntry, ...]
    size_bytes: int
    digest: str
    offsets: Mapping[str, tuple[int, ...]] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


Fetch: TypeAlias = Callable[[Span, NDArray[np.uint8], Purpose], None]
"""Writes the elements `span` of a tensor into `out` (uint8, `span.n_elements * dtype.itemsize` bytes).

Called from many threads. It reads through the files it was opened with, charging `purpose`.
"""


class ComputedTensor(Tensor):
    """A tensor that is not one byte range: an adapter's product, gathered rows, encoded deltas."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.stored)


Turns: TypeAlias = AbstractContextManager[object]
"""Entered for as long as a thread computes and does not wait, so that no more threads do than were allowed."""
NO_TURNS: Turns = nullcontext()


class LeveledTensor(ComputedTensor):
    """A computed tensor whose stored bytes mean something only together with another's: encoded differences.

    The engine hands it the bytes of `encoded_on` where that is the base it has read anyway. `opened` still works
    alone: it reads them too. It can be read less exactly for fewer bytes, by levels: small numbers above 0. Below the
    last level it is a delta in float32; read as it is, it is at the last.
    """

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def encoded_on(self) -> TensorEntry: ...
        @property
        def last_level(self) -> int: ...

    def opened_on_base(self, files: Mapping[Location, RangeFile], turns: Turns = NO_TURNS) -> FetchOnBase:
        """Ready to be fetched by callers that have the base's bytes."""
        raise NotImplementedError

    def at_level(self, level: int) -> ComputedTensor:
        """The same tensor read at a level; the same object for the same level."""
        raise NotImplementedError

    def exact_level(self, n_kept: int) -> int:
        """The least level at which the `n_kept` largest |deltas| are exact, and all others smaller or exact too."""
        raise NotImplementedError

    def ladder(self, top: int) -> tuple[int, ...]:
        """Levels up to `top`, each of which reads all that the one before it reads."""
        raise NotImplementedError

    def level_costs_bytes(self, level: int, stretches: int) -> NDArray[np.int64]:
        """`cost_bytes` at a level, of each `stretches` stretches of `cut_elements` that are fetched as one."""
        raise NotImplementedError

    def squared_errors(self, level: int) -> NDArray[np.float64]:
        """Return the squared delta that a level omits, for each stretch of `cut_elements`; level 0 reads nothing."""
        raise NotImplementedError


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
class Unchanged(Tensor):
    """A tensor that an adapter or a delta checkpoint does not touch: its delta is zero, and nothing is read."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    is_delta: bool = True
    nbytes: int = 0
    stored: tuple[TensorEntry, ...] = ()

    def cost_bytes(self, span: Span) -> int:
        return 0


Readable: TypeAlias = TensorEntry | ComputedTensor
Source: TypeAlias = TensorEntry | ComputedTensor | Unchanged


def files_of(sources: Iterable[Tensor]) -> set[Location]:
    """The files that reading these needs: of encoded ones also what they are encoded on."""
    files: set[Location] = set()
    for source in sources:
        files |= source.files
        if source.encoded_on is not None:
            files.add(source.encoded_on.file)
    return files


@dataclass(frozen=True, slots=True)
class AdapterAccount:
    """Counts of an adapter's modules: adapted, applied, replaced by modules that it stores in full.

    `left_over` are the names of what its base lacks; `trained_on` is the base that its configuration names.
    """

    n_modules: int
    n_applied: int
    n_saved: int
    left_over: tuple[str, ...] = ()
    trained_on: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file that tensors are read from: `location` is where it lies, `id` is how records name and recognise it."""

    location: Location
    id: FileId


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Named tensors on storage. `tensors` is in storage order: file by file in order, by offset inside a file.

    `root` is the directory, or the directory that holds a bare file; `sidecars` are the names (relative to `root`,
    sorted) of configuration, tokenizer and chat-template files that belong to the model. A bare file has none.
    `components` maps each folder below `root` that holds weights of the model to the stem of its weight files; their
    tensors are named `folder/name`.
    """

    path: Location
    root: Location
    tensors: Mapping[str, Readable]
    files: tuple[CheckpointFile, ...]
    sidecars: tuple[str, ...]
    kind: CheckpointKind = CheckpointKind.FULL
    encoded: PackedIndex | None = None  # of one whose tensors are encoded beside a base's
    content_id: str | None = None  # see `checkpoints.content_id`; None where it is unknown without reading tensors
    adapters: tuple[AdapterAccount, ...] = ()  # of an adapter, or of weights with adapters applied
    components: Mapping[str, str] = field(default_factory=dict)
    quantisation: str = ""  # the scheme in which its weights are stored, where they are read as numbers
    is_untied: bool = False  # an adapter gave it an output head of its own, which its configuration does not know of
    ignored: tuple[str, ...] = ()  # files in its folder that hold weights, which are none of its tensors
    resized_by: Location | None = None  # the adapter that stores its embedding with another number of rows

    @property
    def file_ids(self) -> tuple[FileId, ...]:
        """Its files as records keep them."""
        return tuple(file.id for file in self.files)

    @property
    def fingerprints(self) -> list[list[str | int]]:
        """What a digest takes of its files, to notice that one is not what it was."""
        return [[file.name, file.size_bytes, file.version, file.header_digest] for file in self.file_ids]

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


def block_costs_bytes(
    offset_B: NDArray[np.int64],
    itemsize_B: NDArray[np.int64],
    first_B: NDArray[np.int64],
    n_B: NDArray[np.int64],
    granularity_B: NDArray[np.int64],
) -> NDArray[np.int64]:
    """`TensorEntry.cost_bytes` of many blocks.

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


FetchOnBase: TypeAlias = Callable[[Span, BaseBytes, NDArray[np.uint8], Purpose], None]
"""A `Fetch` that is given the base's stored bytes of the same elements, in the base's dtype."""
