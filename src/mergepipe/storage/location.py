"""Identify inputs by location: a scheme and a path, on this machine or in another store."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeAlias

FILE_SCHEME = "file"
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A file or a folder in a store; immutable, hashable, ordered by scheme and path.

    It has the part of `pathlib` that only computes names, and nothing that accesses storage: reads go through a
    `Store`. `str` gives a path of this machine unchanged, and `scheme://path` otherwise.

    Law: `Location.parse(str(location)) == location`.
    """

    scheme: str
    path: PurePosixPath

    @classmethod
    def parse(cls, text: str) -> Location:
        """Parse a path of this machine, or `scheme://...`; `file://` and a plain path are equivalent."""
        url = _URL.fullmatch(text)
        return cls(FILE_SCHEME, PurePosixPath(text)) if url is None else cls(url[1], PurePosixPath(url[2]))

    @classmethod
    def local(cls, path: Path | str) -> Location:
        """Make the location of a path of this machine, without parsing it."""
        return cls(FILE_SCHEME, PurePosixPath(path))

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return self.scheme == FILE_SCHEME

    @property
    def local_path(self) -> Path:
        """The path of this machine.

        Raises:
            ValueError: it is in another store.
        """
        if not self.is_local:
            raise ValueError(f"{self} is not a path of this machine")
        return Path(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    @property
    def suffix(self) -> str:
        """The ending of the name with its dot; empty if there is none."""
        return self.path.suffix

    @property
    def parent(self) -> Location:
        """The folder that it is in; itself at the top."""
        return replace(self, path=self.path.parent)

    @property
    def parents(self) -> tuple[Location, ...]:
        """Every folder above it, the nearest first."""
        return tuple(replace(self, path=path) for path in self.path.parents)

    def with_name(self, name: str) -> Location:
        """The location beside it that is called `name`."""
        return replace(self, path=self.path.with_name(name))

    def is_relative_to(self, other: Location) -> bool:
        """Whether it is `other` or below it."""
        return self.scheme == other.scheme and self.path.is_relative_to(other.path)

    def relative_to(self, other: Location) -> str:
        """Its path below `other`, with `/` between parts.

        Raises:
            ValueError: it is not below `other`.
        """
        if self.scheme != other.scheme:
            raise ValueError(f"{self} is not below {other}")
        return self.path.relative_to(other.path).as_posix()

    def __truediv__(self, name: str) -> Location:
        """The location `name` below it; an absolute path of this machine replaces a local one."""
        return replace(self, path=self.path / name)

    def __str__(self) -> str:
        return str(self.path) if self.is_local and not _URL.match(str(self.path)) else f"{self.scheme}://{self.path}"


Place: TypeAlias = Location | Path | str
"""What callers of the public API may name an input by."""


def location_of(place: Place) -> Location:
    """The location that a caller names."""
    if isinstance(place, Location):
        return place
    return Location.local(place) if isinstance(place, Path) else Location.parse(place)
