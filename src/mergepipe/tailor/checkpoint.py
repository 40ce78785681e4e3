"""The common model of a training checkpoint: every parameter's every state as an ordered list of byte ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from threading import Lock
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.open_files import allow_open_files
from mergepipe.core.blocks import DType, Span, element_count
from mergepipe.errors import CorruptError
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact
from mergepipe.tailor.formats.pickle_node import PicklePath
from mergepipe.tailor.selection import ModelUnits

# --- the common model of a training checkpoint: every parameter's every state as an ordered list of byte ranges ---


FP32 = "fp32"  # the master weight an optimizer updates
WEIGHT = "weight"  # the module's own weight, in its training dtype
EXPORT = "export"  # a copy of the weights for other programs, which training does not read
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"


class Framework(StrEnum):
    """The framework that resumes from the checkpoint."""

    DEEPSPEED = "deepspeed"
    TRANSFORMERS = "transformers"
    TORCH = "torch"


class Packing(StrEnum):
    """The form of a piece's bytes: the elements themselves, or a `torch.save` archive that holds just them."""

    RAW = "raw"
    TORCH_ZIP = "torch-zip"


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` bytes at `offset` of `file` that hold the elements `span` of one flattened parameter."""

    file: Location
    offset: int
    nbytes: int
    span: Span
    packing: Packing = Packing.RAW


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
            if piece.packing is Packing.RAW and piece.nbytes != piece.span.n_elements * self.dtype.itemsize:
                raise ValueError(f"{self.parameter} {self.kind}: {piece.span} is not {piece.nbytes} bytes")
            end = piece.span.stop

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

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


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """A training checkpoint of any format; `format` is the name of one in `formats.registry`.

    `path` is as given; `root` is the directory of the optimizer files. `parameters` maps names to shapes, aliases
    left out. `flat_groups` are the parameters of each flat buffer in order (ZeRO only). `missing` says in words what
    a complete checkpoint would hold and this one does not. `has_state` says whether training can resume at its step:
    only a partial checkpoint (`is_partial`) may lack scheduler, random states and the like. `untrained` are weights of
    a model that its optimizer does not know and that are no `parameters`: buffers and frozen ones of ZeRO-3. `lender`
    is the directory of configuration and tokenizer, where that is not `path`.
    """

    path: Location
    root: Location
    format: str
    framework: Framework
    stage: int | None
    world_size: int
    step: int
    units: ModelUnits
    parameters: Mapping[str, tuple[int, ...]]
    states: Mapping[tuple[str, str], StoredState]
    steps: tuple[AdamStep, ...]
    flat_groups: tuple[tuple[str, ...], ...] = ()
    missing: tuple[str, ...] = ()
    has_state: bool = True
    is_partial: bool = False
    untrained: Mapping[str, StoredState] = field(default_factory=dict)
    lender: Location | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state it holds, in order of first appearance."""
        return tuple(dict.fromkeys(kind for _, kind in self.states))


# --- tell why parts of one checkpoint cannot stand in for parts of another ---


_MAX_NAMED = 3


def differences(first: TrainingCheckpoint, other: TrainingCheckpoint) -> Iterator[str]:
    """Yield why parts of `other` cannot stand in for parts of `first`; nothing when they can."""
    for what, a, b in (
        ("format", first.format, other.format),
        ("framework", first.framework.value, other.framework.value),
        ("ZeRO stage", first.stage, other.stage),
        ("world size", first.world_size, other.world_size),
    ):
        if a != b:
            yield f"{_pair(first, other)}: {what} {a} and {b}"
    yield from _parameter_differences(first, other)
    yield from _state_differences(first, other)
    if first.flat_groups != other.flat_groups and first.parameters == other.parameters:
        yield f"{_pair(first, other)}: parameters are grouped or ordered differently in the flat buffers"
    if first.units.tied != other.units.tied:
        yield f"{_pair(first, other)}: different tied parameters"


def _pair(first: TrainingCheckpoint, other: TrainingCheckpoint) -> str:
    return f"{first.path} and {other.path}"


def _parameter_differences(first: TrainingCheckpoint, other: TrainingCheckpoint) -> Iterator[str]:
    for a, b in ((first, other), (other, first)):
        absent = [name for name in a.parameters if name not in b.parameters]
        if absent:
            yield f"{b.path} lacks {_named(absent)}, which {a.path} has"
    both = [name for name in first.parameters if name in other.parameters]
    reshaped = [name for name in both if first.parameters[name] != other.parameters[name]]
    if reshaped:
        yield f"{_pair(first, other)}: different shapes of {_named(reshaped)}"


def _state_differences(first: TrainingCheckpoint, other: TrainingCheckpoint) -> Iterator[str]:
    kinds = set(first.kinds) ^ set(other.kinds)
    if kinds:
        yield f"{_pair(first, other)}: only one has {', '.join(sorted(kinds))}"
    recast = [
        f"{kind} of {name}"
        for (name, kind), state in first.states.items()
        if (name, kind) in other.states and other.states[(name, kind)].dtype != state.dtype
    ]
    if recast:
        yield f"{_pair(first, other)}: different dtypes of {_named(recast)}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


# --- reads elements of stored states, across their pieces, whatever file they lie in ---


class StateReader:
    """Reads spans of raw states from any number of threads, charged as analysis. A context manager.

    Every file stays open until the end: the limit on open files is raised as far as it goes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: dict[Location, RangeFile] = {}
        self._lock = Lock()

    def __enter__(self) -> StateReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; nothing may be read any more."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            self._files.clear()

    def read(self, state: StoredState, *spans: Span) -> NDArray[np.uint8]:
        """Return the bytes of elements of `state`, those of one span after those of another."""
        out = np.empty(sum(span.n_elements for span in spans) * state.dtype.itemsize, np.uint8)
        start = 0
        for span in spans:
            stop = start + span.n_elements * state.dtype.itemsize
            self._read(state, span, out[start:stop])
            start = stop
        return out

    def _read(self, state: StoredState, span: Span, out: NDArray[np.uint8]) -> None:
        itemsize, done = state.dtype.itemsize, 0
        place = bisect_right(state.pieces, span.start, key=lambda piece: piece.span.stop)
        while place < len(state.pieces) and (piece := state.pieces[place]).span.start < span.stop:
            place += 1
            first, last = max(piece.span.start, span.start), min(piece.span.stop, span.stop)
            at, nbytes = (first - span.start) * itemsize, (last - first) * itemsize
            offset = piece.offset + (first - piece.span.start) * itemsize
            read_exact(self._open(piece.file), offset, offset + nbytes, Purpose.ANALYSIS, out[at : at + nbytes])
            done += nbytes
        if done != out.size:
            raise CorruptError.of("checkpoint.damaged", state.parameter, f"{state.kind} is saved in part only")

    def _open(self, path: Location) -> RangeFile:
        file = self._files.get(path)
        if file is not None:
            return file
        with self._lock:
            if path not in self._files:
                allow_open_files(len(self._files))
                self._files[path] = self._store.open(path)
            return self._files[path]
