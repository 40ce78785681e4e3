"""The manifest of a partial checkpoint: which states of which parameters its shard files hold, as frozen values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NoReturn, TypeVar

from mergepipe.checkpoints.contained_files import is_plain_name
from mergepipe.core.blocks import DTYPES, DType, Span, element_count
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError, UnsupportedError, did_you_mean
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import Framework

MANIFEST_NAME = "mergepipe-partial.json"
MANIFEST_VERSION = 1
_CODE = "tailor.partial"
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
    """Read a manifest strictly: what it names must be consistent within it.

    Raises:
        CorruptError: it contradicts itself or is no manifest; codes begin with `tailor.partial.`.
        UnsupportedError: another version's.
    """
    document = parse_object(raw, where=where, code=f"{_CODE}.not_json")
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
        fields.refuse("world", "'world_size' is 0")
    if len({shard.name for shard in manifest.shards}) != len(manifest.shards):
        fields.refuse("shards", "two shards have one name")
    return manifest


def _check_version(document: Mapping[str, JsonValue], where: Location) -> None:
    version = document.get("mergepipe_partial")
    if version != MANIFEST_VERSION or isinstance(version, bool):
        raise UnsupportedError.of(
            f"{_CODE}.version", where, f"manifest version {shown(version)}; this version reads {MANIFEST_VERSION}"
        )
    unknown = [key for key in document if key not in _KEYS]
    if unknown:
        hint = did_you_mean(unknown[0][:40], _KEYS)
        raise CorruptError.of(f"{_CODE}.key", where, f"has an unknown key {shown(unknown[0])}", hint)


def _shard(where: Location, value: JsonValue, parameters: Mapping[str, tuple[int, ...]], n_counters: int) -> ShardFile:
    fields = _Fields(where, _Fields(where, {}).object(value, "shards"))
    name = fields.text(fields.document.get("file"), "file")
    if not is_plain_name(name) or not name.endswith(".safetensors"):
        fields.refuse("file", f"the shard {shown(name)} is not a safetensors file beside the manifest")
    tensors = fields.listed("tensors", lambda row: _tensor(fields, row, parameters))
    counters = fields.listed("counters", lambda number: fields.integer(number, "counters"))
    if len({t.key for t in tensors}) != len(tensors) or len(set(counters)) != len(counters):
        fields.refuse("twice", f"the shard {shown(name)} lists one tensor twice")
    if any(number >= n_counters for number in counters):
        fields.refuse("counters", f"the shard {shown(name)} holds a step counter that is not described")
    return ShardFile(name, fields.count("bytes"), tensors, counters)


def _tensor(fields: _Fields, row: JsonValue, parameters: Mapping[str, tuple[int, ...]]) -> ShardTensor:
    if not isinstance(row, list) or len(row) != len(("parameter", "kind", "dtype", "start", "stop")):
        fields.refuse("tensor", f"a tensor is [parameter, kind, dtype, start, stop], found {shown(row)}")
    parameter, kind, dtype = (fields.text(part, "tensors") for part in row[:3])
    start, stop = (fields.integer(part, "tensors") for part in row[3:])
    if parameter not in parameters:
        fields.refuse("parameter", f"a tensor of the unknown parameter {shown(parameter)}")
    if dtype not in DTYPES or not kind or "/" in kind or kind == "step":
        fields.refuse("tensor", f"{shown(parameter)}: kind {shown(kind)} of dtype {shown(dtype)}")
    if not start < stop <= element_count(parameters[parameter]):
        fields.refuse("span", f"{shown(parameter)} of shape {parameters[parameter]} has no elements [{start}, {stop})")
    return ShardTensor(parameter, kind, DTYPES[dtype], Span(start, stop))


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to one JSON object of the manifest."""

    where: Location
    document: Mapping[str, JsonValue]

    def refuse(self, what: str, message: str) -> NoReturn:
        raise CorruptError.of(f"{_CODE}.{what}", self.where, message)

    def integer(self, value: JsonValue, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_COUNT:
            self.refuse("count", f"'{key}': a count is needed, found {shown(value)}")
        return value

    def count(self, key: str) -> int:
        return self.integer(self.document.get(key), key)

    def text(self, value: JsonValue, key: str, allowed: frozenset[str] | None = None) -> str:
        if not isinstance(value, str) or (allowed is not None and value not in allowed):
            what = "a name" if allowed is None else "a parameter of the model"
            self.refuse("name", f"'{key}': {what} is needed, found {shown(value)}")
        return value

    def object(self, value: JsonValue, key: str) -> dict[str, JsonValue]:
        if not isinstance(value, dict):
            self.refuse("object", f"'{key}': an object is needed, found {shown(value)}")
        return value

    def mapping(self, key: str) -> dict[str, JsonValue]:
        return self.object(self.document.get(key), key)

    def listed(self, key: str, read: Callable[[JsonValue], _Value]) -> tuple[_Value, ...]:
        value = self.document.get(key)
        if not isinstance(value, list):
            self.refuse("list", f"'{key}': a list is needed, found {shown(value)}")
        return tuple(read(item) for item in value)

    def names(self, value: JsonValue, key: str, allowed: frozenset[str]) -> tuple[str, ...]:
        if not isinstance(value, list):
            self.refuse("list", f"'{key}': a list of names is needed, found {shown(value)}")
        return tuple(self.text(item, key, allowed) for item in value)

    def shape(self, value: JsonValue, name: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.refuse("shape", f"the shape of {shown(name)} is {shown(value)}")
        shape = tuple(self.integer(length, "parameters") for length in value)
        if element_count(shape) >= _MAX_COUNT:
            self.refuse("shape", f"the shape of {shown(name)} overflows")
        return shape

    def member(self, key: str, kind: type[_Name]) -> _Name:
        value = self.document.get(key)
        names: Iterable[str] = tuple(member.value for member in kind)
        if not isinstance(value, str) or value not in names:
            self.refuse("name", f"'{key}': one of {', '.join(names)} is needed, found {shown(value)}")
        return kind(value)
