"""Partial checkpoints of our own, written while training: some units of a model, per rank, with a manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Annotated, Final, NamedTuple

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.directory import is_plain_name, stat_regular
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.core.blocks import DTYPES, DType, Span, element_count
from mergepipe.core.records import AsText, RecordFormat, Size, Within
from mergepipe.core.strict_json import shown
from mergepipe.errors import damaged
from mergepipe.snapshots.manifest import MANIFEST_FORMAT_NAME, MANIFEST_VERSION
from mergepipe.storage.contract import PARTIAL_MANIFEST_BYTES, Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import AdamStep, Framework, Piece, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import TrainingFormat, read_scalar
from mergepipe.tailor.selection import ModelUnits, model_units

# --- the manifest of a partial checkpoint: which states of which parameters its shard files hold, as frozen values ---


MANIFEST_NAME = "mergepipe-partial.json"
_MOST_ELEMENTS = 2**62


class ShardTensor(NamedTuple):
    """One tensor of a shard file: the elements `[start, stop)` of the flattened `parameter`'s state `kind`."""

    parameter: str
    kind: str
    dtype: Annotated[DType, AsText(lambda dtype: dtype.name, DTYPES.__getitem__)]
    start: Size
    stop: Size

    @property
    def key(self) -> str:
        """The name in the safetensors file."""
        return f"{self.kind}/{self.parameter}"

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file that one rank wrote: safetensors of `tensors`, and one element `step/I` for each counter I it holds."""

    name: str
    size_bytes: Size
    tensors: tuple[ShardTensor, ...]
    counters: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not is_plain_name(self.name) or not self.name.endswith(".safetensors"):
            raise ValueError(f"the shard {shown(self.name)} is not a safetensors file in the manifest's folder")
        if len({t.key for t in self.tensors}) != len(self.tensors) or len({*self.counters}) != len(self.counters):
            raise ValueError(f"the shard {shown(self.name)} lists one tensor twice")


@dataclass(frozen=True, slots=True)
class PartialManifest:
    """A partial checkpoint's layout.

    `origin` (the name of a training format), `framework`, `stage`, `world_size` and `flat_groups` are those of a full
    checkpoint of the same run, so that parts of both can be compared. `parameters` are all of the model's, `units` what
    was saved. `counters` lists the saved parameters each step counter serves; `options` are the optimizer's scalar
    options a parameter group.
    """

    origin: str
    framework: Framework
    stage: Size | None
    world_size: Annotated[int, Within(1)]
    step: Size
    parameters: Mapping[str, tuple[Size, ...]]
    tied: Mapping[str, str]
    flat_groups: tuple[tuple[str, ...], ...]
    units: tuple[str, ...]
    counters: tuple[tuple[str, ...], ...]
    options: tuple[Mapping[str, object], ...]
    shards: tuple[ShardFile, ...]

    def __post_init__(self) -> None:
        for name, shape in self.parameters.items():
            if element_count(shape) >= _MOST_ELEMENTS:
                raise ValueError(f"the shape of {shown(name)} overflows")
        named = {"tied": self.tied.values(), "flat_groups": chain(*self.flat_groups), "counters": chain(*self.counters)}
        for key, names in named.items():
            unknown = next((name for name in names if name not in self.parameters), None)
            if unknown is not None:
                raise ValueError(f"'{key}' names {shown(unknown)}, which is no parameter of the model")
        if len({shard.name for shard in self.shards}) != len(self.shards):
            raise ValueError("two shards have one name")
        for shard in self.shards:
            if any(number >= len(self.counters) for number in shard.counters):
                raise ValueError(f"the shard {shown(shard.name)} holds a step counter that is not described")
            for tensor in shard.tensors:
                self._check(tensor)

    def _check(self, tensor: ShardTensor) -> None:
        shape = self.parameters.get(tensor.parameter)
        if shape is None:
            raise ValueError(f"a tensor of the unknown parameter {shown(tensor.parameter)}")
        if not tensor.kind or "/" in tensor.kind or tensor.kind == "step":
            raise ValueError(f"{shown(tensor.parameter)}: a state of kind {shown(tensor.kind)}")
        if not tensor.start < tensor.stop <= element_count(shape):
            elements = f"[{tensor.start}, {tensor.stop})"
            raise ValueError(f"{shown(tensor.parameter)} of shape {shape} has no elements {elements}")


PARTIAL_FORMAT: Final = RecordFormat(
    MANIFEST_FORMAT_NAME, MANIFEST_VERSION, PartialManifest, "copy it again, or save again", variant="partial"
)


# --- partial checkpoints of our own, written while training: some units of a model, per rank, with a manifest ---


_COUNTER_DTYPE = DTYPES["F32"]

_Entries = dict[str, TensorEntry]


def read_partial_manifest(store: Store, folder: Location) -> PartialManifest:
    """Read and check the manifest alone."""
    path = folder / MANIFEST_NAME
    return PARTIAL_FORMAT.parse(store.read_small(path, PARTIAL_MANIFEST_BYTES), path)


def read_partial(store: Store, folder: Location, formats: Sequence[TrainingFormat]) -> TrainingCheckpoint:
    """Read a partial checkpoint; of tensors, only step counters are read.

    It has the format of the run it comes from, one of `formats`, so that it can be compared and combined with full
    checkpoints of it; what was not saved is listed as `missing`. It knows whether its framework could resume at its
    step, if it were whole.
    """
    manifest = read_partial_manifest(store, folder)
    of_run = next((candidate for candidate in formats if candidate.name == manifest.origin), None)
    if of_run is None:
        names = ", ".join(candidate.name for candidate in formats)
        message = f"'origin': one of {names} is needed, found {shown(manifest.origin)}"
        raise damaged(folder / MANIFEST_NAME, message)
    entries = {shard.name: _entries(store, folder, shard) for shard in manifest.shards}
    units = model_units(manifest.parameters, manifest.tied)
    states = {(s.parameter, s.kind): s for s in _states(manifest, entries)}
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=manifest.origin,
        framework=manifest.framework,
        stage=manifest.stage,
        world_size=manifest.world_size,
        step=manifest.step,
        units=units,
        parameters=manifest.parameters,
        states=states,
        steps=tuple(_steps(store, manifest, entries)),
        flat_groups=manifest.flat_groups,
        missing=tuple(_missing(folder, manifest, units, states)),
        has_state=manifest.framework in of_run.partial_frameworks and is_file(store, folder / of_run.state_file),
        is_partial=True,
    )


def _entries(store: Store, folder: Location, shard: ShardFile) -> _Entries:
    """The tensors of one shard file, which must be exactly those the manifest lists."""
    path = folder / shard.name
    status = stat_regular(store, folder, shard.name)
    if status is None or status.size_bytes != shard.size_bytes:
        size = "is not there" if status is None else f"has {status.size_bytes} bytes"
        raise damaged(path, f"{size}; the manifest says {shard.size_bytes} bytes", "copy it again")
    entries = {entry.name: entry for entry in read_header(store, path).entries}
    listed = {t.key: (t.dtype, t.span.n_elements) for t in shard.tensors}
    listed |= {f"step/{number}": (_COUNTER_DTYPE, 1) for number in shard.counters}
    held = {name: (entry.dtype, entry.n_elements) for name, entry in entries.items()}
    if held != listed:
        wrong = min(name for name in held.keys() | listed.keys() if held.get(name) != listed.get(name))
        raise damaged(path, f"{shown(wrong)} does not match the manifest")
    return entries


def _states(manifest: PartialManifest, entries: dict[str, _Entries]) -> Iterator[StoredState]:
    """Every state, its pieces joined over the shards in the order of their elements."""
    parts_of_state: dict[tuple[str, str], list[tuple[ShardTensor, Piece]]] = {}
    for shard in manifest.shards:
        for tensor in shard.tensors:
            entry = entries[shard.name][tensor.key]
            piece = Piece(entry.file, entry.offset, entry.nbytes, tensor.span)
            parts_of_state.setdefault((tensor.parameter, tensor.kind), []).append((tensor, piece))
    for (parameter, kind), parts in parts_of_state.items():
        pieces = sorted((piece for _, piece in parts), key=lambda piece: piece.span.start)
        overlap = any(a.span.stop > b.span.start for a, b in pairwise(pieces))
        if overlap or len({tensor.dtype for tensor, _ in parts}) > 1:
            message = f"{kind} of {shown(parameter)}: shards overlap or have different dtypes"
            raise damaged(pieces[0].file, message)
        yield StoredState(parameter, kind, parts[0][0].dtype, manifest.parameters[parameter], tuple(pieces))


def _steps(store: Store, manifest: PartialManifest, entries: dict[str, _Entries]) -> Iterator[AdamStep]:
    """Each step counter, the same in every shard that holds it."""
    for number, parameters in enumerate(manifest.counters):
        cells = [entries[s.name][f"step/{number}"] for s in manifest.shards if number in s.counters]
        values = {read_scalar(store.read_metadata, cell.file, cell.offset, cell.dtype) for cell in cells}
        if len(values) != 1:
            path = cells[0].file if cells else MANIFEST_NAME
            raise damaged(path, f"step counter {number} has the values {sorted(values)}")
        pieces = tuple(Piece(cell.file, cell.offset, cell.nbytes, Span(0, 1)) for cell in cells)
        yield AdamStep(values.pop(), parameters, _COUNTER_DTYPE, pieces)


def _missing(
    folder: Location, manifest: PartialManifest, units: ModelUnits, states: dict[tuple[str, str], StoredState]
) -> Iterator[str]:
    """Units that were not saved, and states with gaps in those that were."""
    by_name = {str(unit): names for unit, names in units.parameters.items()}
    unknown = [name for name in manifest.units if name not in by_name]
    if unknown:
        path = folder / MANIFEST_NAME
        raise damaged(path, f"the model has no unit {shown(unknown[0])}")
    saved = {parameter for unit in manifest.units for parameter in by_name[unit]}
    outside = [name for name, _ in states if name not in saved]
    if outside:
        message = f"{shown(outside[0])} is in no unit that was saved"
        raise damaged(folder / MANIFEST_NAME, message)
    yield from (f"{unit}: not saved" for unit in by_name if unit not in manifest.units)
    yield from (f"part of {state.kind} of {state.parameter}" for state in states.values() if state.gaps)
    stateless = saved - {name for name, _ in states}
    yield from (f"every state of {name}" for name in sorted(stateless) if 0 not in manifest.parameters[name])
