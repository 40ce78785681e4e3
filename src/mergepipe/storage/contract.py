"""The storage contract: immutable files read by byte range, every byte metered by purpose.

Stores of remote files make requests: how many, how they are bounded, how they are given up.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from blake3 import blake3

from mergepipe.core.records import Size
from mergepipe.errors import NotFoundError, StorageError
from mergepipe.storage.ledger import Ledger, Purpose, Usage
from mergepipe.storage.location import Location, is_remote
from mergepipe.storage.range_file import RangeFile, too_large

# --- the largest size of each kind of small file that is read into memory as a whole ---
# Several times that of the largest real file of its kind; a larger one is refused, `storage.too-large`, unread.

_KIB, _MIB = 1 << 10, 1 << 20

# -- files of models --
CONFIG_BYTES: Final = 16 * _MIB  # two names for each of 22,000 classes take 3 MB
CARD_BYTES: Final = 8 * _MIB  # README.md of a model: prose and tables of results
TEMPLATE_BYTES: Final = 4 * _MIB  # chat templates that write tools and images have 30 kB
TOKENIZER_BYTES: Final = 128 * _MIB  # tokenizer.json of 262,000 tokens with their merges has 35 MB
SIDECARS_BYTES: Final = 256 * _MIB  # of one model together: a tokenizer in three forms has 50 MB
WEIGHT_INDEX_BYTES: Final = 24 * _MIB  # one line a tensor: 140,000 of 384 experts in 60 layers, with scales, take 14 MB
ADAPTER_CONFIG_BYTES: Final = 4 * _MIB  # names modules, each at most once

# -- files of training checkpoints --
TRAINER_JSON_BYTES: Final = 256 * _MIB  # trainer_state.json logs every step
LATEST_BYTES: Final = 200  # the name of one directory
PICKLE_BYTES: Final = 256 * _MIB  # .metadata of DCP, data.pkl of torch: one record a tensor and rank
ZIP_DIRECTORY_BYTES: Final = 128 * _MIB  # a member a tensor: a million of 100 bytes
SAVE_LOG_BYTES: Final = 256 * _MIB  # one line a save
PARTIAL_MANIFEST_BYTES: Final = 256 * _MIB  # one record a tensor and shard

# -- files of ours --
RECIPE_BYTES: Final = 1 * _MIB  # written by hand
IMPORTANCE_BYTES: Final = 64 * _MIB  # one number a tensor
PLAN_BYTES: Final = 256 * _MIB  # one record a tensor, with the blocks that are read
MANIFEST_BYTES: Final = 256 * _MIB  # one record a tensor
BLOCK_TABLE_BYTES: Final = 1024 * _MIB  # 16 bytes a block of 256 KiB or so: 10**13 elements
STORE_HEADER_BYTES: Final = 64 * _MIB  # one record a tensor
WORK_LOG_BYTES: Final = 256 * _MIB  # one digest a block
STATISTICS_BYTES: Final = 256 * _MIB  # 0.025 % of the experts: those of 10**12 bytes
CATALOG_RECORD_BYTES: Final = 16 * _MIB  # of a snapshot, with one line an input
OWNER_BYTES: Final = 64 * _KIB  # four short values

_TEMPLATE_NAMES = ("chat_template.json",)
_CONFIG_NAMES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def sidecar_limit(name: str) -> int:
    """The size limit of a file that a checkpoint holds beside its weights, by its name."""
    if name.endswith(".jinja") or name in _TEMPLATE_NAMES:
        return TEMPLATE_BYTES
    return CONFIG_BYTES if name in _CONFIG_NAMES else TOKENIZER_BYTES


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


BESIDE: Final = "../"
"""The start of the name of a file that lies outside the folder of its model, or of its record."""


@dataclass(frozen=True, slots=True)
class FileId:
    """A file's name, relative to its model, with the size and version that identify its content.

    A file outside the model's folder, as those of an adapter that is applied to it, is named by its own name behind
    `BESIDE`: a record that travels names no folder of this machine.

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

    @property
    def is_outside(self) -> bool:
        """Whether the file lies outside the folder of its model."""
        return self.name.startswith(BESIDE)

    def without_place(self) -> FileId:
        """Return it with a relative name: earlier records name files outside the model's folder by path or address."""
        if self.name.startswith("/") or is_remote(self.name):
            return replace(self, name=f"{BESIDE}{PurePosixPath(self.name).name}")
        return self


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


class Store(ABC):
    """Opens files. The only place that reads checkpoint bytes, so the only place that meters them.

    What a store does not say otherwise is that of files without links, revisions and requests over a network.
    """

    ledger: Ledger

    @property
    def counts(self) -> RequestCounts:
        """The requests made so far; none where nothing is asked of another machine."""
        return NO_REQUESTS

    @property
    def notices(self) -> tuple[str, ...]:
        """Return the notices on how files were found, a line each."""
        return ()

    def abort(self) -> None:  # noqa: B027 - most stores make no requests
        """Fail the requests in flight soon, as `storage.unavailable` or otherwise; later ones are made as ever."""

    @abstractmethod
    def terms(self, location: Location) -> StoreTerms:
        """Return the terms of reading a location. Asks no other machine."""

    def pin(self, location: Location) -> Location:
        """The location with the version of its whole folder fixed, where its store has such: a commit for a branch.

        Itself elsewhere.

        Raises:
            NotFoundError: there is no such repository or revision.
            StorageError: the store cannot be reached.
        """
        return location

    @abstractmethod
    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up, links followed; None where there is nothing.

        Raises:
            StorageError: `storage.answer`, the store refused to look.
        """

    @abstractmethod
    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder, by name.

        Raises:
            NotFoundError: there is no such folder.
            StorageError: `storage.answer`, the store refused to list it.
        """

    def real_path(self, location: Location) -> Location | None:
        """Return the target of a location, all links followed, itself where there are none; None where nothing is.

        Raises:
            StorageError: `storage.answer`, the store refused to look.
        """
        return None if self.stat(location) is None else location

    @abstractmethod
    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        """Open `location` for positional reads; `direct` asks for reads that bypass the page cache where that pays.

        Without `direct`, the file's alignment is 1.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it cannot be opened, or is not a regular file.
        """

    def read_metadata(self, location: Location, offset: int, nbytes: int) -> bytes:
        """Read up to `nbytes` at `offset` (fewer only at the end of the file), charged as metadata."""
        from mergepipe.storage.ranges import read_exact  # with numpy, which short commands do without

        file = self.open(location)
        try:
            stop = max(offset, min(offset + nbytes, file.size_bytes))
            return read_exact(file, offset, stop, Purpose.METADATA).tobytes()
        finally:
            file.close()

    def read_small(self, location: Location, limit_bytes: int) -> bytes:
        """Read a whole file of at most `limit_bytes`, charged as metadata.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it cannot be read, or is not a regular file.
            CorruptError: `storage.too-large`, it is larger; nothing was read.
        """
        size_bytes = self.size_bytes(location)
        if size_bytes > limit_bytes:
            raise too_large(location, size_bytes, limit_bytes)
        return self.read_metadata(location, 0, size_bytes)

    def size_bytes(self, location: Location) -> int:
        """Size of the file.

        Raises:
            NotFoundError: there is no such file.
            StorageError: it is not a regular file.
        """
        return self._file_status(location).size_bytes

    def _file_status(self, location: Location) -> FileStatus:
        status = self.stat(location)
        if status is None:
            raise NotFoundError.of("storage.not-found", location, "no such file", "check the location")
        if not status.is_file:
            raise StorageError.of("storage.not-a-file", location, "is a folder, a file is needed", "name a file in it")
        return status


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
EXTRA: Final = "remote"  # of the libraries that remote stores need

X = TypeVar("X")
Y = TypeVar("Y")


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


def map_at_once(store: Store, locations: Iterable[Location], function: Callable[[X], Y], items: Iterable[X]) -> list[Y]:
    """Call a function with each item: as many at once as the stores of some locations take; one where they are free."""
    terms = [store.terms(location) for location in locations]
    most_requests = max((term.most_requests for term in terms if term.request_cost_bytes), default=0)
    if not most_requests:
        return list(map(function, items))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(most_requests, thread_name_prefix="look-up") as pool:
        return list(pool.map(function, items))


def traffic(store: Store, usage: Usage) -> Traffic:
    """Sum up the network's part of what a store's ledger counted."""
    by_host: dict[str, int] = defaultdict(int)
    for (file, purpose), nbytes in usage.by_file.items():
        scheme = file.partition("://")[0] if "://" in file else ""
        if scheme and purpose is not Purpose.OUTPUT:
            location = Location.parse(file)
            by_host[f"{location.scheme}://{location.root}"] += nbytes
    return Traffic(store.counts, dict(sorted(by_host.items())))
