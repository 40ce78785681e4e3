"""Command that makes files cold: flushed to disk and dropped from the page cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path


def make_cold(paths: Iterable[Path]) -> None:
    """Drop every file of `paths` (directories are walked) from the page cache, so that the next read is physical."""
    for file in _files(paths):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file())
        else:
            yield path


if __name__ == "__main__":
    make_cold(Path(argument) for argument in sys.argv[1:])
