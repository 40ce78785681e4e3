"""The account of what workers read for an output that is made in parts: the budget holds for the sum of them.

Who reads something first for a shard records `read-<i>.json` before it, with the bytes that the plan allots to the
shard: these shares together are what the plan costs. Who reads for it again, after a worker was killed or at the same
time, records `extra-<n>.json`, numbered in the order in which they were created: each counts those before it, and
reads only if the sum stays within the budget. After reading a record holds the exact bytes; of a killed worker the
share stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import reduce
from operator import add
from typing import TypeVar

from mergepipe.core.canonical_json import canonical_json
from mergepipe.core.json_fields import JsonFields
from mergepipe.snapshots.parts_place import PARTS_FORMAT, PartsPlace, parsed_record
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.owner import Owner, is_alive, this_process

E = TypeVar("E", bound=StrEnum)

_FIRST, _EXTRA = "read-", "extra-"
CONTENT_IDS = -1
"""Stands for a shard where the content ids that all shards need are read."""
PLANNING = -(1 << 30)
"""Stands for a shard where samples and indices were read to make the plan."""


def index_of(model: int) -> int:
    """Return what stands for a shard where the index of a packed model is read."""
    return -2 - model


class ReadingState(StrEnum):
    """The state of a reading."""

    OPEN = "open"  # its worker reads, or was killed
    SPENT = "spent"
    WITHDRAWN = "withdrawn"  # the budget did not allow it: nothing was read


@dataclass(frozen=True, slots=True)
class Reading:
    """One worker's bytes for one shard: at most `reserved_bytes` of experts; exactly `usage` once it is spent.

    It `forgives` what earlier readings for the same shard took: they do not count.
    """

    shard: int
    reserved_bytes: int
    owner: Owner
    part: str = ""
    state: ReadingState = ReadingState.OPEN
    usage: Usage = field(default_factory=Usage)
    forgives: bool = False

    @property
    def expert_bytes(self) -> int:
        """The expert bytes that it may have read."""
        match self.state:
            case ReadingState.OPEN:
                return self.reserved_bytes
            case ReadingState.SPENT:
                return self.usage.expert_bytes
            case ReadingState.WITHDRAWN:
                return 0

    def to_json(self) -> bytes:
        """Encode as a record. Law: `parse_reading(reading.to_json()) == reading`."""
        uses = sorted((file, purpose.value, nbytes) for (file, purpose), nbytes in self.usage.by_file.items())
        return canonical_json({
            "format": PARTS_FORMAT, "shard": self.shard, "reserved_bytes": self.reserved_bytes,
            "owner": asdict(self.owner), "part": self.part, "state": self.state.value, "forgives": self.forgives,
            "usage": [{"file": file, "purpose": purpose, "bytes": nbytes} for file, purpose, nbytes in uses],
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class NumberedReading:
    """A reading with the name of its record."""

    name: str
    reading: Reading


@dataclass(frozen=True, slots=True)
class Readings:
    """All recorded readings: the first of each shard, and the others in the order that they were recorded in."""

    first: tuple[NumberedReading, ...] = ()
    extra: tuple[NumberedReading, ...] = ()

    @property
    def all(self) -> tuple[Reading, ...]:
        return tuple(numbered.reading for numbered in (*self.first, *self.extra))

    def of(self, shard: int) -> tuple[NumberedReading, ...]:
        """Return the readings for one shard, in order."""
        return tuple(numbered for numbered in (*self.first, *self.extra) if numbered.reading.shard == shard)

    @property
    def counted(self) -> tuple[Reading, ...]:
        """The readings that count: none that a later one of its shard forgives."""
        return tuple(reading for reading, is_forgiven in self._judged() if not is_forgiven)

    @property
    def forgiven_bytes(self) -> int:
        """The expert bytes of those that do not count."""
        return sum(reading.expert_bytes for reading, is_forgiven in self._judged() if is_forgiven)

    def _judged(self) -> Iterator[tuple[Reading, bool]]:
        readings = self.all
        for n, reading in enumerate(readings):
            yield reading, any(later.forgives and later.shard == reading.shard for later in readings[n + 1 :])

    def committed_bytes(self, planned_bytes: int) -> int:
        """Return the expert bytes that were or may be read, given what the plan costs: unread shards included."""
        first = {numbered.reading.shard: numbered.reading.reserved_bytes for numbered in self.first}
        return planned_bytes - sum(first.values()) + sum(reading.expert_bytes for reading in self.counted)

    @property
    def usage(self) -> Usage:
        """The sum of what was read and counts; of killed workers nothing is known."""
        return reduce(add, (reading.usage for reading in self.counted), Usage())

    @property
    def unfinished_bytes(self) -> int:
        """The expert bytes that killed workers may have read, as far as they count."""
        return sum(reading.expert_bytes for reading in self.counted if reading.state is ReadingState.OPEN)


def readings_in(parts: PartsPlace) -> Readings:
    """Read the account of a place."""
    names = parts.names()
    return Readings(_read_all(parts, names, _FIRST), _read_all(parts, names, _EXTRA))


@dataclass(frozen=True, slots=True)
class PartsAccount:
    """Admits readings, given what the plan costs and the limit of all reading (None: unlimited)."""

    parts: PartsPlace
    planned_bytes: int
    limit_bytes: int | None
    part: str
    forgives: bool = False

    def admit_first(self, shard: int, share_bytes: int) -> NumberedReading | None:
        """Record that this process is about to read for a shard; None if another process has recorded that."""
        reading = Reading(shard, share_bytes, this_process(), self.part)
        name = _first_name(shard)
        return NumberedReading(name, reading) if self.parts.create(name, reading.to_json()) else None

    def admit(self, shard: int, share_bytes: int) -> NumberedReading | None:
        """Record that this process is about to read for a shard; None, and nothing is read, beyond the limit."""
        first = self.admit_first(shard, share_bytes)
        if first is not None:
            return first
        reading = Reading(shard, share_bytes, this_process(), self.part, forgives=self.forgives)
        number = len(readings_in(self.parts).extra)
        while not self.parts.create(_extra_name(number), reading.to_json()):
            number += 1
        numbered = NumberedReading(_extra_name(number), reading)
        if self.limit_bytes is None or self.forgives:
            return numbered
        if self.committed_bytes(number + 1) <= self.limit_bytes:
            return numbered
        self.parts.replace(numbered.name, replace(reading, state=ReadingState.WITHDRAWN).to_json())
        return None

    def committed_bytes(self, n_extras: int | None = None) -> int:
        """Return the expert bytes that were or may be read, with the first `n_extras` repeated readings."""
        readings = readings_in(self.parts)
        return replace(readings, extra=readings.extra[:n_extras]).committed_bytes(self.planned_bytes)

    def spend(self, numbered: NumberedReading, usage: Usage) -> None:
        """Record exactly what was read."""
        spent = replace(numbered.reading, state=ReadingState.SPENT, usage=usage)
        self.parts.replace(numbered.name, spent.to_json())

    def reader_of(self, shard: int) -> Owner | None:
        """Return a process that may be reading for a shard now, if there is one."""
        for numbered in readings_in(self.parts).of(shard):
            owner = numbered.reading.owner
            is_open = numbered.reading.state is ReadingState.OPEN
            if is_open and is_alive(owner, self.parts.age_seconds(numbered.name)):
                return owner
        return None


def parse_reading(raw: bytes, where: object) -> Reading:
    """Decode a record."""
    fields = parsed_record(raw, where)
    owner = fields.object("owner").read(
        lambda who: Owner(who.size("pid"), who.text("started"), who.text("boot"), who.text("host"))
    )
    reading = Reading(
        fields.integer("shard"), fields.size("reserved_bytes"), owner, fields.text("part"),
        _member(fields, "state", ReadingState), usage_of(fields.each("usage", _use_of)), fields.flag("forgives"),
    )  # fmt: skip
    fields.done()
    return reading


def usage_of(uses: Iterable[tuple[str, Purpose, int]]) -> Usage:
    """Sum uses by file and purpose."""
    by_file = {(file, purpose): nbytes for file, purpose, nbytes in uses}
    by_purpose: dict[Purpose, int] = {}
    for (_, purpose), nbytes in by_file.items():
        by_purpose[purpose] = by_purpose.get(purpose, 0) + nbytes
    return Usage(by_purpose, by_file)


def _use_of(fields: JsonFields) -> tuple[str, Purpose, int]:
    return fields.text("file"), _member(fields, "purpose", Purpose), fields.size("bytes")


def _member(fields: JsonFields, key: str, kind: type[E]) -> E:
    value = fields.text(key)
    return kind(value) if value in set(kind) else fields.refuse(f"'{key}' is '{value[:20]}'")


def _read_all(parts: PartsPlace, names: Iterable[str], prefix: str) -> tuple[NumberedReading, ...]:
    """Read the records of one kind in the order of their names."""
    contents = ((name, parts.read(name)) for name in names if name.startswith(prefix))
    return tuple(
        NumberedReading(name, parse_reading(raw, parts.path / name)) for name, raw in contents if raw is not None
    )


def _first_name(shard: int) -> str:
    return f"{_FIRST}{shard:05d}.json" if shard >= 0 else f"{_FIRST}shared-{-shard:05d}.json"


def _extra_name(number: int) -> str:
    return f"{_EXTRA}{number:05d}.json"
