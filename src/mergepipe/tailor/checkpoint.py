"""The common model of a training checkpoint: every parameter's every state as an ordered list of byte ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, ComputedTensor, Fetch, TensorEntry
from mergepipe.checkpoints.sharded_tensors import ShardedTensor, StoredTensor
from mergepipe.core.blocks import DType, Span, element_count
from mergepipe.core.units import first_names
from mergepipe.errors import damaged, unsupported
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import allow_open_files, read_exact
from mergepipe.tailor.selection import ModelUnits

FP32 = "fp32"  # the master weight an optimizer updates
WEIGHT = "weight"  # the module's own weight, in its training dtype
EXPORT = "export"  # a copy of the weights for other programs, which training does not read
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"

PicklePath: TypeAlias = tuple[str | int, ...]  # keys of mappings and places in lists, from the root on


_OPENED_AT_ONCE = 16
_PLANNED = Location.parse("planned")  # stands for what is being planned


class Framework(StrEnum):
    """The framework that resumes from the checkpoint."""

    DEEPSPEED = "deepspeed"
    TRANSFORMERS = "transformers"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class Strip:
    """`nbytes` bytes at `offset` of `file` that hold `width` elements of every row of a piece, row after row."""

    file: Location
    offset: int
    nbytes: int
    width: int


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` bytes at `offset` of `file` that hold the elements `span` of one flattened parameter.

    With `strips` the span is whole rows, of which each holds some columns, from left to right; the first one stands in
    `file`, `offset` and `nbytes`. If it `is_packed` the bytes are a `torch.save` archive that holds just them. Of a
    `computed` tensor they are the bytes at `offset` of what it computes, and `file` is the first that it reads.
    """

    file: Location
    offset: int
    nbytes: int
    span: Span
    is_packed: bool = False
    strips: tuple[Strip, ...] = ()
    computed: ComputedTensor | None = None

    @property
    def files(self) -> tuple[Location, ...]:
        """Return the files that hold its elements, or what they are computed of."""
        if self.computed is not None:
            return tuple(sorted(self.computed.files))
        return tuple(strip.file for strip in self.strips) or (self.file,)

    def part(self, span: Span, dtype: DType, start: int) -> Piece:
        """Return some of the elements of a raw piece as those from `start` on; of strips, whole rows."""
        done, moved = span.start - self.span.start, Span(start, start + span.n_elements)
        if not self.strips:
            itemsize = dtype.itemsize
            place = self.offset + done * itemsize
            return Piece(self.file, place, span.n_elements * itemsize, moved, computed=self.computed)
        row = sum(strip.width for strip in self.strips)
        if done % row or span.n_elements % row:
            raise unsupported(self.file, "is cut along columns, not into whole rows")
        above, rows = done // row, span.n_elements // row
        strips = tuple(
            Strip(s.file, s.offset + above * s.width * dtype.itemsize, rows * s.width * dtype.itemsize, s.width)
            for s in self.strips
        )
        return Piece(strips[0].file, strips[0].offset, strips[0].nbytes, moved, strips=strips)


def gather_strips(
    strips: Sequence[Strip],
    itemsize: int,
    first: int,
    n_elements: int,
    read: Callable[[Location, int, int], NDArray[np.uint8]],
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Put raw strips beside one another; return the bytes of elements from `first` on, in `out` if that is given.

    `read(file, start, stop)` returns bytes, of whole rows of one strip at once. `out` has room for all rows that the
    elements touch.
    """
    row = sum(strip.width for strip in strips)
    top, bottom = first // row, -(-(first + n_elements) // row)
    nbytes = (bottom - top) * row * itemsize
    rows = (np.empty(nbytes, np.uint8) if out is None else out[:nbytes]).reshape(-1, row * itemsize)
    column = 0
    for strip in strips:
        width = strip.width * itemsize
        raw = read(strip.file, strip.offset + top * width, strip.offset + bottom * width)
        rows[:, column : column + width] = raw.reshape(-1, width)
        column += width
    start = (first - top * row) * itemsize
    return rows.reshape(-1)[start : start + n_elements * itemsize]


@dataclass(frozen=True, slots=True)
class StoredState:
    """One state (`kind`) of one parameter. An optimizer's own states keep the optimizer's names, as `exp_avg`.

    Invariant: the spans of `pieces` are in order and disjoint; where they do not cover the parameter, `gaps` says so.
    """

    parameter: str
    kind: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        end, n_elements = 0, self.n_elements
        for piece in self.pieces:
            if piece.span.start < end or piece.span.stop > n_elements:
                raise ValueError(f"{self.parameter} {self.kind}: {piece.span} overlaps or lies outside")
            nbytes = sum(strip.nbytes for strip in piece.strips) or piece.nbytes
            if not piece.is_packed and nbytes != piece.span.n_elements * self.dtype.itemsize:
                raise ValueError(f"{self.parameter} {self.kind}: {piece.span} is not {piece.nbytes} bytes")
            end = piece.span.stop

    @classmethod
    def whole(cls, parameter: str, kind: str, stored: TensorEntry, shape: tuple[int, ...] | None = None) -> StoredState:
        """Make the state of which one stored tensor is all, in the shape of the parameter if that is another."""
        piece = Piece(stored.file, stored.offset, stored.nbytes, Span(0, stored.n_elements))
        shape = stored.shape if shape is None else shape
        return cls(parameter, kind, stored.dtype, shape, (piece,) if stored.n_elements else ())

    @classmethod
    def of_model(cls, model: Checkpoint, kind: str) -> dict[tuple[str, str], StoredState]:
        """Return the stored tensors of a model as states of one kind."""
        states = {}
        for tensor in model.tensors.values():
            if isinstance(tensor, ShardedTensor):
                states[tensor.name, kind] = cls.of_shards(kind, tensor)
                continue
            for entry in tensor.stored:
                states[entry.name, kind] = cls.whole(entry.name, kind, entry)
        return states

    @classmethod
    def of_shards(cls, kind: str, tensor: ShardedTensor) -> StoredState:
        """Make the state that the shards of a tensor hold."""
        pieces = []
        start = 0
        for band in tensor.bands:
            span = Span(start, start + sum(entry.n_elements for entry in band))
            strips: tuple[Strip, ...] = ()
            if len(band) > 1:
                strips = tuple(Strip(entry.file, entry.offset, entry.nbytes, entry.shape[1]) for entry in band)
            pieces.append(Piece(band[0].file, band[0].offset, band[0].nbytes, span, strips=strips))
            start = span.stop
        return cls(tensor.name, kind, tensor.dtype, tensor.shape, tuple(pieces))

    @classmethod
    def of_computed(cls, parameter: str, kind: str, tensor: ComputedTensor) -> StoredState:
        """Make the state whose elements are those that a tensor computes."""
        n_elements = tensor.n_elements
        nbytes = n_elements * tensor.dtype.itemsize
        piece = Piece(tensor.stored[0].file, 0, nbytes, Span(0, n_elements), computed=tensor)
        return cls(parameter, kind, tensor.dtype, tensor.shape, (piece,) if n_elements else ())

    def tensor(self, name: str) -> StoredTensor:
        """Return a raw state without gaps as a tensor of that name."""
        bands: list[tuple[TensorEntry, ...]] = []
        for piece in self.pieces:
            if not piece.strips:
                shape: tuple[int, ...] = (piece.span.n_elements,)
                bands.append((TensorEntry(name, self.dtype, shape, piece.file, piece.offset, piece.nbytes),))
                continue
            n_rows = piece.span.n_elements // sum(strip.width for strip in piece.strips)
            bands.append(tuple(
                TensorEntry(name, self.dtype, (n_rows, strip.width), strip.file, strip.offset, strip.nbytes)
                for strip in piece.strips
            ))  # fmt: skip
        if len(bands) == 1 and len(bands[0]) == 1:
            return replace(bands[0][0], shape=self.shape)
        return ShardedTensor(name, self.dtype, self.shape, tuple(bands))

    @classmethod
    def planned(cls, parameter: str, kind: str, dtype: DType, shape: tuple[int, ...]) -> StoredState:
        """Make the state that will be all of a file or a tensor whose content is being planned."""
        n_elements = element_count(shape)
        piece = Piece(_PLANNED, 0, n_elements * dtype.itemsize, Span(0, n_elements))
        return cls(parameter, kind, dtype, shape, (piece,) if n_elements else ())

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    def within(self, span: Span) -> Iterator[tuple[Piece, Span]]:
        """Yield the pieces that hold some of the elements `span`, in order, and which of them."""
        place = bisect_right(self.pieces, span.start, key=lambda piece: piece.span.stop)
        while place < len(self.pieces) and (piece := self.pieces[place]).span.start < span.stop:
            yield piece, Span(max(piece.span.start, span.start), min(piece.span.stop, span.stop))
            place += 1

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are there."""
        return sum(p.span.n_elements for p in self.pieces) * self.dtype.itemsize

    @property
    def gaps(self) -> tuple[Span, ...]:
        """Elements no piece holds."""
        edges = [Span(0, 0), *(p.span for p in self.pieces), Span(self.n_elements, self.n_elements)]
        return tuple(Span(a.stop, b.start) for a, b in pairwise(edges) if a.stop < b.start)


@dataclass(frozen=True, slots=True)
class AdamStep:
    """One step counter of the optimizer: its value and the parameters it serves.

    `cells` are the byte ranges that hold it, one a rank. Where the value is part of the pickle itself, `entries` are
    its places there: file and path.
    """

    value: float
    parameters: tuple[str, ...]
    dtype: DType
    cells: tuple[Piece, ...] = ()
    entries: tuple[tuple[Location, PicklePath], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCheckpoint:
    """A training checkpoint of any format; `format` is the name of one in `formats`.

    `path` is as given; `root` is the directory of the optimizer files. `parameters` maps names to shapes, aliases
    left out. `flat_groups` are the parameters of each flat buffer in order (ZeRO only). `missing` says in words what
    a complete checkpoint would hold and this one does not. A partial one (`is_partial`) may have scheduler, random
    states and the like: `has_state` says whether training can resume at its step. `untrained` are weights of a model
    that its optimizer does not know and that are no `parameters`: buffers and frozen ones of ZeRO-3. `lender` is the
    directory of configuration and tokenizer, where that is not `path`.
    """

    path: Location
    root: Location
    format: str
    framework: Framework = Framework.TORCH
    stage: int | None = None
    world_size: int = 1
    step: int
    units: ModelUnits
    parameters: Mapping[str, tuple[int, ...]]
    states: Mapping[tuple[str, str], StoredState]
    steps: tuple[AdamStep, ...] = ()
    flat_groups: tuple[tuple[str, ...], ...] = ()
    missing: tuple[str, ...] = ()
    has_state: bool = False
    is_partial: bool = False
    untrained: Mapping[str, StoredState] = field(default_factory=dict)
    lender: Location | None = None

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights by their stored names."""
        return {**self.parameters, **{name: state.shape for name, state in self.untrained.items()}}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state it holds, in order of first appearance."""
        return tuple(dict.fromkeys(kind for _, kind in self.states))


# --- tell why parts of one checkpoint cannot stand in for parts of another ---


def differences(first: TrainingCheckpoint, other: TrainingCheckpoint) -> Iterator[str]:
    """Yield why parts of `other` cannot stand in for parts of `first`; nothing when they can."""
    pair = f"{first.path} and {other.path}"
    for what, a, b in (
        ("format", first.format, other.format),
        ("framework", first.framework.value, other.framework.value),
        ("ZeRO stage", first.stage, other.stage),
        ("world size", first.world_size, other.world_size),
    ):
        if a != b:
            yield f"{pair}: {what} {a} and {b}"
    for one, another in ((first, other), (other, first)):
        absent = [name for name in one.parameters if name not in another.parameters]
        if absent:
            yield f"{another.path} lacks {first_names(absent)}, which {one.path} has"
    reshaped = [name for name, shape in first.parameters.items() if other.parameters.get(name, shape) != shape]
    if reshaped:
        yield f"{pair}: different shapes of {first_names(reshaped)}"
    kinds = set(first.kinds) ^ set(other.kinds)
    if kinds:
        yield f"{pair}: only one has {', '.join(sorted(kinds))}"
    states = (
        (f"{kind} of {name}", state, other.states.get((name, kind))) for (name, kind), state in first.states.items()
    )
    recast = [what for what, state, others in states if others is not None and others.dtype != state.dtype]
    if recast:
        yield f"{pair}: different dtypes of {first_names(recast)}"
    if first.flat_groups != other.flat_groups and first.parameters == other.parameters:
        yield f"{pair}: parameters are grouped or ordered differently in the flat buffers"
    if first.units.tied != other.units.tied:
        yield f"{pair}: different tied parameters"


class OpenedTensors:
    """Computed tensors that were opened last, with what they keep. Safe to use from many threads.

    Memory: what `_OPENED_AT_ONCE` of them keep, of an adapted weight its factors in float32.
    """

    def __init__(self) -> None:
        self._fetches: OrderedDict[int, tuple[ComputedTensor, Fetch]] = OrderedDict()
        self._lock = Lock()

    def opened(self, tensor: ComputedTensor, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return the fetch of a tensor, which reads through `files`."""
        with self._lock:
            if id(tensor) not in self._fetches:
                self._fetches[id(tensor)] = tensor, tensor.opened(files)
            self._fetches.move_to_end(id(tensor))
            while len(self._fetches) > _OPENED_AT_ONCE:
                self._fetches.popitem(last=False)
            return self._fetches[id(tensor)][1]


# --- reads elements of stored states, across their pieces, whatever file they lie in ---


class StateReader:
    """Reads spans of raw states from any number of threads, charged as analysis. A context manager.

    Every file stays open until the end: the limit on open files is raised as far as it goes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: dict[Location, RangeFile] = {}
        self._computing = OpenedTensors()
        self._lock = Lock()

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files; nothing may be read any more."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            self._files.clear()

    def read(self, state: StoredState, *spans: Span) -> NDArray[np.uint8]:
        """Return the bytes of `spans` of a state, concatenated."""
        return self.read_many([(state, spans)])[0]

    def read_many(self, requests: Sequence[tuple[StoredState, Sequence[Span]]]) -> list[NDArray[np.uint8]]:
        """Return the bytes of elements of several states; what follows one another in a file is one request to it."""
        results = []
        ranges: dict[Location, list[tuple[int, NDArray[np.uint8]]]] = defaultdict(list)
        for state, spans in requests:
            itemsize, start = state.dtype.itemsize, 0
            out = np.empty(sum(span.n_elements for span in spans) * itemsize, np.uint8)
            for piece, held in (pair for span in spans for pair in state.within(span)):
                ahead, part = held.start - piece.span.start, out[start : start + held.n_elements * itemsize]
                start += part.size
                if piece.computed is not None:
                    first = piece.offset // itemsize + ahead
                    self._compute(piece.computed, Span(first, first + held.n_elements), part)
                elif piece.strips:
                    part[:] = gather_strips(piece.strips, itemsize, ahead, held.n_elements, self._bytes)
                else:
                    ranges[piece.file].append((piece.offset + ahead * itemsize, part))
            if start != out.size:
                raise damaged(state.parameter, f"{state.kind} is saved in part only")
            results.append(out)
        for path, places in ranges.items():
            self._fill(path, sorted(places, key=lambda place: place[0]))
        return results

    def _compute(self, tensor: ComputedTensor, span: Span, out: NDArray[np.uint8]) -> None:
        files = {path: self._open(path) for path in tensor.files}
        self._computing.opened(tensor, files)(span, out, Purpose.ANALYSIS)

    def _fill(self, path: Location, places: Sequence[tuple[int, NDArray[np.uint8]]]) -> None:
        """Read ranges of one file, in the order of their offsets."""
        first = 0
        for number, (offset, out) in enumerate(places, 1):
            if number < len(places) and places[number][0] == offset + out.size:
                continue
            together = places[first:number]
            first = number
            if len(together) == 1:
                read_exact(self._open(path), offset, offset + out.size, Purpose.ANALYSIS, out)
                continue
            start = together[0][0]
            content = self._bytes(path, start, offset + out.size)
            for at, part in together:
                part[:] = content[at - start : at - start + part.size]

    def _bytes(self, path: Location, start: int, stop: int) -> NDArray[np.uint8]:
        return read_exact(self._open(path), start, stop, Purpose.ANALYSIS, np.empty(stop - start, np.uint8))

    def _open(self, path: Location) -> RangeFile:
        with self._lock:
            if path not in self._files:
                allow_open_files(len(self._files))
                self._files[path] = self._store.open(path)
            return self._files[path]
