"""Input files during a run: opened together, and checked for having stayed as they were."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mergepipe.errors import ConflictError
from mergepipe.readers.base import Checkpoint
from mergepipe.storage.base import RangeFile, Store

_SPARE_FILES = 64


@contextlib.contextmanager
def open_files(store: Store, paths: Iterable[Path]) -> Iterator[Mapping[Path, RangeFile]]:
    """Open files for direct reads, and close them all at the end."""
    ordered = sorted(set(paths))
    allow_open_files(len(ordered))
    with contextlib.ExitStack() as stack:
        files: dict[Path, RangeFile] = {}
        for path in ordered:
            files[path] = store.open(path, direct=True)
            stack.callback(files[path].close)
        yield files


def check_unchanged(checkpoints: Iterable[Checkpoint]) -> None:
    """Refuse to go on with files that are not those that were opened.

    Raises:
        ConflictError: naming the file.
    """
    for checkpoint in checkpoints:
        for file in checkpoint.files:
            path = checkpoint.root / file.name
            try:
                status = path.stat()
            except OSError:
                status = None
            if status is None or (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
                raise ConflictError.of("input.changed", path, "changed while it was being read", "run again")


def allow_open_files(count: int) -> None:
    """Raise the soft limit on open files for `count` and some more; where that is refused, opening says so."""
    wanted = count + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))
