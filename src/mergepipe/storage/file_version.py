"""Files and their versions: opaque texts that change whenever the bytes of a file do."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from blake3 import blake3

from mergepipe.core.records import Size

_SECOND_NS = 1_000_000_000
_PROCESS = os.urandom(8).hex()
_CONTENT = re.compile(r"sha256:([0-9a-f]{64})")


def version_of(path: Path, status: os.stat_result) -> str:
    """Name the state of a file from its status: times of modification and of change, and the inode's number.

    The time of change cannot be set back by a program, so equal versions of a path mean equal bytes. Where a read-only
    file system has no such time and repeats that of modification (images of squashfs, erofs, ISO 9660), another image
    may show equal values: there the version is good in this process only, and equals no recorded one.
    """
    version = f"{status.st_mtime_ns}.{status.st_ctime_ns}.{status.st_ino}"
    repeats = status.st_ctime_ns == status.st_mtime_ns and status.st_ctime_ns % _SECOND_NS == 0
    return f"{version}.{_PROCESS}" if repeats and _is_read_only(path) else version


def sha256_of_version(version: str) -> str | None:
    """Return the digest of a file's bytes where its version is that (`sha256:` and 64 hex digits), else None."""
    match = _CONTENT.fullmatch(version)
    return None if match is None else match[1]


def modified_at(path: Path) -> datetime:
    """The time a file was modified; the epoch if it is unknown or not a valid date."""
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        return datetime.fromtimestamp(0, UTC)


def _is_read_only(path: Path) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return True


@dataclass(frozen=True, slots=True)
class FileId:
    """A file's name, relative to its model, with the size and version that identify its content.

    Two that are equal, of the same path, are of the same bytes: `version` changes whenever those do. Two that differ in
    their versions alone are of the same bytes if both tell the same `sha256`; it is None where nobody has taken it, and
    no part of the comparison.
    """

    name: str
    size_bytes: Size
    version: str
    header_digest: str  # BLAKE3-128 (32 hex digits) of what describes the content: in safetensors the prefix and header
    sha256: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", sha256_of_version(self.version) or self.sha256)


@dataclass(frozen=True, slots=True)
class Digested:
    """A file as it was written: `blake3` (32 hex digits) digests its bytes, or what its record says that it does."""

    name: str
    size_bytes: Size
    blake3: str

    @classmethod
    def of(cls, name: str, content: bytes) -> Digested:
        """Return the record of a file with this content."""
        return cls(name, len(content), blake3(content).hexdigest(16))
