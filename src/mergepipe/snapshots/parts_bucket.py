"""The parts of an output in a bucket: shards lie where the output will be, records of them in a folder below it.

`.mergepipe-parts-<digest of the plan>/` below the output's prefix holds the records of a `PartsPlace`. Shards have
their final names from the start: they are created by conditional puts, never replaced or moved, and nothing is a
snapshot before there is a manifest. Whoever writes anything looks for `job.json` before and after: its deletion, which
comes first, ends the job for all, and what was written at the same moment is deleted by its own writer.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from mergepipe.errors import ConflictError, MergePipeError, OutputError
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.snapshots.object_upload import MARKER_NAME, ObjectUpload, is_uploading, no_conditions, written_names
from mergepipe.snapshots.parts_place import JOB_NAME, PartsJob, PartsPlace, content_of, gone, unsealed_record
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.storage.limits import WORK_LOG_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.owned import PARTS_MARK
from mergepipe.storage.owner import SILENCE_SECONDS
from mergepipe.storage.remote.bucket_folder import BucketFolder, age_seconds
from mergepipe.storage.sealed_lines import sealed

if TYPE_CHECKING:
    from mergepipe.storage.remote.objects import ObjectFacts

_BELOW_PARTS: Final = re.compile(rf"((?:.*/)?){re.escape(PARTS_MARK)}([0-9a-f]{{32}})/[^/]*")


def parts_folder(output: BucketFolder, plan_digest: str) -> BucketFolder:
    """Return the folder of the records of an output by a plan."""
    return output.below(f"{PARTS_MARK}{plan_digest}")


def folder_digests(output: BucketFolder) -> tuple[str, ...]:
    """Return the digests of the plans by which an output is being made."""
    matches = filter(None, map(_BELOW_PARTS.fullmatch, output.list_all()))
    return tuple(sorted({match[2] for match in matches if not match[1]}))


class PartsBucket(PartsPlace):
    """A `PartsPlace` in a bucket; shards are made beside `work` on this machine and uploaded."""

    def __init__(self, output: BucketFolder, job: PartsJob, work: Path) -> None:
        super().__init__(output.location, job)
        self._output = output
        self._records = parts_folder(output, job.plan_digest)
        self._work = work

    @property
    def path(self) -> Location:
        return self._records.location

    @property
    def exists(self) -> bool:
        return self._records.look(JOB_NAME) is not None

    def begin(self) -> None:
        """See `PartsPlace.begin`."""
        if self.exists:
            return
        self._check_unused()
        raw = sealed(self.job.to_json(), JOB_NAME)
        if not self._records.create(JOB_NAME, raw):
            return
        try:
            if self._records.create(JOB_NAME, raw):
                raise no_conditions(self._output.location)
            self._check_unused()  # of two that begin something else at once, each sees the other
        except MergePipeError:
            self._records.delete(JOB_NAME)
            raise

    def _check_unused(self) -> None:
        """Refuse a prefix at which something lies that is not of this job."""
        prefix = f"{self.path.name}/"
        strangers = [name for name in self._output.list_all() if not name.startswith(prefix)]
        if not strangers:
            return
        if MARKER_NAME in strangers and MANIFEST_NAME not in strangers:
            hint = "wait for it, or choose another prefix"
            raise ConflictError.of("output.busy", self.out, "another process makes an output there", hint)
        message = f"holds {len(strangers)} objects that are not of this job, {strangers[0]} among them"
        if MANIFEST_NAME in strangers:
            message = "holds a snapshot already, and one in a bucket is never replaced"
            raise OutputError.of("output.exists", self.out, message, "choose another prefix")
        raise OutputError.of("output.not-ours", self.out, message, "choose another prefix")

    # --- records ---

    def write_new(self, name: str, raw: bytes) -> bool:
        nonce = uuid.uuid4().hex  # tells whose it is when the store's answer was lost and the request repeated
        return self._create(self._records, name, raw, nonce) or self._digest_of(self._records, name) == nonce

    def write_over(self, name: str, raw: bytes) -> None:
        self._check_there()
        self._records.overwrite(name, raw)
        self._check_kept(self._records, name)

    def read_raw(self, name: str, limit_bytes: int) -> bytes | None:
        return self._records.read(name, limit_bytes)

    def names(self) -> tuple[str, ...]:
        names = tuple(sorted(self._records.list_all()))
        if JOB_NAME not in names:
            raise gone(self.path)
        return names

    def age_seconds(self, name: str) -> float:
        facts = self._records.look(name)
        return 0.0 if facts is None else age_seconds(facts, datetime.now(UTC))

    def _create(self, folder: BucketFolder, name: str, content: bytes | Path, digest: str) -> bool:
        self._check_there()
        if not folder.create(name, content, digest):
            return False
        self._check_kept(folder, name)
        return True

    def _check_there(self) -> None:
        if not self.exists:
            raise gone(self.path)

    def _check_kept(self, folder: BucketFolder, name: str) -> None:
        """Delete what was written just now if the job ended meanwhile."""
        if not self.exists:
            folder.delete(name)
            raise gone(self.path)

    def _digest_of(self, folder: BucketFolder, name: str) -> str:
        facts = folder.look(name)
        return "" if facts is None else facts.digest

    # --- shards ---

    @property
    def work(self) -> Path:
        return self._work

    def has_file(self, shard: int, digests: Sequence[TensorDigest]) -> bool:
        name, nbytes = self.job.shards[shard]
        facts = self._output.look(name)
        return facts is not None and (facts.size_bytes, facts.digest) == (nbytes, content_of(digests))

    def keep_file(self, shard: int, file: Path, digests: Sequence[TensorDigest]) -> None:
        name, _ = self.job.shards[shard]
        if self.has_file(shard, digests) or self._create(self._output, name, file, content_of(digests)):
            return
        if not self.has_file(shard, digests):
            raise self.differs(shard, "of it")

    # --- finishing ---

    def give(self, shard: int, digests: Sequence[TensorDigest], target: Path) -> None:
        """Leave the shard where it is: there it is published."""

    def take_back(self, staging: Path) -> None:
        """Nothing was given."""

    def mark_staging(self, staging: Path) -> None:
        """Nothing is put there."""

    def remove(self) -> None:
        with contextlib.suppress(MergePipeError):  # then `gc` does
            _remove_records(self._records)


class JobUpload(ObjectUpload):
    """The upload of what completes an output that is made in parts: its shards, and records of them, lie there."""

    silence_seconds = SILENCE_SECONDS  # it uploads small files only

    def __enter__(self) -> JobUpload:
        super().__enter__()
        try:
            self._check_unpublished()  # another process may have published between the first look and the claim
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _check_empty(self) -> None:
        """Do nothing: the job has made sure that nothing else is there."""

    def _leave(self, error: BaseException) -> None:
        """After a failure, let another process finish at once."""
        del error
        with contextlib.suppress(MergePipeError):
            self._check_ours()
            self._folder.delete(MARKER_NAME)


# --- what is left behind ---


@dataclass(frozen=True, slots=True)
class LeftParts:
    """The parts of an output that is published, or that nobody has worked on for long."""

    output: BucketFolder
    plan_digest: str
    is_published: bool
    nbytes: int

    def remove(self) -> bool:
        """Remove them; of a published output the records only. False where a worker finishes it meanwhile."""
        records = parts_folder(self.output, self.plan_digest)
        records.delete(JOB_NAME)
        if not self.is_published:
            listing = self.output.list_all()
            if MANIFEST_NAME in listing or is_uploading(self.output, listing):
                return False  # the records are garbage of a published output soon
            if not any(PurePosixPath(name).name == JOB_NAME for name in listing):
                for name in (*written_names(self.output, listing), MARKER_NAME):
                    self.output.delete(name)
        _remove_records(records)
        return True


def find_job(output: BucketFolder, plan_digest: str) -> PartsJob | None:
    """Read what the parts of an output are for; None if there are none."""
    records = parts_folder(output, plan_digest)
    raw, where = records.read(JOB_NAME, WORK_LOG_BYTES), records.location / JOB_NAME
    return None if raw is None else PartsJob.parse(unsealed_record(raw, JOB_NAME, where), where)


def find_parts(folder: BucketFolder, abandoned_seconds: float) -> Iterator[LeftParts]:
    """Find the parts at and below a folder that are garbage: published, or not written to for some time."""
    listing = folder.list_all()
    for parent, digest in sorted({match.groups() for match in map(_BELOW_PARTS.fullmatch, listing) if match}):
        within = {name.removeprefix(parent): facts for name, facts in listing.items() if name.startswith(parent)}
        records = {name: facts for name, facts in within.items() if name.startswith(f"{PARTS_MARK}{digest}/")}
        is_published = MANIFEST_NAME in within
        is_ended = f"{PARTS_MARK}{digest}/{JOB_NAME}" not in records
        if is_published or is_ended or _silent_seconds(records) > abandoned_seconds:
            objects = records if is_published else within
            nbytes = sum(facts.size_bytes for facts in objects.values())
            yield LeftParts(folder.below(parent.rstrip("/")), digest, is_published, nbytes)


def _silent_seconds(listing: Mapping[str, ObjectFacts]) -> float:
    now = datetime.now(UTC)
    return min(age_seconds(facts, now) for facts in listing.values())


def _remove_records(records: BucketFolder) -> None:
    """Delete all records, the job first: from then on its workers write nothing."""
    records.delete(JOB_NAME)
    for name in records.list_all():
        records.delete(name)
