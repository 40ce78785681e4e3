"""The directory beside an output in which workers leave shards and records of them, until the output is finished.

`.<name>.mergepipe-parts-<digest of the plan>` holds `job.json`, and for each shard i its file, named by its content,
and `done-<i>.json` with the digests of its tensors. What is read for it is recorded before it is read, see
`PartsAccount`. Every record appears whole and under a name that was not there: that, and nothing else, coordinates
workers. Nothing of it is visible as output; `Staging` publishes.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from mergepipe.core.canonical_json import canonical_json, digest_of, parse_digestible
from mergepipe.core.json_fields import FieldCodes, JsonFields
from mergepipe.errors import ConflictError, CorruptError, MergePipeError
from mergepipe.snapshots.block_digests import DIGEST_BYTES, root_of
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.staging import CONTENT_NAME, staging_directory
from mergepipe.storage import owned
from mergepipe.storage.limits import JOURNAL_BYTES
from mergepipe.storage.local import os_error

PARTS_FORMAT: Final = "mergepipe-parts/1"
JOB_NAME: Final = "job.json"
_STAGED_NAME: Final = "parts"  # in a staging directory
_DOING: Final = "recording a part"
_CODES = FieldCodes("parts.record", "parts.record", "parts.record", "remove the directory that it is in, and run again")


def parts_directory(out: Path, plan_digest: str) -> Path:
    """Return the parts directory of the output `out` by a plan."""
    return out.absolute().parent / owned.marked_name(out.name, f"{owned.PARTS_MARK}{plan_digest}")


@dataclass(frozen=True, slots=True)
class PartsJob:
    """The job of a parts directory: all workers must agree on it.

    `shards` are names and sizes of the output's weight files.
    """

    out: str
    version: str
    plan_digest: str
    shards: tuple[tuple[str, int], ...]

    def to_json(self) -> bytes:
        """Encode for `job.json`. Law: `PartsJob.parse(job.to_json()) == job`."""
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


class PartsDirectory:
    """The parts directory of one job. Used by many processes at once, on any machine that reaches it.

    Laws: a shard that is done stays done, with the same digests, whoever makes it again; nothing is created in a
    directory that is gone.
    """

    def __init__(self, out: Path, job: PartsJob) -> None:
        self.out = out.absolute()
        self.path = parts_directory(out, job.plan_digest)
        self.job = job

    def open(self) -> None:
        """Make the directory, or check that it is for the same job.

        Raises:
            ConflictError: `parts.other-job`, other workers make other shards, or are of another version.
        """
        with _typed(self.path):
            owned.make_folders(self.path.parent)
            with contextlib.suppress(FileExistsError):
                owned.make_folder(self.path)
            with contextlib.suppress(FileExistsError):
                owned.create_whole(self.path / JOB_NAME, self.job.to_json())
        other = read_job(self.path)
        if other is None or other == self.job:
            return
        differs = f"version {other.version}, this is {self.job.version}"
        if other.version == self.job.version:
            differs = f"{len(other.shards)} shards, these would be {len(self.job.shards)}"
        hint = f"use the same version and --shard-size for all parts, or remove {self.path} to start over"
        raise ConflictError.of("parts.other-job", self.out, f"its parts are made as {differs}", hint)

    @property
    def exists(self) -> bool:
        """Whether the directory is there."""
        return owned.is_there(self.path)

    # --- records ---

    def create(self, name: str, content: bytes) -> bool:
        """Write a record under a name that is not there; whether nobody was first.

        Raises:
            ConflictError: `parts.gone`, the directory is.
        """
        with _typed(self.path):
            try:
                owned.create_whole(self.path / name, content)
            except FileExistsError:
                return False
            return True

    def replace(self, name: str, content: bytes) -> None:
        """Replace a record of this process."""
        with _typed(self.path):
            owned.replace_file(self.path / name, content)

    def read(self, name: str, limit_bytes: int = JOURNAL_BYTES) -> bytes | None:
        """Read a record; None if there is none."""
        with _typed(self.path):
            try:
                return owned.read_file(self.path / name, limit_bytes)
            except FileNotFoundError:
                return None

    def names(self) -> tuple[str, ...]:
        """Return the names of all that is in the directory, in order."""
        with _typed(self.path):
            return tuple(name for name, _ in owned.list_folder(self.path))

    def age_seconds(self, name: str) -> float:
        """Return how long ago a record was written; 0 if it is gone."""
        with contextlib.suppress(OSError):
            return max(0.0, time.time() - (self.path / name).lstat().st_mtime)
        return 0.0

    # --- shards ---

    def new_folder(self) -> Path:
        """Make a private folder for one worker."""
        folder = self.path / f"work-{uuid.uuid4().hex}"
        with _typed(self.path):
            owned.make_folder(folder)
        return folder

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Raise every error of a context that works in the directory as `parts.gone` if the directory is gone.

        A worker that is writing a shard when another one finishes the output meets missing files at any call.

        Raises:
            ConflictError: `parts.gone`.
        """
        try:
            yield
        except MergePipeError as error:
            if self.exists:
                raise
            raise _gone(self.path) from error

    def remove_folder(self, folder: Path) -> None:
        """Remove a private folder with all in it, as far as that can be done."""
        with contextlib.suppress(OSError, MergePipeError):
            owned.remove_tree(folder, ignore_errors=True)

    def done(self, shard: int) -> tuple[TensorDigest, ...] | None:
        """Return the digests of a shard that is done; None if it, or its file, is not there."""
        digests = self.recorded(shard)
        return digests if digests is not None and self._holds(shard, digests) else None

    def recorded(self, shard: int) -> tuple[TensorDigest, ...] | None:
        """Return the recorded digests of a shard, wherever its file is."""
        raw = self.read(_done_name(shard))
        if raw is None:
            return None
        fields = parsed_record(raw, self.path / _done_name(shard))
        digests = fields.each("tensors", _digest_of)
        fields.done()
        return digests

    def _holds(self, shard: int, digests: Sequence[TensorDigest]) -> bool:
        name, nbytes = self.job.shards[shard]
        places = [self.file_of(shard, digests)]
        if self.is_being_finished(staging_directory(self.out)):
            places.append(staging_directory(self.out) / CONTENT_NAME / name)
        return any(_size_of(place) == nbytes for place in places)

    def file_of(self, shard: int, digests: Sequence[TensorDigest]) -> Path:
        """Return where the file of a shard with these digests is kept: equal names mean equal bytes."""
        content = digest_of([[digest.name, digest.root] for digest in digests])
        return self.path / f"shard-{shard:05d}-{content}"

    def add(self, shard: int, file: Path, digests: Sequence[TensorDigest]) -> None:
        """Take over the finished file of a shard. A lost race with equal digests is success.

        Raises:
            ConflictError: `parts.differ`, another worker made other bytes of it; `parts.gone`.
        """
        earlier = self.recorded(shard)
        if earlier is None or earlier == tuple(digests):
            with _typed(self.path):
                owned.rename(file, self.file_of(shard, digests))
                owned.sync_folder(self.path)
            if earlier is not None or self.create(_done_name(shard), _done_record(digests)):
                return
            earlier = self.recorded(shard)
        if earlier is not None and earlier != tuple(digests):
            names = [mine.name for mine, other in zip(digests, earlier, strict=False) if mine != other]
            message = f"another worker made other bytes of '{(names or ['its tensors'])[0]}'"
            hint = "check the memory of both machines; remove the directory of its parts to start over"
            raise ConflictError.of("parts.differ", self.job.shards[shard][0], message, hint)

    # --- finishing ---

    def mark_staging(self, staging: Path) -> None:
        """Record in a staging directory that shards of this job are moved there."""
        owned.write_file(staging / _STAGED_NAME, self.job.plan_digest.encode())

    def is_being_finished(self, staging: Path) -> bool:
        """Whether shards of this job may lie in a staging directory."""
        with contextlib.suppress(OSError, MergePipeError):
            return owned.read_file(staging / _STAGED_NAME, len(self.job.plan_digest)) == self.job.plan_digest.encode()
        return False

    def give(self, shard: int, digests: Sequence[TensorDigest], target: Path) -> None:
        """Move a shard's file to where the output is staged."""
        with _typed(self.path):
            owned.rename(self.file_of(shard, digests), target)

    def take_back(self, staging: Path) -> None:
        """Move shards that `give` moved to a staging directory back, if they are of this job."""
        folder = staging / CONTENT_NAME
        if not self.is_being_finished(staging):
            return
        with _typed(self.path):
            for shard, (name, nbytes) in enumerate(self.job.shards):
                digests = self.recorded(shard) if owned.is_there(folder / name) else None
                if digests is not None and _size_of(folder / name) == nbytes:
                    owned.rename(folder / name, self.file_of(shard, digests))

    def remove(self) -> None:
        """Remove the directory after the output was published: under its name it is gone in one step."""
        finished = self.path.with_name(self.path.name + owned.FINISHED_SUFFIX)
        with contextlib.suppress(OSError, MergePipeError):
            if owned.is_there(finished):
                owned.remove_tree(finished, ignore_errors=True)
            owned.rename(self.path, finished)
        with contextlib.suppress(OSError, MergePipeError):
            owned.remove_tree(finished, ignore_errors=True)


def read_job(directory: Path) -> PartsJob | None:
    """Read what a parts directory is for; None if there is none.

    Raises:
        CorruptError: `parts.record`.
    """
    try:
        return PartsJob.parse(owned.read_file(directory / JOB_NAME, JOURNAL_BYTES), directory / JOB_NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error(error, directory / JOB_NAME, "reading it") from error


def parsed_record(raw: bytes, where: object) -> JsonFields:
    """Parse a record of a parts directory up to its format.

    Raises:
        CorruptError: `parts.record`.
    """

    def refuse(reason: str) -> NoReturn:
        raise CorruptError.of("parts.record", where, reason, _CODES.hint)

    fields = JsonFields(parse_digestible(raw, refuse), _CODES, where)
    if (written := fields.text("format")) != PARTS_FORMAT:
        refuse(f"its format is '{written[:40]}', '{PARTS_FORMAT}' is needed")
    return fields


def _size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _done_name(shard: int) -> str:
    return f"done-{shard:05d}.json"


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


@contextlib.contextmanager
def _typed(directory: Path) -> Iterator[None]:
    """Raise errors of the operating system as ours; a directory that is gone was finished by somebody else."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if not os.path.lexists(directory):
            raise _gone(directory) from error
        raise os_error(error, directory, _DOING) from error


def _gone(directory: Path) -> MergePipeError:
    message = "was finished or removed by somebody else meanwhile: nothing was changed"
    return ConflictError.of("parts.gone", directory, message, "look whether the output is there")
