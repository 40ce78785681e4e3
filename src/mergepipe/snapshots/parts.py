"""An output that many workers make: the records by which they agree, and the contract of the place that keeps them.

A place holds `job.json`, the files of shards that are made, and for each shard i a claim of every attempt to make it,
`claim-<i>-<attempt>.json`, and `done-<i>.json` with digests and bytes read. Who is about to read for a shard claims it
before, with the bytes that the plan allots to it: the claims of all first attempts together are what the plan costs. Of
a killed worker the claim counts as a whole, unless a later one continues its work and knows better. What was lost is
read again, by whoever makes the shard then, and counted.

Every record appears whole and under a name that was not there: that, and nothing else, coordinates workers. Each is
sealed, under its name, by a checksum in front: the output follows from records, so none is believed that was changed.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Final, TypeVar

from mergepipe.core.records import RecordFormat, Size
from mergepipe.core.strict_json import digest_of
from mergepipe.core.units import format_bytes
from mergepipe.errors import ConflictError, CorruptError, LimitError, MergePipeError
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.staging import CONTENT_NAME, Staging
from mergepipe.snapshots.work_log import FileUses, merge_state, payload_of, read_work_log, sealed, usage_of, uses_of
from mergepipe.storage.contract import WORK_LOG_BYTES
from mergepipe.storage.ledger import Usage
from mergepipe.storage.location import Location
from mergepipe.storage.owners import Owner, is_alive, this_process

T = TypeVar("T")

JOB_NAME: Final = "job.json"
CONTENT_IDS: Final = -1
"""Stands for a shard where the content ids that all shards need are read."""
PLANNING: Final = -(1 << 30)
"""Stands for a shard where samples and indices were read to make the plan."""
_HINT: Final = "remove the directory that it is in, and run again"


def index_of(model: int) -> int:
    """Return what stands for a shard where the index of a packed model is read."""
    return -2 - model


def parts_format(variant: str, record: type[T]) -> RecordFormat[T]:
    """Return the format of a record of one kind."""
    return RecordFormat("mergepipe-parts", 4, record, _HINT, variant=variant, is_sealed=False)


# --- records ---


@dataclass(frozen=True, slots=True)
class PartsJob:
    """The job of a place, on which all workers must agree. `shards` are names and bytes of the weight files."""

    out: str
    version: str
    plan_digest: str
    shards: tuple[tuple[str, Size], ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt of a worker to make a shard: at most `reserved_bytes` of experts, exactly `uses` once it has ended.

    `attempt` numbers the claims on a shard, from 0. One that `continues` an earlier attempt has its work before it, and
    of its own bytes `earlier_bytes` are those of that attempt and of the ones that it continued.
    """

    shard: int
    attempt: Size
    part: str
    owner: Owner
    reserved_bytes: Size
    continues: int | None = None
    earlier_bytes: Size = 0
    uses: FileUses | None = None

    @property
    def name(self) -> str:
        """The name of its record."""
        return f"{_claims_prefix(self.shard)}{self.attempt:03d}.json"

    @property
    def is_open(self) -> bool:
        """Whether its worker reads, or was killed."""
        return self.uses is None

    @property
    def expert_bytes(self) -> int:
        """The expert bytes that it may have read."""
        return self.reserved_bytes if self.uses is None else usage_of(self.uses).expert_bytes


@dataclass(frozen=True, slots=True)
class MadeShard:
    """A shard that is made: by which attempt, what that used, and the digests of its tensors."""

    attempt: Size
    uses: FileUses
    digests: tuple[TensorDigest, ...]


_JOB: Final = parts_format("job", PartsJob)
_CLAIM: Final = parts_format("claim", Claim)
_MADE: Final = parts_format("made", MadeShard)


def content_of(digests: Sequence[TensorDigest]) -> str:
    """Return a name of the bytes of a shard: equal names mean equal bytes."""
    return digest_of([[digest.name, digest.root] for digest in digests])


def _claims_prefix(shard: int) -> str:
    """Return how the names of the claims on a shard begin."""
    return f"claim-{shard:05d}-" if shard >= 0 else f"claim-shared-{-shard:05d}-"


def _done_name(shard: int) -> str:
    return f"done-{shard:05d}.json"


def unsealed(raw: bytes, name: str, where: object) -> bytes:
    """Return the content of a record from the bytes of its file."""
    content = payload_of(raw, name)
    if content is None:
        raise CorruptError.of("work-log.damaged", where, "its checksum does not fit: it was changed", _HINT)
    return content


def parse_job(raw: bytes | None, where: object) -> PartsJob | None:
    """Decode the bytes of a `job.json`; None if there is none."""
    return None if raw is None else _JOB.parse(unsealed(raw, JOB_NAME, where), where)


# --- places ---


class PartsPlace(ABC):
    """The parts of one job, wherever they are kept. Used by many processes at once, on any machine that reaches it.

    Laws: a shard that is done stays done, with the same digests, whoever makes it again; nothing stays in a place that
    is gone. Every method raises ConflictError, `parts.gone`, where it would write to a place that is gone.
    """

    def __init__(self, out: Path | Location, job: PartsJob, path: Path | Location, work: Path) -> None:
        """`path` is where the records are; beside `work`, on this machine, shards grow."""
        self.out = out
        self.job = job
        self.path = path
        self._work = work

    @property
    @abstractmethod
    def exists(self) -> bool:
        """Whether the place is there."""

    @abstractmethod
    def begin(self, raw_job: bytes) -> None:
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
    def delete(self, name: str) -> None:
        """Remove a file; it may be gone already."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of all records, in order."""

    @abstractmethod
    def age_seconds(self, name: str) -> float:
        """Return how long ago a record was written; 0 if it is gone."""

    @abstractmethod
    def has_file(self, shard: int, digests: Sequence[TensorDigest]) -> bool:
        """Whether the file of a shard with these digests is there."""

    @abstractmethod
    def keep_file(self, shard: int, file: Path, digests: Sequence[TensorDigest]) -> None:
        """Take over the finished file of a shard, before it is recorded. An equal one may be there."""

    def take_back(self, shard: int, digests: Sequence[TensorDigest], folder: Path) -> None:  # noqa: B027
        """Undo `keep_file` for a shard that was never recorded as done."""

    def give(self, shard: int, digests: Sequence[TensorDigest], content: Path) -> None:  # noqa: B027
        """Put a shard's file into the folder from which the output is published, if it is published from one."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the place after the output was published: the job first, from then on its workers write nothing."""

    # --- records ---

    def create(self, name: str, content: bytes) -> bool:
        """Write a record under a name that is not there; whether nobody was first."""
        self.check_there()
        is_new = self.write_new(name, sealed(content, name))
        self._check_kept(name)
        return is_new

    def replace(self, name: str, content: bytes) -> None:
        """Replace a record of this process."""
        self.check_there()
        self.write_over(name, sealed(content, name))
        self._check_kept(name)

    def check_there(self) -> None:
        """Raise `parts.gone` if the place is gone."""
        if not self.exists:
            raise gone(self.path)

    def _check_kept(self, name: str) -> None:
        """Delete what was written just now if the job ended meanwhile."""
        if not self.exists:
            self.delete(name)
            raise gone(self.path)

    def read(self, name: str, limit_bytes: int = WORK_LOG_BYTES) -> bytes | None:
        """Read a record; None if there is none."""
        raw = self.read_raw(name, limit_bytes)
        return None if raw is None else unsealed(raw, name, self.path / name)

    def open(self) -> None:
        """Make the place, or check that it is for the same job."""
        self.begin(sealed(_JOB.to_json(self.job), JOB_NAME))
        other = parse_job(self.read_raw(JOB_NAME, WORK_LOG_BYTES), self.path / JOB_NAME) or self.job
        if other == self.job:
            return
        differs = f"version {other.version}, this is {self.job.version}"
        if other.version == self.job.version:
            differs = f"{len(other.shards)} shards, these would be {len(self.job.shards)}"
        hint = f"use the same version and --shard-size for all parts, or remove {self.path} to start over"
        raise ConflictError.of("parts.other-job", self.out, f"its parts are made as {differs}", hint)

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

    # --- shards ---

    @contextlib.contextmanager
    def work_folder(self, shard: int, can_continue: Callable[[Path], bool]) -> Iterator[Staging]:
        """Make or resume the folder of this machine in which a worker makes a shard, as `Staging` does.

        Of two that make a shard at once, one works in a folder of its own.
        """

        def take_up(directory: Path) -> bool:
            logged = read_work_log(directory)
            state = None if logged is None else merge_state(logged)
            if state is not None and state.digests:
                self.take_back(shard, state.digests, directory / CONTENT_NAME)
            return can_continue(directory)

        self.check_there()
        place = self._work.with_name(f"{self._work.name}-{shard:05d}")
        with contextlib.ExitStack() as stack:
            try:
                staging = stack.enter_context(Staging(place, force=False, can_continue=take_up))
            except ConflictError as error:
                if error.code != "output.busy":
                    raise
                other = place.with_name(f"{place.name}-{uuid.uuid4().hex}")
                staging = stack.enter_context(Staging(other, force=False, can_continue=take_up))
            yield staging

    def recorded_shards(self) -> frozenset[int]:
        """Return the shards of which there is a record that they are done."""
        names = set(self.names())
        return frozenset(shard for shard in range(len(self.job.shards)) if _done_name(shard) in names)

    def recorded(self, shard: int) -> MadeShard | None:
        """Return the record of a shard that is done, wherever its file is."""
        raw = self.read(_done_name(shard))
        return None if raw is None else _MADE.parse(raw, self.path / _done_name(shard))

    def done(self, shard: int) -> tuple[TensorDigest, ...] | None:
        """Return the digests of a shard that is done; None if it, or its file, is not there."""
        made = self.recorded(shard)
        return made.digests if made is not None and self.has_file(shard, made.digests) else None

    def add(self, claim: Claim, file: Path, digests: Sequence[TensorDigest], usage: Usage) -> None:
        """Take over the file of a claimed shard, and record its usage. A lost race with equal digests is success."""
        shard, uses = claim.shard, uses_of(usage)
        earlier = self.recorded(shard)
        if earlier is None or earlier.digests == tuple(digests):
            self.keep_file(shard, file, digests)
            made = MadeShard(claim.attempt, uses, tuple(digests))
            if earlier is None and self.create(_done_name(shard), _MADE.to_json(made)):
                return
            earlier = self.recorded(shard)
        if earlier is not None and earlier.digests != tuple(digests):
            names = [mine.name for mine, other in zip(digests, earlier.digests, strict=False) if mine != other]
            raise self.differs(shard, f"of '{(names or ['its tensors'])[0]}'")
        self.spend(claim, usage)

    def differs(self, shard: int, where: str) -> MergePipeError:
        """Return the error of a shard that was made twice, not equal."""
        hint = "check the memory of both machines; remove the directory of its parts to start over"
        name, _ = self.job.shards[shard]
        return ConflictError.of("parts.differ", name, f"another worker made other bytes {where}", hint)

    # --- claims ---

    def spend(self, claim: Claim, usage: Usage) -> None:
        """Record exactly what was used under a claim of this process that made no shard, or made it a second time."""
        self.replace(claim.name, _CLAIM.to_json(replace(claim, uses=uses_of(usage))))

    def claims_of(self, shard: int) -> tuple[Claim, ...]:
        """Return the claims on a shard, in order."""
        return self._claims(_claims_prefix(shard))

    def account(self) -> Account:
        """Return all claims."""
        return Account(self._claims("claim-"))

    def _claims(self, prefix: str) -> tuple[Claim, ...]:
        contents = ((name, self.read(name)) for name in self.names() if name.startswith(prefix))
        claims = [_CLAIM.parse(raw, self.path / name) for name, raw in contents if raw is not None]
        made = {shard: self.recorded(shard) for shard in {claim.shard for claim in claims} if shard >= 0}
        ended = (
            replace(claim, uses=record.uses)
            if (record := made.get(claim.shard)) is not None and record.attempt == claim.attempt
            else claim
            for claim in claims
        )
        return tuple(sorted(ended, key=lambda claim: (claim.shard, claim.attempt)))


def gone(place: Path | Location) -> MergePipeError:
    """Return the error of a place that was removed while it was used."""
    message = "was finished or removed by somebody else meanwhile: nothing was changed"
    return ConflictError.of("parts.gone", place, message, "look whether the output is there")


# --- what is read ---


@dataclass(frozen=True, slots=True)
class Account:
    """The claims of a place, those on a shard in order: what was or may have been read for it."""

    claims: tuple[Claim, ...] = ()

    def of(self, shard: int) -> tuple[Claim, ...]:
        """Return the claims on one shard, in order."""
        return tuple(claim for claim in self.claims if claim.shard == shard)

    @property
    def counted(self) -> tuple[Claim, ...]:
        """The claims that no other one continues, and counts."""
        continued = {(claim.shard, claim.continues) for claim in self.claims}
        return tuple(claim for claim in self.claims if (claim.shard, claim.attempt) not in continued)

    @property
    def expert_bytes(self) -> int:
        """The expert bytes that were or may have been read."""
        return sum(claim.expert_bytes for claim in self.counted)

    @property
    def usage(self) -> Usage:
        """The sum of what was used; of killed workers nothing is known."""
        return reduce(add, (usage_of(claim.uses) for claim in self.counted if claim.uses is not None), Usage())

    @property
    def unfinished_bytes(self) -> int:
        """The expert bytes that killed workers may have read."""
        return sum(claim.expert_bytes for claim in self.counted if claim.is_open)

    @property
    def repeated_bytes(self) -> int:
        """The expert bytes of attempts that another one at the same shard followed."""
        last = {claim.shard: claim.attempt for claim in self.claims}
        return sum(
            claim.earlier_bytes if claim.attempt == last[claim.shard] else claim.expert_bytes for claim in self.counted
        )

    def total_bytes(self, planned_bytes: int) -> int:
        """Return the expert bytes of the whole output, of which `planned_bytes` are those of all first attempts."""
        first_bytes = sum(claim.reserved_bytes for claim in self.claims if not claim.attempt)
        return planned_bytes - first_bytes + self.expert_bytes

    @property
    def n_attempts(self) -> int:
        """How often the shard was begun that was begun most often."""
        return max((claim.attempt + 1 for claim in self.claims), default=0)


@dataclass(frozen=True, slots=True)
class Claimant:
    """Claims shards for a worker of `part`.

    With the `limit_bytes` of a budget, of two living workers one reads for a shard. One that `is_strict` reads nothing
    again that would go beyond them; `planned_bytes` are what all first attempts cost.
    """

    parts: PartsPlace
    part: str
    limit_bytes: int | None = None
    planned_bytes: int = 0
    is_strict: bool = False

    def claim_first(self, shard: int, share_bytes: int) -> Claim | None:
        """Claim a shard, recording that this process is about to read for it; None if it was claimed before."""
        return self._created(Claim(shard, 0, self.part, this_process(), share_bytes))

    def claim(
        self, shard: int, share_bytes: int, *, continues: int | None = None, earlier_bytes: int = 0
    ) -> Claim | None:
        """Claim a shard, again if need be; None if another worker reads for it under a budget.

        `share_bytes` are those still to be read; `earlier_bytes` those of the attempt that it `continues`.
        """
        claim = self.claim_first(shard, share_bytes) if continues is None else None
        while claim is None:
            if self.limit_bytes is not None and self.reader_of(shard) is not None:
                return None
            attempt, reserved_bytes = len(self.parts.claims_of(shard)), earlier_bytes + share_bytes
            again = Claim(shard, attempt, self.part, this_process(), reserved_bytes, continues, earlier_bytes)
            self._check_budget(again)
            claim = self._created(again)
        return claim

    def _created(self, claim: Claim) -> Claim | None:
        return claim if self.parts.create(claim.name, _CLAIM.to_json(claim)) else None

    def _check_budget(self, claim: Claim) -> None:
        """Refuse, if this worker is strict, what all attempts together would read beyond the budget."""
        if not self.is_strict or self.limit_bytes is None:
            return
        total_bytes = Account((*self.parts.account().claims, claim)).total_bytes(self.planned_bytes)
        if total_bytes > self.limit_bytes:
            message = f"all runs would read {format_bytes(total_bytes)} of a budget of {format_bytes(self.limit_bytes)}"
            hint = "leave out --strict, which lets it be finished beyond the budget"
            raise LimitError.of("resume.budget", self.parts.out, message, hint)

    def reader_of(self, shard: int) -> Owner | None:
        """Return a process that may be reading for a shard now, if there is one.

        Who runs a part again knows that its first run has ended: a process of the same part on another machine is dead.
        """
        for claim in self.parts.claims_of(shard):
            if claim.is_open:
                is_same_part = bool(self.part) and claim.part == self.part
                silent_seconds = math.inf if is_same_part else self.parts.age_seconds(claim.name)
                if is_alive(claim.owner, silent_seconds):
                    return claim.owner
        return None
