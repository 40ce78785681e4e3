"""The two places in which parts of an output are kept: a folder beside it, or a folder below its prefix in a bucket.

Of a folder, `.<name>.mergepipe-parts-<digest of the plan>` holds the records, and each shard's file, named by its
content, until `Staging` publishes them. Of a bucket, `.mergepipe-parts-<digest of the plan>/` below the output's prefix
holds the records; shards have their final names from the start: they are created by conditional puts, never replaced or
moved, and nothing is a snapshot before there is a manifest. Whoever writes anything looks for `job.json` before and
after: its deletion, which comes first, ends the job for all, and what was written at the same moment is deleted by its
own writer.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from mergepipe.errors import MergePipeError
from mergepipe.snapshots.object_upload import check_unused, no_conditions
from mergepipe.snapshots.parts import JOB_NAME, PartsJob, PartsPlace, content_of, gone, parse_job
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.storage import owned
from mergepipe.storage.contract import WORK_LOG_BYTES
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.owned import PARTS_MARK
from mergepipe.storage.ranges import os_error
from mergepipe.storage.remote.objects import BucketFolder

_REMOVALS: Final = 5  # another worker may write to the place, or remove it too, until it sees the output
_BELOW_PARTS: Final = re.compile(rf"((?:.*/)?){re.escape(PARTS_MARK)}([0-9a-f]{{32}})/[^/]*")


def parts_place(out: Path | Location, job: PartsJob, work: Path) -> PartsPlace:
    """Return where the parts of an output are kept; those of a bucket are made beside `work` on this machine."""
    return FolderParts(out, job) if isinstance(out, Path) else BucketParts(BucketFolder(out), job, work)


def plan_digests_at(out: Path | Location) -> tuple[str, ...]:
    """Return the digests of the plans of which there are parts of an output."""
    if not isinstance(out, Path):
        matches = filter(None, map(_BELOW_PARTS.fullmatch, BucketFolder(out).list_all()))
        return tuple(sorted({match[2] for match in matches if not match[1]}))
    with contextlib.suppress(OSError, MergePipeError):
        names = [name for name, _ in owned.list_folder(out.absolute().parent)]
        digests = [(name, name.rpartition(PARTS_MARK)[2]) for name in names]
        return tuple(digest for name, digest in digests if name == parts_directory(out, digest).name)
    return ()


def job_at(out: Path | Location, plan_digest: str) -> PartsJob | None:
    """Read what the parts of an output by a plan are made for; None if there are none."""
    if isinstance(out, Path):
        return read_job(parts_directory(out, plan_digest))
    records = parts_folder(BucketFolder(out), plan_digest)
    return parse_job(records.read(JOB_NAME, WORK_LOG_BYTES), records.location / JOB_NAME)


def remove_left_parts(out: Path | Location, plan_digest: str) -> None:
    """Remove what a process that was killed after it had published an output left of its parts."""
    if isinstance(out, Path):
        directory = parts_directory(out, plan_digest)
        if directory.is_dir() and not directory.is_symlink():
            _remove_directory(directory)
    elif out.scheme != HUB_SCHEME:
        _remove_records(parts_folder(BucketFolder(out), plan_digest))


# --- a folder ---


def _remove_directory(directory: Path) -> None:
    """Remove a parts directory, the record of its job first: from then on its workers write nothing."""
    for _ in range(_REMOVALS):
        with contextlib.suppress(FileNotFoundError):
            owned.remove_file(directory / JOB_NAME)
        owned.remove_tree(directory, ignore_errors=True)
        if not owned.is_there(directory):
            return


def parts_directory(out: Path, plan_digest: str) -> Path:
    """Return the parts directory of the output `out` by a plan."""
    return out.absolute().parent / owned.marked_name(out.name, f"{PARTS_MARK}{plan_digest}")


def read_job(directory: Path) -> PartsJob | None:
    """Read what a parts directory is for; None if there is none."""
    path = directory / JOB_NAME
    try:
        return parse_job(owned.read_file(path, WORK_LOG_BYTES), path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error(error, path, "reading it") from error


class FolderParts(PartsPlace):
    """A `PartsPlace` in a folder, on a file system that all workers reach."""

    def __init__(self, out: Path, job: PartsJob) -> None:
        self._path = parts_directory(out, job.plan_digest)
        super().__init__(out.absolute(), job, self._path, self._path / "work")
        self._is_begun = False

    @property
    def exists(self) -> bool:
        """Whether the place is there; a folder without a job was made again as the parent of a work folder."""
        return owned.is_there(self._path / JOB_NAME)

    def begin(self, raw_job: bytes) -> None:
        with self._typed():
            owned.make_folders(self._path.parent)
            owned.make_private_folder(self._path)
        self.write_new(JOB_NAME, raw_job)
        self._is_begun = True

    def write_new(self, name: str, raw: bytes) -> bool:
        with self._typed():
            try:
                owned.create_whole(self._path / name, raw)
            except FileExistsError:
                return False
            return True

    def write_over(self, name: str, raw: bytes) -> None:
        with self._typed():
            owned.replace_file(self._path / name, raw)

    def read_raw(self, name: str, limit_bytes: int) -> bytes | None:
        with self._typed():
            try:
                return owned.read_file(self._path / name, limit_bytes)
            except FileNotFoundError:
                return None

    def delete(self, name: str) -> None:
        with contextlib.suppress(OSError):
            owned.remove_file(self._path / name)

    def names(self) -> tuple[str, ...]:
        with self._typed():
            return tuple(name for name, _ in owned.list_folder(self._path))

    def age_seconds(self, name: str) -> float:
        with contextlib.suppress(OSError):
            return max(0.0, time.time() - (self._path / name).lstat().st_mtime)
        return 0.0

    def has_file(self, shard: int, digests: Sequence[TensorDigest]) -> bool:
        try:
            return self._file_of(shard, digests).lstat().st_size == self.job.shards[shard][1]
        except OSError:
            return False

    def keep_file(self, shard: int, file: Path, digests: Sequence[TensorDigest]) -> None:
        with self._typed():
            owned.rename(file, self._file_of(shard, digests))
            owned.sync_folder(self._path)

    def _file_of(self, shard: int, digests: Sequence[TensorDigest]) -> Path:
        """Return where the file of a shard with these digests is kept: equal names mean equal bytes."""
        return self._path / f"shard-{shard:05d}-{content_of(digests)}"

    def take_back(self, shard: int, digests: Sequence[TensorDigest], folder: Path) -> None:
        file = self._file_of(shard, digests)
        with self._typed():
            if owned.is_there(file) and owned.is_there(folder) and self.recorded(shard) is None:
                owned.rename(file, folder / self.job.shards[shard][0])

    def give(self, shard: int, digests: Sequence[TensorDigest], content: Path) -> None:
        with self._typed():
            owned.link_or_copy(self._file_of(shard, digests), content / self.job.shards[shard][0])

    def remove(self) -> None:
        with self._typed():
            _remove_directory(self._path)

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        """Raise errors of the operating system as ours; a folder that is gone was finished by somebody else."""
        try:
            yield
        except OSError as error:
            if self._is_begun and not self.exists:
                raise gone(self._path) from error
            raise os_error(error, self._path, "recording a part") from error


# --- a bucket ---


def parts_folder(output: BucketFolder, plan_digest: str) -> BucketFolder:
    """Return the folder of the records of an output by a plan."""
    return output.below(f"{PARTS_MARK}{plan_digest}")


def _remove_records(records: BucketFolder) -> None:
    """Remove the records of parts in a bucket, that of the job first: from then on its workers write nothing."""
    with contextlib.suppress(MergePipeError):
        records.delete(JOB_NAME)
        for name in records.list_all():
            records.delete(name)


class BucketParts(PartsPlace):
    """A `PartsPlace` in a bucket; shards are made beside `work` on this machine and uploaded.

    A shard stays where it is uploaded: there it is published, and one that is made again is found.
    """

    def __init__(self, output: BucketFolder, job: PartsJob, work: Path) -> None:
        self._output = output
        self._records = parts_folder(output, job.plan_digest)
        super().__init__(output.location, job, self._records.location, work)

    @property
    def exists(self) -> bool:
        return self._records.look(JOB_NAME) is not None

    def begin(self, raw_job: bytes) -> None:
        if self.exists:
            return
        own = (f"{self.path.name}/",)
        check_unused(self._output, own)
        if not self._records.create(JOB_NAME, raw_job):
            return
        try:
            if self._records.create(JOB_NAME, raw_job):
                raise no_conditions(self._output.location)
            check_unused(self._output, own)  # of two that begin something else at once, each sees the other
        except MergePipeError:
            self._records.delete(JOB_NAME)
            raise

    def write_new(self, name: str, raw: bytes) -> bool:
        nonce = uuid.uuid4().hex  # tells whose it is when the store's answer was lost and the request repeated
        if self._records.create(name, raw, nonce):
            return True
        facts = self._records.look(name)
        return facts is not None and facts.digest == nonce

    def write_over(self, name: str, raw: bytes) -> None:
        self._records.overwrite(name, raw)

    def read_raw(self, name: str, limit_bytes: int) -> bytes | None:
        return self._records.read(name, limit_bytes)

    def delete(self, name: str) -> None:
        self._records.delete(name)

    def names(self) -> tuple[str, ...]:
        names = tuple(sorted(self._records.list_all()))
        if JOB_NAME not in names:
            raise gone(self.path)
        return names

    def age_seconds(self, name: str) -> float:
        facts = self._records.look(name)
        return 0.0 if facts is None else facts.age_seconds(datetime.now(UTC))

    def has_file(self, shard: int, digests: Sequence[TensorDigest]) -> bool:
        name, nbytes = self.job.shards[shard]
        facts = self._output.look(name)
        return facts is not None and (facts.size_bytes, facts.digest) == (nbytes, content_of(digests))

    def keep_file(self, shard: int, file: Path, digests: Sequence[TensorDigest]) -> None:
        name, _ = self.job.shards[shard]
        if self.has_file(shard, digests):
            return
        self.check_there()
        is_new = self._output.create(name, file, content_of(digests))
        if is_new and not self.exists:
            self._output.delete(name)
            raise gone(self.path)
        if not is_new and not self.has_file(shard, digests):
            raise self.differs(shard, "of it")

    def remove(self) -> None:
        _remove_records(self._records)
