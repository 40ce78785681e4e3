"""Input files during a run: pinned to a version, opened together, checked for having stayed as they were."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mergepipe.checkpoints.contract import Checkpoint, FileFingerprint
from mergepipe.errors import ConflictError, MergePipeError, StorageError
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.location import Location

_SPARE_FILES = 64


@dataclass(frozen=True, slots=True, order=True)
class PinnedFile:
    """A file and the version that it is read at: a value that any process can open again."""

    location: Location
    version: str


def pin_files(
    store: Store, paths: Iterable[Location], checkpoints: Iterable[Checkpoint] = ()
) -> tuple[PinnedFile, ...]:
    """Pin files to the versions at which `checkpoints` were opened, others to what the store holds now.

    Raises:
        ConflictError: `input.changed`, a file is not there any more.
    """
    versions = {path: file.version for path, file in _files_of(checkpoints)}
    return tuple(PinnedFile(path, versions.get(path) or _version_now(store, path)) for path in sorted(set(paths)))


def _version_now(store: Store, path: Location) -> str:
    status = store.stat(path)
    if status is None:
        raise _changed(path)
    return status.version


@contextlib.contextmanager
def open_pinned(store: Store, pinned: Iterable[PinnedFile]) -> Iterator[Mapping[Location, RangeFile]]:
    """Open files for direct reads, and close them all at the end.

    Raises:
        ConflictError: `input.changed`, a file has another version than the pinned one.
    """
    versions = {file.location: file.version for file in pinned}
    with open_files(store, versions) as files:
        for path, file in files.items():
            if file.version != versions[path]:
                raise _changed(path)
        yield files


@contextlib.contextmanager
def open_files(
    store: Store, paths: Iterable[Location], checkpoints: Iterable[Checkpoint] = ()
) -> Iterator[Mapping[Location, RangeFile]]:
    """Open files for direct reads, and close them all at the end.

    Raises:
        ConflictError: `input.changed`, what was opened is not the file of one of `checkpoints` that it was.
    """
    ordered = sorted(set(paths))
    allow_open_files(len(ordered))
    with contextlib.ExitStack() as stack:
        files: dict[Location, RangeFile] = {}
        for path in ordered:
            files[path] = store.open(path, direct=True)
            stack.callback(files[path].close)
        for path, file in _files_of(checkpoints):
            if path in files and files[path].version != file.version:
                raise _changed(path)
        yield files


def check_unchanged(store: Store, checkpoints: Iterable[Checkpoint]) -> None:
    """Refuse files that changed after they were opened.

    Raises:
        ConflictError: naming the file.
    """
    for path, file in _files_of(checkpoints):
        try:
            status = store.stat(path)
        except StorageError:
            raise _changed(path) from None
        if status is None or (status.size_bytes, status.version) != (file.size_bytes, file.version):
            raise _changed(path)


def _changed(path: Location) -> MergePipeError:
    return ConflictError.of("input.changed", path, "changed while it was being read", "run again")


def _files_of(checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[Location, FileFingerprint]]:
    for checkpoint in checkpoints:
        for file in checkpoint.files:
            yield checkpoint.root / file.name, file


def allow_open_files(count: int) -> None:
    """Raise the soft limit on open files for `count` and some more; where that is refused, opening says so."""
    wanted = count + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))
