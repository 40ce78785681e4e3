"""List the files of the skeleton that belong to the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mergepipe.checkpoints.contained_files import stat_regular
from mergepipe.errors import CorruptError, StorageError
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.tailor.checkpoint import TrainingCheckpoint

_MAX_DEPTH = 8
_MAX_FILES = 200_000


@dataclass(frozen=True, slots=True)
class SkeletonFile:
    """One file: its name relative to the composite, with slashes, where it is, its size and modification time."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


def list_skeleton(checkpoint: TrainingCheckpoint) -> tuple[SkeletonFile, ...]:
    """List the files of a checkpoint, in order of their names.

    Of a DeepSpeed save directory: what lies in it directly and the tag that `latest` names, no other tag. An earlier
    composite's manifest is left out.

    Raises:
        CorruptError: something is not a regular file, or a link leads out of the checkpoint.
        StorageError: a directory cannot be listed.
    """
    base = checkpoint.path
    if checkpoint.root == base:
        names = list(_walk(base, "", _MAX_DEPTH))
    else:
        tag = checkpoint.root.relative_to(base).as_posix()
        names = [*_walk(base, "", 0), *_walk(base, f"{tag}/", _MAX_DEPTH)]
    names = sorted(name for name in names if name != MANIFEST_NAME)
    if len(names) > _MAX_FILES:
        raise CorruptError.of("tailor.files", base, f"more than {_MAX_FILES} files")
    return tuple(_file(base, name) for name in names)


def _walk(base: Path, prefix: str, depth: int) -> Iterator[str]:
    """Yield names of files below `base/prefix`, down to `depth` directories."""
    try:
        entries = sorted(os.scandir(base / prefix), key=lambda e: e.name)
        kinds = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError as error:
        raise StorageError.of("tailor.list", base / prefix, f"cannot be listed: {error.strerror}") from error
    for name, is_directory in kinds:
        if not is_directory:
            yield prefix + name
        elif depth > 0:
            yield from _walk(base, f"{prefix}{name}/", depth - 1)


def _file(base: Path, name: str) -> SkeletonFile:
    status = stat_regular(base, name)
    if status is None:
        raise CorruptError.of("tailor.files", base / name, "is a link to nothing")
    return SkeletonFile(name, base / name, status.st_size, status.st_mtime_ns)
