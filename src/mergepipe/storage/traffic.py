"""The requests that stores of remote files make: how many, how they are bounded, how they are given up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar, runtime_checkable

from mergepipe.core.bounds import positive
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import Location

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
