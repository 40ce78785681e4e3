"""The store that jobs use: it hands every location to the store of its scheme, made when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Final, TypeAlias

from mergepipe.errors import MergePipeError, RecipeError, UnsupportedError, did_you_mean, how_to_install
from mergepipe.storage.contract import (
    CONNECTIONS,
    EXTRA,
    NO_REQUESTS,
    Entry,
    FileStatus,
    RequestCounts,
    Store,
    StoreTerms,
)
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

OpenStore: TypeAlias = Callable[[Ledger, int], Store]
"""Makes the store of a scheme, which charges a ledger and makes at most so many requests at once."""

_REMOTE = "mergepipe.storage.remote"
OPENERS: Final[dict[str, str | OpenStore]] = {
    "": lambda ledger, _connections: LocalStore(ledger),
    **dict.fromkeys(("s3", "gs", "az"), f"{_REMOTE}.objects:open_store"),
    **dict.fromkeys(("http", "https"), f"{_REMOTE}.pinned_store:open_store"),
    "hf": f"{_REMOTE}.hub:open_store",
}
"""Openers of stores by scheme: a function, or `module:function` of one."""


class Stores(Store):
    """Files wherever they are: a `Store` that dispatches by `Location.scheme`. All its members charge one ledger.

    Safe to use from many threads. A member is made on the first use of its scheme, and kept.
    """

    def __init__(self, connections: int = CONNECTIONS) -> None:
        self.ledger = Ledger()
        self._connections = connections
        self._members: dict[str, Store] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> RequestCounts:
        """The requests of all members so far."""
        return sum((member.counts for member in self._known()), NO_REQUESTS)

    @property
    def notices(self) -> tuple[str, ...]:
        """The notices of all members."""
        return tuple(notice for member in self._known() for notice in member.notices)

    def abort(self) -> None:
        """Fail the requests in flight of all members; see `Store.abort`."""
        for member in self._known():
            member.abort()

    def _known(self) -> list[Store]:
        with self._lock:
            return list(self._members.values())

    def member(self, location: Location) -> Store:
        """The store of a location."""
        with self._lock:
            if location.scheme not in self._members:
                self._members[location.scheme] = _opener(location)(self.ledger, self._connections)
            return self._members[location.scheme]

    def terms(self, location: Location) -> StoreTerms:
        return self.member(location).terms(location)

    def pin(self, location: Location) -> Location:
        return self.member(location).pin(location)

    def stat(self, location: Location) -> FileStatus | None:
        return self.member(location).stat(location)

    def list(self, location: Location) -> tuple[Entry, ...]:
        return self.member(location).list(location)

    def real_path(self, location: Location) -> Location | None:
        return self.member(location).real_path(location)

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        return self.member(location).open(location, direct=direct)

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        return self.member(location).read_metadata(location, offset, nbytes)

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        return self.member(location).read_small(location, limit_bytes)

    def size_bytes(self, location: Location) -> int:
        return self.member(location).size_bytes(location)


def _opener(location: Location) -> OpenStore:
    """The function that makes the store of a location; its module is imported here, so that only users of it wait."""
    opener = OPENERS.get(location.scheme)
    if opener is None:
        schemes = sorted(scheme for scheme in OPENERS if scheme)
        message = f"no store is known for '{location.scheme}://'"
        raise RecipeError.of("location.invalid", location, message, did_you_mean(location.scheme, schemes))
    if not isinstance(opener, str):
        return opener
    module, _, function = opener.partition(":")
    try:
        imported = import_module(module)
    except ImportError as error:
        raise _missing(location, error) from error
    made: OpenStore = getattr(imported, function)
    return made


def _missing(location: Location, error: ImportError) -> MergePipeError:
    needed = "support for it" if error.name is None or error.name.startswith("mergepipe.") else error.name
    message = f"reading {location.scheme}:// needs {needed}, which is not installed"
    return UnsupportedError.of("extra.missing", location, message, how_to_install(EXTRA))
