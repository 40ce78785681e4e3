"""What workers read for an output that is made in parts: who reads for which shard, and how much it was.

Who is about to read for a shard records `read-<shard>-<attempt>.json` before it, with the bytes that the plan allots to
the shard: the shares of the first attempts together are what the plan costs. After reading a record holds the exact
bytes; of a killed worker the share stays. What it read is read again, by whoever makes the shard then, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import reduce
from operator import add
from typing import Final, TypeVar

from mergepipe.core.canonical_json import canonical_json
from mergepipe.core.json_fields import JsonFields
from mergepipe.snapshots.parts_place import PARTS_FORMAT, PartsPlace, parsed_record
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.owner import Owner, is_alive, this_process

E = TypeVar("E", bound=StrEnum)

CONTENT_IDS: Final = -1
"""Stands for a shard where the content ids that all shards need are read."""
PLANNING: Final = -(1 << 30)
"""Stands for a shard where samples and indices were read to make the plan."""
_PREFIX: Final = "read-"


def index_of(model: int) -> int:
    """Return what stands for a shard where the index of a packed model is read."""
    return -2 - model


class ReadingState(StrEnum):
    """The state of a reading."""

    OPEN = "open"  # its worker reads, or was killed
    SPENT = "spent"


@dataclass(frozen=True, slots=True)
class Reading:
    """One worker's bytes for one shard: at most `reserved_bytes` of experts; exactly `usage` once it is spent.

    `attempt` numbers the readings for the same shard, from 0.
    """

    shard: int
    attempt: int
    reserved_bytes: int
    owner: Owner
    part: str = ""
    state: ReadingState = ReadingState.OPEN
    usage: Usage = field(default_factory=Usage)

    @property
    def name(self) -> str:
        """The name of its record."""
        return f"{_prefix_of(self.shard)}{self.attempt:03d}.json"

    @property
    def expert_bytes(self) -> int:
        """The expert bytes that it may have read."""
        return self.reserved_bytes if self.state is ReadingState.OPEN else self.usage.expert_bytes

    def to_json(self) -> bytes:
        """Encode as a record. Law: `parse_reading(reading.to_json()) == reading`."""
        uses = sorted((file, purpose.value, nbytes) for (file, purpose), nbytes in self.usage.by_file.items())
        return canonical_json({
            "format": PARTS_FORMAT, "shard": self.shard, "attempt": self.attempt,
            "reserved_bytes": self.reserved_bytes, "owner": asdict(self.owner), "part": self.part,
            "state": self.state.value,
            "usage": [{"file": file, "purpose": purpose, "bytes": nbytes} for file, purpose, nbytes in uses],
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Readings:
    """All recorded readings, those of a shard in order."""

    all: tuple[Reading, ...] = ()

    def of(self, shard: int) -> tuple[Reading, ...]:
        """Return the readings for one shard, in order."""
        return tuple(reading for reading in self.all if reading.shard == shard)

    @property
    def expert_bytes(self) -> int:
        """The expert bytes that were or may have been read."""
        return sum(reading.expert_bytes for reading in self.all)

    @property
    def usage(self) -> Usage:
        """The sum of what was read; of killed workers nothing is known."""
        return reduce(add, (reading.usage for reading in self.all), Usage())

    @property
    def unfinished_bytes(self) -> int:
        """The expert bytes that killed workers may have read."""
        return sum(reading.expert_bytes for reading in self.all if reading.state is ReadingState.OPEN)

    @property
    def repeated_bytes(self) -> int:
        """The expert bytes of readings that another one of the same shard followed."""
        last = {reading.shard: reading.attempt for reading in self.all}
        return sum(reading.expert_bytes for reading in self.all if reading.attempt < last[reading.shard])

    @property
    def n_attempts(self) -> int:
        """How often the shard was begun that was begun most often."""
        return max((reading.attempt + 1 for reading in self.all), default=0)


def readings_in(parts: PartsPlace) -> Readings:
    """Read the account of a place."""
    return Readings(_read_all(parts, _PREFIX))


def _read_all(parts: PartsPlace, prefix: str) -> tuple[Reading, ...]:
    """Read the records of readings whose names begin with `prefix`, those of a shard in order."""
    contents = ((name, parts.read(name)) for name in parts.names() if name.startswith(prefix))
    readings = [parse_reading(raw, parts.path / name) for name, raw in contents if raw is not None]
    return tuple(sorted(readings, key=lambda reading: (reading.shard, reading.attempt)))


def _prefix_of(shard: int) -> str:
    """Return how the names of the readings for a shard begin."""
    return f"{_PREFIX}{shard:05d}-" if shard >= 0 else f"{_PREFIX}shared-{-shard:05d}-"


@dataclass(frozen=True, slots=True)
class PartsAccount:
    """Admits readings of a worker of `part`. Where it `is_exclusive`, of two living workers one reads for a shard."""

    parts: PartsPlace
    part: str
    is_exclusive: bool

    def admit_first(self, shard: int, share_bytes: int) -> Reading | None:
        """Record that this process is about to read for a shard; None if another process has recorded that."""
        return self._created(Reading(shard, 0, share_bytes, this_process(), self.part))

    def admit(self, shard: int, share_bytes: int) -> Reading | None:
        """Record that this process is about to read for a shard; None if another one does, and excludes others."""
        reading = self.admit_first(shard, share_bytes)
        while reading is None:
            if self.is_exclusive and self.reader_of(shard) is not None:
                return None
            attempt = len(_read_all(self.parts, _prefix_of(shard)))
            reading = self._created(Reading(shard, attempt, share_bytes, this_process(), self.part))
        return reading

    def _created(self, reading: Reading) -> Reading | None:
        return reading if self.parts.create(reading.name, reading.to_json()) else None

    def spend(self, reading: Reading, usage: Usage) -> None:
        """Record exactly what was read."""
        spent = replace(reading, state=ReadingState.SPENT, usage=usage)
        self.parts.replace(reading.name, spent.to_json())

    def reader_of(self, shard: int) -> Owner | None:
        """Return a process that may be reading for a shard now, if there is one.

        Who runs a part again knows that its first run has ended: a process of the same part on another machine is dead.
        """
        for reading in _read_all(self.parts, _prefix_of(shard)):
            if reading.state is ReadingState.OPEN:
                is_same_part = bool(self.part) and reading.part == self.part
                silent_seconds = math.inf if is_same_part else self.parts.age_seconds(reading.name)
                if is_alive(reading.owner, silent_seconds):
                    return reading.owner
        return None


def parse_reading(raw: bytes, where: object) -> Reading:
    """Decode a record."""
    fields = parsed_record(raw, where)
    owner = fields.object("owner").read(
        lambda who: Owner(who.size("pid"), who.text("started"), who.text("boot"), who.text("host"))
    )
    reading = Reading(
        fields.integer("shard"), fields.size("attempt"), fields.size("reserved_bytes"), owner, fields.text("part"),
        _member(fields, "state", ReadingState), usage_of(fields.each("usage", _use_of)),
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
