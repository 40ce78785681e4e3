"""Partial checkpoints of our own, written while training: some units of a model, per rank, with a manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar, NoReturn, TypeVar

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.directory import is_plain_name, stat_regular
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.core.blocks import DTYPES, DType, Span, element_count
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError, UnsupportedError, did_you_mean
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.limits import PARTIAL_MANIFEST_BYTES
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import AdamStep, Framework, Piece, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import TrainingFormat
from mergepipe.tailor.formats.pickle_node import read_scalar
from mergepipe.tailor.selection import ModelUnits, model_units

# --- the manifest of a partial checkpoint: which states of which parameters its shard files hold, as frozen values ---


MANIFEST_NAME = "mergepipe-partial.json"
MANIFEST_VERSION = 1
_CODE = "checkpoint.damaged"
_KEYS = (
    "mergepipe_partial", "origin", "framework", "stage", "world_size", "step", "parameters", "tied", "flat_groups",
    "units", "counters", "options", "shards",
)  # fmt: skip
_MAX_COUNT = 2**62

_Value = TypeVar("_Value")
_Name = TypeVar("_Name", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One tensor of a shard file: the elements `span` of the flattened `parameter`'s state `kind`."""

    parameter: str
    kind: str
    dtype: DType
    span: Span

    @property
    def key(self) -> str:
        """The name in the safetensors file."""
        return f"{self.kind}/{self.parameter}"

    @property
    def nbytes(self) -> int:
        return self.span.n_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file that one rank wrote: safetensors of `tensors`, and one element `step/I` for each counter I it holds."""

    name: str
    size_bytes: int
    tensors: tuple[ShardTensor, ...]
    counters: tuple[int, ...]


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
    stage: int | None
    world_size: int
    step: int
    parameters: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    flat_groups: tuple[tuple[str, ...], ...]
    units: tuple[str, ...]
    counters: tuple[tuple[str, ...], ...]
    options: tuple[Mapping[str, JsonValue], ...]
    shards: tuple[ShardFile, ...]

    def to_json(self) -> bytes:
        """The manifest file. Law: `parse_manifest(m.to_json(), where) == m`."""
        document = {
            "mergepipe_partial": MANIFEST_VERSION,
            "origin": self.origin,
            "framework": self.framework.value,
            "stage": self.stage,
            "world_size": self.world_size,
            "step": self.step,
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "tied": dict(self.tied),
            "flat_groups": [list(group) for group in self.flat_groups],
            "units": list(self.units),
            "counters": [list(names) for names in self.counters],
            "options": [dict(option) for option in self.options],
            "shards": [_shard_json(shard) for shard in self.shards],
        }
        return (json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _shard_json(shard: ShardFile) -> dict[str, object]:
    return {
        "file": shard.name,
        "bytes": shard.size_bytes,
        "counters": list(shard.counters),
        "tensors": [[t.parameter, t.kind, t.dtype.name, t.span.start, t.span.stop] for t in shard.tensors],
    }


def parse_manifest(raw: bytes, where: Location) -> PartialManifest:
    """Read a manifest strictly: what it names must be consistent within it."""
    document = parse_object(raw, where=where, code=_CODE)
    _check_version(document, where)
    fields = _Fields(where, document)
    parameters = {name: fields.shape(value, name) for name, value in fields.mapping("parameters").items()}
    names = frozenset(parameters)
    counters = fields.listed("counters", lambda value: fields.names(value, "counters", names))
    manifest = PartialManifest(
        origin=fields.text(document.get("origin"), "origin"),
        framework=fields.member("framework", Framework),
        stage=None if document.get("stage") is None else fields.count("stage"),
        world_size=fields.count("world_size"),
        step=fields.count("step"),
        parameters=MappingProxyType(parameters),
        tied=MappingProxyType({alias: fields.text(v, "tied", names) for alias, v in fields.mapping("tied").items()}),
        flat_groups=fields.listed("flat_groups", lambda value: fields.names(value, "flat_groups", names)),
        units=fields.listed("units", lambda value: fields.text(value, "units")),
        counters=counters,
        options=fields.listed("options", lambda value: MappingProxyType(fields.object(value, "options"))),
        shards=fields.listed("shards", lambda value: _shard(where, value, parameters, len(counters))),
    )
    if manifest.world_size < 1:
        fields.refuse("'world_size' is 0")
    if len({shard.name for shard in manifest.shards}) != len(manifest.shards):
        fields.refuse("two shards have one name")
    return manifest


def _check_version(document: Mapping[str, JsonValue], where: Location) -> None:
    version = document.get("mergepipe_partial")
    if version != MANIFEST_VERSION or isinstance(version, bool):
        raise UnsupportedError.of(
            "format.version", where, f"manifest version {shown(version)}; this version reads {MANIFEST_VERSION}"
        )
    unknown = [key for key in document if key not in _KEYS]
    if unknown:
        hint = did_you_mean(unknown[0][:40], _KEYS)
        raise CorruptError.of(_CODE, where, f"has an unknown key {shown(unknown[0])}", hint)


def _shard(where: Location, value: JsonValue, parameters: Mapping[str, tuple[int, ...]], n_counters: int) -> ShardFile:
    fields = _Fields(where, _Fields(where, {}).object(value, "shards"))
    name = fields.text(fields.document.get("file"), "file")
    if not is_plain_name(name) or not name.endswith(".safetensors"):
        fields.refuse(f"the shard {shown(name)} is not a safetensors file in the manifest's folder")
    tensors = fields.listed("tensors", lambda row: _tensor(fields, row, parameters))
    counters = fields.listed("counters", lambda number: fields.integer(number, "counters"))
    if len({t.key for t in tensors}) != len(tensors) or len(set(counters)) != len(counters):
        fields.refuse(f"the shard {shown(name)} lists one tensor twice")
    if any(number >= n_counters for number in counters):
        fields.refuse(f"the shard {shown(name)} holds a step counter that is not described")
    return ShardFile(name, fields.count("bytes"), tensors, counters)


def _tensor(fields: _Fields, row: JsonValue, parameters: Mapping[str, tuple[int, ...]]) -> ShardTensor:
    if not isinstance(row, list) or len(row) != len(("parameter", "kind", "dtype", "start", "stop")):
        fields.refuse(f"a tensor is [parameter, kind, dtype, start, stop], found {shown(row)}")
    parameter, kind, dtype = (fields.text(part, "tensors") for part in row[:3])
    start, stop = (fields.integer(part, "tensors") for part in row[3:])
    if parameter not in parameters:
        fields.refuse(f"a tensor of the unknown parameter {shown(parameter)}")
    if dtype not in DTYPES or not kind or "/" in kind or kind == "step":
        fields.refuse(f"{shown(parameter)}: kind {shown(kind)} of dtype {shown(dtype)}")
    if not start < stop <= element_count(parameters[parameter]):
        fields.refuse(f"{shown(parameter)} of shape {parameters[parameter]} has no elements [{start}, {stop})")
    return ShardTensor(parameter, kind, DTYPES[dtype], Span(start, stop))


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to one JSON object of the manifest."""

    where: Location
    document: Mapping[str, JsonValue]

    def refuse(self, message: str) -> NoReturn:
        raise CorruptError.of(_CODE, self.where, message)

    def integer(self, value: JsonValue, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_COUNT:
            self.refuse(f"'{key}': a count is needed, found {shown(value)}")
        return value

    def count(self, key: str) -> int:
        return self.integer(self.document.get(key), key)

    def text(self, value: JsonValue, key: str, allowed: frozenset[str] | None = None) -> str:
        if not isinstance(value, str) or (allowed is not None and value not in allowed):
            what = "a name" if allowed is None else "a parameter of the model"
            self.refuse(f"'{key}': {what} is needed, found {shown(value)}")
        return value

    def object(self, value: JsonValue, key: str) -> dict[str, JsonValue]:
        if not isinstance(value, dict):
            self.refuse(f"'{key}': an object is needed, found {shown(value)}")
        return value

    def mapping(self, key: str) -> dict[str, JsonValue]:
        return self.object(self.document.get(key), key)

    def listed(self, key: str, read: Callable[[JsonValue], _Value]) -> tuple[_Value, ...]:
        value = self.document.get(key)
        if not isinstance(value, list):
            self.refuse(f"'{key}': a list is needed, found {shown(value)}")
        return tuple(read(item) for item in value)

    def names(self, value: JsonValue, key: str, allowed: frozenset[str]) -> tuple[str, ...]:
        if not isinstance(value, list):
            self.refuse(f"'{key}': a list of names is needed, found {shown(value)}")
        return tuple(self.text(item, key, allowed) for item in value)

    def shape(self, value: JsonValue, name: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.refuse(f"the shape of {shown(name)} is {shown(value)}")
        shape = tuple(self.integer(length, "parameters") for length in value)
        if element_count(shape) >= _MAX_COUNT:
            self.refuse(f"the shape of {shown(name)} overflows")
        return shape

    def member(self, key: str, kind: type[_Name]) -> _Name:
        value = self.document.get(key)
        names: Iterable[str] = tuple(member.value for member in kind)
        if not isinstance(value, str) or value not in names:
            self.refuse(f"'{key}': one of {', '.join(names)} is needed, found {shown(value)}")
        return kind(value)


# --- partial checkpoints of our own, written while training: some units of a model, per rank, with a manifest ---


_COUNTER_DTYPE = DTYPES["F32"]

_Entries = dict[str, TensorEntry]


def read_partial_manifest(store: Store, folder: Location) -> PartialManifest:
    """Read and check the manifest alone."""
    path = folder / MANIFEST_NAME
    return parse_manifest(store.read_small(path, PARTIAL_MANIFEST_BYTES), path)


def read_partial(store: Store, folder: Location) -> TrainingCheckpoint:
    """Read a partial checkpoint; of tensors, only step counters are read.

    It has the format of the run it comes from, so that it can be compared and combined with full checkpoints of it;
    what was not saved is listed as `missing`.
    """
    manifest = read_partial_manifest(store, folder)
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
        states=MappingProxyType(states),
        steps=tuple(_steps(store, manifest, entries)),
        flat_groups=manifest.flat_groups,
        missing=tuple(_missing(folder, manifest, units, states)),
        is_partial=True,
    )


def _entries(store: Store, folder: Location, shard: ShardFile) -> _Entries:
    """The tensors of one shard file, which must be exactly those the manifest lists."""
    path = folder / shard.name
    status = stat_regular(store, folder, shard.name)
    if status is None or status.size_bytes != shard.size_bytes:
        size = "is not there" if status is None else f"has {status.size_bytes} bytes"
        raise CorruptError.of(
            "checkpoint.damaged", path, f"{size}; the manifest says {shard.size_bytes} bytes", "copy it again"
        )
    entries = {entry.name: entry for entry in read_header(store, path).entries}
    listed = {t.key: (t.dtype, t.span.n_elements) for t in shard.tensors}
    listed |= {f"step/{number}": (_COUNTER_DTYPE, 1) for number in shard.counters}
    held = {name: (entry.dtype, entry.n_elements) for name, entry in entries.items()}
    if held != listed:
        wrong = min(name for name in held.keys() | listed.keys() if held.get(name) != listed.get(name))
        raise CorruptError.of("checkpoint.damaged", path, f"{shown(wrong)} is not as the manifest describes it")
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
            raise CorruptError.of("checkpoint.damaged", pieces[0].file, message)
        yield StoredState(parameter, kind, parts[0][0].dtype, manifest.parameters[parameter], tuple(pieces))


def _steps(store: Store, manifest: PartialManifest, entries: dict[str, _Entries]) -> Iterator[AdamStep]:
    """Each step counter, the same in every shard that holds it."""
    for number, parameters in enumerate(manifest.counters):
        cells = [entries[s.name][f"step/{number}"] for s in manifest.shards if number in s.counters]
        values = {read_scalar(store, cell.file, cell.offset, cell.dtype) for cell in cells}
        if len(values) != 1:
            path = cells[0].file if cells else MANIFEST_NAME
            raise CorruptError.of("checkpoint.damaged", path, f"step counter {number} has the values {sorted(values)}")
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
        raise CorruptError.of("checkpoint.damaged", path, f"the model has no unit {shown(unknown[0])}")
    saved = {parameter for unit in manifest.units for parameter in by_name[unit]}
    outside = [name for name, _ in states if name not in saved]
    if outside:
        message = f"{shown(outside[0])} is in no unit that was saved"
        raise CorruptError.of("checkpoint.damaged", folder / MANIFEST_NAME, message)
    yield from (f"{unit}: not saved" for unit in by_name if unit not in manifest.units)
    yield from (f"part of {state.kind} of {state.parameter}" for state in states.values() if state.gaps)
    stateless = saved - {name for name, _ in states}
    yield from (f"every state of {name}" for name in sorted(stateless) if 0 not in manifest.parameters[name])


@dataclass(frozen=True, slots=True)
class PartialKind:
    """Partial checkpoints of our own; each has the format of the run it comes from, which is one of `formats`."""

    formats: tuple[TrainingFormat, ...]
    looked_for: ClassVar[str] = f"{MANIFEST_NAME} (partial checkpoint)"

    def recognise(self, store: Store, path: Location) -> bool:
        """Recognise the format by the manifest."""
        return is_file(store, path / MANIFEST_NAME)

    def open(self, store: Store, path: Location, home: Location) -> TrainingCheckpoint:
        """See `read_partial`; it knows whether its framework could resume at its step, if it were whole."""
        partial = read_partial(store, path)
        of_run = next((candidate for candidate in self.formats if candidate.name == partial.format), None)
        if of_run is None:
            names = ", ".join(candidate.name for candidate in self.formats)
            message = f"'origin': one of {names} is needed, found {shown(partial.format)}"
            raise CorruptError.of("checkpoint.damaged", path / MANIFEST_NAME, message)
        has_state = partial.framework in of_run.partial_frameworks and is_file(store, path / of_run.state_file)
        return replace(partial, has_state=has_state)
