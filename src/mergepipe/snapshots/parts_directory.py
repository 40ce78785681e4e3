"""The directory beside an output in which the parts of it are kept, on a file system that all workers reach.

`.<name>.mergepipe-parts-<digest of the plan>` holds the records of a `PartsPlace`, and each shard's file, named by its
content. Nothing of it is visible as output; `Staging` publishes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from mergepipe.errors import MergePipeError
from mergepipe.snapshots.parts_place import JOB_NAME, PartsJob, PartsPlace, content_of, gone, unsealed_record
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.staging import CONTENT_NAME, staging_directory
from mergepipe.storage import owned
from mergepipe.storage.limits import WORK_LOG_BYTES
from mergepipe.storage.ranges import os_error

_STAGED_NAME: Final = "parts"  # in a staging directory
_DOING: Final = "recording a part"


def parts_directory(out: Path, plan_digest: str) -> Path:
    """Return the parts directory of the output `out` by a plan."""
    return out.absolute().parent / owned.marked_name(out.name, f"{owned.PARTS_MARK}{plan_digest}")


def directory_digests(out: Path) -> tuple[str, ...]:
    """Return the digests of the plans by which the output `out` is being made."""
    with contextlib.suppress(OSError, MergePipeError):
        names = [name for name, _ in owned.list_folder(out.absolute().parent)]
        digests = [(name, name.rpartition(owned.PARTS_MARK)[2]) for name in names]
        return tuple(digest for name, digest in digests if name == parts_directory(out, digest).name)
    return ()


class PartsDirectory(PartsPlace):
    """A `PartsPlace` on a file system."""

    def __init__(self, out: Path, job: PartsJob) -> None:
        super().__init__(out.absolute(), job)
        self._out = out.absolute()
        self._path = parts_directory(out, job.plan_digest)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def exists(self) -> bool:
        return owned.is_there(self._path)

    def begin(self) -> None:
        with _typed(self._path):
            owned.make_folders(self._path.parent)
            owned.make_private_folder(self._path)
            self.create(JOB_NAME, self.job.to_json())

    # --- records ---

    def write_new(self, name: str, raw: bytes) -> bool:
        with _typed(self._path):
            try:
                owned.create_whole(self._path / name, raw)
            except FileExistsError:
                return False
            return True

    def write_over(self, name: str, raw: bytes) -> None:
        with _typed(self._path):
            owned.replace_file(self._path / name, raw)

    def read_raw(self, name: str, limit_bytes: int) -> bytes | None:
        with _typed(self._path):
            try:
                return owned.read_file(self._path / name, limit_bytes)
            except FileNotFoundError:
                return None

    def names(self) -> tuple[str, ...]:
        with _typed(self._path):
            return tuple(name for name, _ in owned.list_folder(self._path))

    def age_seconds(self, name: str) -> float:
        with contextlib.suppress(OSError):
            return max(0.0, time.time() - (self._path / name).lstat().st_mtime)
        return 0.0

    # --- shards ---

    @property
    def work(self) -> Path:
        return self._path / "work"

    def has_file(self, shard: int, digests: Sequence[TensorDigest]) -> bool:
        name, nbytes = self.job.shards[shard]
        places = [self.file_of(shard, digests)]
        if self.is_being_finished(staging_directory(self._out)):
            places.append(staging_directory(self._out) / CONTENT_NAME / name)
        return any(_size_of(place) == nbytes for place in places)

    def file_of(self, shard: int, digests: Sequence[TensorDigest]) -> Path:
        """Return where the file of a shard with these digests is kept: equal names mean equal bytes."""
        return self._path / f"shard-{shard:05d}-{content_of(digests)}"

    def keep_file(self, shard: int, file: Path, digests: Sequence[TensorDigest]) -> None:
        with _typed(self._path):
            owned.rename(file, self.file_of(shard, digests))
            owned.sync_folder(self._path)

    # --- finishing ---

    def mark_staging(self, staging: Path) -> None:
        owned.write_file(staging / _STAGED_NAME, self.job.plan_digest.encode())

    def is_being_finished(self, staging: Path) -> bool:
        """Whether shards of this job may lie in a staging directory."""
        with contextlib.suppress(OSError, MergePipeError):
            return owned.read_file(staging / _STAGED_NAME, len(self.job.plan_digest)) == self.job.plan_digest.encode()
        return False

    def give(self, shard: int, digests: Sequence[TensorDigest], target: Path) -> None:
        with _typed(self._path):
            owned.rename(self.file_of(shard, digests), target)

    def take_back(self, staging: Path) -> None:
        folder = staging / CONTENT_NAME
        if not self.is_being_finished(staging):
            return
        with _typed(self._path):
            for shard, (name, nbytes) in enumerate(self.job.shards):
                digests = self.recorded(shard) if owned.is_there(folder / name) else None
                if digests is not None and _size_of(folder / name) == nbytes:
                    owned.rename(folder / name, self.file_of(shard, digests))

    def remove(self) -> None:
        finished = self._path.with_name(self._path.name + owned.FINISHED_SUFFIX)
        with contextlib.suppress(OSError, MergePipeError):
            if owned.is_there(finished):
                owned.remove_tree(finished, ignore_errors=True)
            owned.rename(self._path, finished)
        with contextlib.suppress(OSError, MergePipeError):
            owned.remove_tree(finished, ignore_errors=True)


def read_job(directory: Path) -> PartsJob | None:
    """Read what a parts directory is for; None if there is none."""
    path = directory / JOB_NAME
    try:
        return PartsJob.parse(unsealed_record(owned.read_file(path, WORK_LOG_BYTES), JOB_NAME, path), path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error(error, path, "reading it") from error


def _size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


@contextlib.contextmanager
def _typed(directory: Path) -> Iterator[None]:
    """Raise errors of the operating system as ours; a directory that is gone was finished by somebody else."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if not os.path.lexists(directory):
            raise gone(directory) from error
        raise os_error(error, directory, _DOING) from error
