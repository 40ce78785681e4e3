"""The place in which workers leave shards and records of them until an output is finished; what all such places share.

A place holds `job.json`, and for each shard i its file and `done-<i>.json` with the digests of its tensors. What is
read for it is recorded before it is read, see `PartsAccount`. Every record appears whole and under a name that was not
there: that, and nothing else, coordinates workers. Every record is sealed, under its name, by a checksum in front: the
output follows from records, so that none is believed that was changed. `PartsDirectory` keeps a place in a directory,
`PartsBucket` in a bucket.
"""

from __future__ import annotations

import base64
import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from mergepipe.core.canonical_json import canonical_json, digest_of, parse_digestible
from mergepipe.core.json_fields import FieldCodes, JsonFields
from mergepipe.errors import ConflictError, CorruptError, MergePipeError
from mergepipe.snapshots.block_digests import DIGEST_BYTES, root_of
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.staging import Staging
from mergepipe.snapshots.work_log import WORTH_KEEPING, UnitLog
from mergepipe.storage.limits import WORK_LOG_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.sealed_lines import payload_of, sealed

PARTS_FORMAT: Final = "mergepipe-parts/2"
JOB_NAME: Final = "job.json"
_DONE: Final = "done-"
_CODES = FieldCodes(
    "work-log.damaged", "work-log.damaged", "work-log.damaged", "remove the directory that it is in, and run again"
)


@dataclass(frozen=True, slots=True)
class PartsJob:
    """The job of a place; all workers must agree on it. `shards` are names and sizes of the output's weight files."""

    out: str
    version: str
    plan_digest: str
    shards: tuple[tuple[str, int], ...]

    def to_json(self) -> bytes:
        """Encode for `job.json`, before it is sealed. Law: `PartsJob.parse(job.to_json()) == job`."""
        return canonical_json({
            "format": PARTS_FORMAT, "out": self.out, "version": self.version, "plan": self.plan_digest,
            "shards": [{"name": name, "bytes": nbytes} for name, nbytes in self.shards],
        })  # fmt: skip

    @staticmethod
    def parse(raw: bytes, where: object) -> PartsJob:
        """Decode `job.json`."""
        fields = parsed_record(raw, where)
        shards = fields.each("shards", lambda shard: (shard.text("name"), shard.size("bytes")))
        job = PartsJob(fields.text("out"), fields.text("version"), fields.text("plan"), shards)
        fields.done()
        return job


class PartsPlace(ABC):
    """The parts of one job, wherever they are kept. Used by many processes at once, on any machine that reaches it.

    Laws: a shard that is done stays done, with the same digests, whoever makes it again; nothing stays in a place that
    is gone. Every method raises ConflictError, `parts.gone`, where it would write to a place that is gone.
    """

    def __init__(self, out: Path | Location, job: PartsJob) -> None:
        self.out = out
        self.job = job

    @property
    @abstractmethod
    def path(self) -> Path | Location:
        """The location of the records."""

    @property
    @abstractmethod
    def exists(self) -> bool:
        """Whether the place is there."""

    @abstractmethod
    def begin(self) -> None:
        """Make the place with the record of the job, unless it is there."""

    @abstractmethod
    def write_new(self, name: str, raw: bytes) -> bool:
        """Write a file under a name that is not there; whether nobody was first."""

    @abstractmethod
    def write_over(self, name: str, raw: bytes) -> None:
        """Replace a file of this process."""

    @abstractmethod
    def read_raw(self, name: str, limit_bytes: int) -> bytes | None:
        """Read a file; None if there is none."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of all records, in order."""

    @abstractmethod
    def age_seconds(self, name: str) -> float:
        """Return how long ago a record was written; 0 if it is gone."""

    @property
    @abstractmethod
    def work(self) -> Path:
        """The output of this machine beside which shards are made."""

    @abstractmethod
    def has_file(self, shard: int, digests: Sequence[TensorDigest]) -> bool:
        """Whether the file of a shard with these digests is there."""

    @abstractmethod
    def keep_file(self, shard: int, file: Path, digests: Sequence[TensorDigest]) -> None:
        """Take over the finished file of a shard, before it is recorded. An equal one may be there."""

    @abstractmethod
    def give(self, shard: int, digests: Sequence[TensorDigest], target: Path) -> None:
        """Put a shard's file where the output is staged, if that is not where it is published from."""

    @abstractmethod
    def take_back(self, staging: Path) -> None:
        """Take back what `give` put in a staging directory, if it is of this job."""

    @abstractmethod
    def mark_staging(self, staging: Path) -> None:
        """Record in a staging directory that shards of this job are put there."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the place after the output was published: for workers it is gone in one step."""

    # --- what all places share ---

    def create(self, name: str, content: bytes) -> bool:
        """Write a record under a name that is not there; whether nobody was first."""
        return self.write_new(name, sealed(content, name))

    def replace(self, name: str, content: bytes) -> None:
        """Replace a record of this process."""
        self.write_over(name, sealed(content, name))

    def read(self, name: str, limit_bytes: int = WORK_LOG_BYTES) -> bytes | None:
        """Read a record; None if there is none."""
        raw = self.read_raw(name, limit_bytes)
        return None if raw is None else unsealed_record(raw, name, self.path / name)

    def open(self) -> None:
        """Make the place, or check that it is for the same job."""
        self.begin()
        raw = self.read(JOB_NAME)
        other = self.job if raw is None else PartsJob.parse(raw, self.path / JOB_NAME)
        if other == self.job:
            return
        differs = f"version {other.version}, this is {self.job.version}"
        if other.version == self.job.version:
            differs = f"{len(other.shards)} shards, these would be {len(self.job.shards)}"
        hint = f"use the same version and --shard-size for all parts, or remove {self.path} to start over"
        raise ConflictError.of("parts.other-job", self.out, f"its parts are made as {differs}", hint)

    @contextlib.contextmanager
    def work_folder(self, shard: int, units: UnitLog) -> Iterator[Path]:
        """Make or resume the folder of this machine in which a worker makes a shard, logging `units`.

        If it is interrupted what is durable stays for the next run; else it is removed when the context ends. Of two
        that make a shard at once, one works in a folder of its own.
        """
        place = self.work.with_name(f"{self.work.name}-{shard:05d}")
        with contextlib.ExitStack() as stack:
            try:
                staging = stack.enter_context(Staging(place, force=False, can_continue=units.can_continue))
            except ConflictError as error:
                if error.code != "output.busy":
                    raise
                other = place.with_name(f"{place.name}-{uuid.uuid4().hex}")
                staging = stack.enter_context(Staging(other, force=False, can_continue=units.can_continue))
            try:
                yield staging.path
            except WORTH_KEEPING:
                if units.n_durable:
                    staging.keep()
                raise
            finally:
                units.close()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Raise every error of a context that works in the place as `parts.gone` if the place is gone.

        A worker that is writing a shard when another one finishes the output meets missing files at any call.
        """
        try:
            yield
        except MergePipeError as error:
            if self.exists:
                raise
            raise gone(self.path) from error

    def recorded_shards(self) -> frozenset[int]:
        """Return the shards of which there is a record that they are done."""
        names = set(self.names())
        return frozenset(shard for shard in range(len(self.job.shards)) if _done_name(shard) in names)

    def done(self, shard: int) -> tuple[TensorDigest, ...] | None:
        """Return the digests of a shard that is done; None if it, or its file, is not there."""
        digests = self.recorded(shard)
        return digests if digests is not None and self.has_file(shard, digests) else None

    def recorded(self, shard: int) -> tuple[TensorDigest, ...] | None:
        """Return the recorded digests of a shard, wherever its file is."""
        raw = self.read(_done_name(shard))
        if raw is None:
            return None
        fields = parsed_record(raw, self.path / _done_name(shard))
        digests = fields.each("tensors", _digest_of)
        fields.done()
        return digests

    def add(self, shard: int, file: Path, digests: Sequence[TensorDigest]) -> None:
        """Take over the finished file of a shard. A lost race with equal digests is success."""
        earlier = self.recorded(shard)
        if earlier is None or earlier == tuple(digests):
            self.keep_file(shard, file, digests)
            if earlier is not None or self.create(_done_name(shard), _done_record(digests)):
                return
            earlier = self.recorded(shard)
        if earlier is not None and earlier != tuple(digests):
            names = [mine.name for mine, other in zip(digests, earlier, strict=False) if mine != other]
            raise self.differs(shard, f"of '{(names or ['its tensors'])[0]}'")

    def differs(self, shard: int, where: str) -> MergePipeError:
        """Return the error of a shard that was made twice, not equal."""
        hint = "check the memory of both machines; remove the directory of its parts to start over"
        return ConflictError.of(
            "parts.differ", self.job.shards[shard][0], f"another worker made other bytes {where}", hint
        )


def content_of(digests: Sequence[TensorDigest]) -> str:
    """Return a name of the bytes of a shard: equal names mean equal bytes."""
    return digest_of([[digest.name, digest.root] for digest in digests])


def gone(place: Path | Location) -> MergePipeError:
    """Return the error of a place that was removed while it was used."""
    message = "was finished or removed by somebody else meanwhile: nothing was changed"
    return ConflictError.of("parts.gone", place, message, "look whether the output is there")


def unsealed_record(raw: bytes, name: str, where: object) -> bytes:
    """Return the content of a record from the bytes of its file."""
    content = payload_of(raw, name)
    if content is None:
        raise CorruptError.of("work-log.damaged", where, "its checksum does not fit: it was changed", _CODES.hint)
    return content


def parsed_record(raw: bytes, where: object) -> JsonFields:
    """Parse a record of a parts directory up to its format."""

    def refuse(reason: str) -> NoReturn:
        raise CorruptError.of("work-log.damaged", where, reason, _CODES.hint)

    fields = JsonFields(parse_digestible(raw, refuse), _CODES, where)
    if (written := fields.text("format")) != PARTS_FORMAT:
        refuse(f"its format is '{written[:40]}', '{PARTS_FORMAT}' is needed")
    return fields


def _done_name(shard: int) -> str:
    return f"{_DONE}{shard:05d}.json"


def _done_record(digests: Sequence[TensorDigest]) -> bytes:
    tensors = [{"name": d.name, "blocks": base64.b64encode(b"".join(d.blocks)).decode()} for d in digests]
    return canonical_json({"format": PARTS_FORMAT, "tensors": tensors})


def _digest_of(fields: JsonFields) -> TensorDigest:
    name, packed = fields.text("name"), fields.text("blocks")
    try:
        content = base64.b64decode(packed, validate=True)
    except ValueError:
        fields.refuse("its digests are damaged")
    if len(content) % DIGEST_BYTES:
        fields.refuse("its digests are damaged")
    blocks = tuple(content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES))
    return TensorDigest(name, root_of(blocks), blocks)
