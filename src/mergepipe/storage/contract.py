"""The storage contract: immutable files read by byte range, every byte metered by purpose.

Stores of remote files make requests: how many, how they are bounded, how they are given up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, TypeVar, runtime_checkable

from mergepipe.core.units import positive
from mergepipe.errors import StorageError
from mergepipe.storage.ledger import Ledger, Purpose, Usage
from mergepipe.storage.location import Location


class FileKind(Enum):
    """The kind of thing at a location, links followed: only files are read, only folders are listed."""

    FILE = "file"
    FOLDER = "folder"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The state of a location, told without reading it.

    `version` is an opaque text that changes whenever a file's bytes do.
    """

    kind: FileKind
    size_bytes: int
    version: str

    @property
    def is_file(self) -> bool:
        return self.kind is FileKind.FILE

    @property
    def is_folder(self) -> bool:
        return self.kind is FileKind.FOLDER


@dataclass(frozen=True, slots=True)
class Entry:
    """A name directly below a folder; a link that leads nowhere is `OTHER`."""

    name: str
    kind: FileKind


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """Terms of reading a store: requests in multiples of `granularity_bytes`, `most_requests` of them at once.

    A request costs as much as `request_cost_bytes` more bytes would: ranges that lie closer are cheaper read together.
    """

    granularity_bytes: int
    most_requests: int
    request_cost_bytes: int

    def __post_init__(self) -> None:
        if self.granularity_bytes < 1 or self.most_requests < 1 or self.request_cost_bytes < 0:
            raise ValueError(f"not the terms of a store: {self}")


class RangeFile(Protocol):
    """One immutable file, open for positional reads from many threads.

    `alignment` is the granularity of requests in bytes (1: any): an engine that plans a read rounds it outwards
    itself, so that what is charged is what the operating system is asked for.
    """

    @property
    def location(self) -> Location: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def alignment(self) -> int: ...

    @property
    def version(self) -> str:
        """The version of what was opened, whatever its location leads to by now (see `storage.file_version`)."""
        ...

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; return the bytes read, fewer only where the file ends inside the buffer.

        `offset`, `len(buffer)` and the buffer's address must be multiples of `alignment`.

        Raises:
            StorageError: the read failed.
            ConflictError: `input.changed`, another version of the file is in its place.
        """
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """Opens files. The only place that reads checkpoint bytes, so the only place that meters them."""

    @property
    def ledger(self) -> Ledger: ...

    def terms(self, location: Location) -> StoreTerms:
        """Return the terms of reading a location. Asks no other machine."""
        ...

    def pin(self, location: Location) -> Location:
        """The location with the version of its whole folder fixed, where its store has such: a commit for a branch.

        Itself elsewhere.

        Raises:
            NotFoundError: there is no such repository or revision.
            StorageError: the store cannot be reached.
        """
        ...

    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up, links followed; None where there is nothing.

        Raises:
            StorageError: `storage.answer`, the store refused to look.
        """
        ...

    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder, by name.

        Raises:
            NotFoundError: there is no such folder.
            StorageError: `storage.answer`, the store refused to list it.
        """
        ...

    def real_path(self, location: Location) -> Location | None:
        """Return the target of a location, all links followed, itself where there are none; None where nothing is.

        Raises:
            StorageError: `storage.answer`, the store refused to look.
        """
        ...

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        """Open `location` for positional reads; `direct` asks for reads that bypass the page cache where that pays.

        Without `direct`, the file's alignment is 1.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it cannot be opened, or is not a regular file.
        """
        ...

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset` (fewer only at the end of the file), charged as metadata."""
        ...

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it cannot be read, or is not a regular file.
            CorruptError: `storage.too-large`, it is larger; nothing was read.
        """
        ...

    def size_bytes(self, location: Location) -> int:
        """Size of the file.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it is not a regular file.
        """
        ...


def files_below(store: Store, folder: Location) -> Iterator[str]:
    """The names of all files below a folder, relative to it, at any depth. Raises as `Store.list` does."""
    for entry in store.list(folder):
        if entry.kind is FileKind.FILE:
            yield entry.name
        elif entry.kind is FileKind.FOLDER:
            yield from (f"{entry.name}/{name}" for name in files_below(store, folder / entry.name))


def is_file(store: Store, location: Location) -> bool:
    """Whether a location leads to a regular file. Raises as `Store.stat` does."""
    status = store.stat(location)
    return status is not None and status.is_file


def is_folder(store: Store, location: Location) -> bool:
    """Whether a location leads to a folder. Raises as `Store.stat` does."""
    status = store.stat(location)
    return status is not None and status.is_folder


def resolved(store: Store, location: Location) -> Location:
    """Follow the links in a location; of one that cannot be looked at, those in the folders above it that can.

    Locations of other machines have none.
    """
    if not location.is_local:
        return location
    try:
        real = store.real_path(location)
    except StorageError:
        real = None
    if real is not None or location.parent == location:
        return location if real is None else real
    return resolved(store, location.parent) / location.name


CONNECTIONS: Final = 32
MAX_CONNECTIONS: Final = 256

X = TypeVar("X")
Y = TypeVar("Y")


class Map(Protocol):
    """The built-in `map` of one iterable: results in order."""

    def __call__(self, function: Callable[[X], Y], items: Iterable[X], /) -> Iterator[Y]: ...


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Settings of reading remote files: at most `connections` requests at once for each scheme."""

    connections: int = CONNECTIONS

    def __post_init__(self) -> None:
        positive("--connections", self.connections, MAX_CONNECTIONS)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The requests of a store so far: all attempts, those made again, and the bytes charged for failed attempts.

    Law: what is charged is what was delivered and `retried_bytes`.
    """

    requests: int = 0
    retries: int = 0
    retried_bytes: int = 0

    def __add__(self, other: RequestCounts) -> RequestCounts:
        return RequestCounts(
            self.requests + other.requests, self.retries + other.retries, self.retried_bytes + other.retried_bytes
        )


NO_REQUESTS: Final = RequestCounts()


@dataclass(frozen=True, slots=True)
class Traffic:
    """The network use of a run: its requests, and the bytes charged by host (`s3://bucket`, `hf://org/name`)."""

    counts: RequestCounts = NO_REQUESTS
    bytes_by_host: Mapping[str, int] = field(default_factory=dict)

    def facts(self) -> dict[str, int | str]:
        """Return the facts of a manifest's `run`; none without requests."""
        if not self.counts.requests:
            return {}
        return {
            "requests": self.counts.requests,
            "retries": self.counts.retries,
            "retried_bytes": self.counts.retried_bytes,
            "bytes_by_host": ",".join(f"{host}={nbytes}" for host, nbytes in self.bytes_by_host.items()),
        }


@runtime_checkable
class RemoteStore(Protocol):
    """The calls that stores of remote files offer beside `Store`."""

    @property
    def counts(self) -> RequestCounts:
        """The requests made so far."""
        ...

    @property
    def notices(self) -> tuple[str, ...]:
        """Return the notices on how files were found, a line each."""
        ...

    def abort(self) -> None:
        """Fail the requests in flight soon, as `storage.unavailable` or otherwise; later ones are made as ever."""
        ...


def request_counts(store: Store) -> RequestCounts:
    """Return the requests of a store so far; none of one that makes none."""
    return store.counts if isinstance(store, RemoteStore) else NO_REQUESTS


def store_notices(store: Store) -> tuple[str, ...]:
    """Return what a store has to say of how it found files."""
    return store.notices if isinstance(store, RemoteStore) else ()


@contextmanager
def concurrent_map(store: Store, locations: Iterable[Location]) -> Iterator[Map]:
    """Give a `map` that makes as many calls at once as the stores of some locations take; one where they are free."""
    terms = [store.terms(location) for location in locations]
    most_requests = max((term.most_requests for term in terms if term.request_cost_bytes), default=0)
    if not most_requests:
        yield map
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(most_requests, thread_name_prefix="look-up") as pool:
        yield pool.map


def abort_requests(store: Store) -> None:
    """Give up the requests of a store that are in flight, if it makes any."""
    if isinstance(store, RemoteStore):
        store.abort()


def traffic(store: Store, usage: Usage) -> Traffic:
    """Sum up the network's part of what a store's ledger counted."""
    by_host: dict[str, int] = defaultdict(int)
    for (file, purpose), nbytes in usage.by_file.items():
        scheme = file.partition("://")[0] if "://" in file else ""
        if scheme and purpose is not Purpose.OUTPUT:
            by_host[host_of(Location.parse(file))] += nbytes
    return Traffic(request_counts(store), dict(sorted(by_host.items())))


def host_of(location: Location) -> str:
    """Name the bucket, host or model of a remote location."""
    return f"{location.scheme}://{location.root}"
