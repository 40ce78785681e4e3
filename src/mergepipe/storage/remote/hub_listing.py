"""The files of one commit of a model: what the Hub or its local cache says of them, before any is read."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final, Protocol

from mergepipe.core.strict_json import parse_object
from mergepipe.errors import ConflictError, CorruptError, MergePipeError
from mergepipe.storage.contract import Entry, FileKind, FileStatus
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import WaitingRoom

COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
SHA256, GIT = "sha256", "git"
_CODE = "hub.answer"
_HINT = "see that HF_ENDPOINT leads to a Hub"
MOST_PATH_CHARACTERS: Final = 1024
MOST_FOLDERS: Final = 16  # one in another: each file of a listing takes memory for all of them
MOST_FILE_BYTES: Final = (1 << 63) - 1


class Hasher(Protocol):
    """A digest of hashlib that is being computed."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a commit. `version` names its content: `sha256:HEX` of its bytes, or `git:HEX`, git's blob id."""

    path: str
    size_bytes: int
    version: str

    @property
    def content_id(self) -> str:
        """The digest alone, which is the file's ETag and its name among the blobs of a cache."""
        return self.version.partition(":")[2]

    def check(self, location: Location, content: bytes) -> None:
        """Hold the whole content against the digest."""
        hasher = self.hasher()
        if hasher is not None:
            hasher.update(content)
            self.check_digest(location, hasher.hexdigest())

    def check_digest(self, location: Location, digest: str) -> None:
        """Hold the digest of what was read against the file's. Raises as `check` does."""
        if digest != self.content_id:
            raise changed(location, f"its {self.version.partition(':')[0]} digest", self.content_id, digest)

    def hasher(self) -> Hasher | None:
        """Return a hasher of the digest that the version states; None where it states none."""
        match self.version.partition(":")[0]:
            case "sha256":
                return hashlib.sha256()
            case "git":
                return hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)
        return None


class WholeFileCheck:
    """Holds a file that is read in pieces against its digest, when the last of its bytes has been read.

    Pieces may come in any order, from many threads, and more than once. Those that come before their turn are copied
    into the room. Where there is none left, they wait for the piece whose turn it is, if that is being read; else the
    file is not checked, because nothing is ever read for the check alone. A check proves the version that was read;
    that later ranges are of the same version is told by their ETag.
    """

    def __init__(self, location: Location, file: HubFile, room: WaitingRoom) -> None:
        self._location = location
        self._file = file
        self._room = room
        self._moved = threading.Condition()
        self._being_read: list[range] = []
        self._waiting: list[tuple[int, bytes]] = []
        self._begin()

    def _begin(self) -> None:
        self._hasher = self._file.hasher()
        self._position = 0

    @contextmanager
    def reading(self, offset: int, buffer: memoryview) -> Iterator[None]:
        """Look at what is read into `buffer` while the context lasts."""
        piece, digest = range(offset, offset + len(buffer)), None
        with self._moved:
            self._being_read.append(piece)
        try:
            yield
            with self._moved:
                digest = self._take(offset, buffer)
        finally:
            with self._moved:
                self._being_read.remove(piece)
                self._moved.notify_all()
        if digest is not None:
            self._file.check_digest(self._location, digest)

    def _take(self, offset: int, content: memoryview) -> str | None:
        """Hash a piece, or keep it until its turn; return the digest of a file that it completes."""
        while self._hasher is not None and offset > self._position:
            if self._room.take(len(content)):
                heappush(self._waiting, (offset, bytes(content)))
                return None
            if not any(self._position in piece for piece in self._being_read):
                self._hasher = None
                self._room.take(-sum(len(piece) for _, piece in self._waiting))
                self._waiting.clear()
                return None
            self._moved.wait()
        self._hash(offset, content)
        while self._waiting and self._waiting[0][0] <= self._position:
            start, piece = heappop(self._waiting)
            self._hash(start, memoryview(piece))
            self._room.take(-len(piece))
        if self._hasher is None or self._position < self._file.size_bytes:
            return None
        digest = self._hasher.hexdigest()
        self._begin()
        return digest

    def _hash(self, offset: int, content: memoryview) -> None:
        unseen = content[self._position - offset :]
        if self._hasher is not None and len(unseen):
            self._hasher.update(unseen)
            self._position += len(unseen)


@dataclass(frozen=True, slots=True)
class ModelListing:
    """All files of one commit of a model, by path; answers lookups without a request."""

    model: str
    commit: str
    files: Mapping[str, HubFile]
    folders: Mapping[str, tuple[Entry, ...]]

    @classmethod
    def of(cls, model: str, commit: str, files: Iterable[HubFile]) -> ModelListing:
        """Arrange files into folders."""
        by_path = {file.path: file for file in files}
        below: dict[str, dict[str, FileKind]] = {"": {}}
        for path in by_path:
            kind = FileKind.FILE
            while path:
                folder, _, name = path.rpartition("/")
                below.setdefault(folder, {})[name] = kind
                path, kind = folder, FileKind.FOLDER
        folders = {folder: tuple(Entry(name, names[name]) for name in sorted(names)) for folder, names in below.items()}
        return cls(model, commit, MappingProxyType(by_path), MappingProxyType(folders))

    def status(self, path: str) -> FileStatus | None:
        """The status of a file or folder; the version of a folder is the commit."""
        file = self.files.get(path)
        if file is not None:
            return FileStatus(FileKind.FILE, file.size_bytes, file.version)
        return FileStatus(FileKind.FOLDER, 0, self.commit) if path in self.folders else None


def parse_model_info(model: str, where: Location, raw: bytes) -> ModelListing:
    """Read the Hub's answer about one revision of a model."""
    answer = parse_object(raw, where=where, code=_CODE, hint=_HINT)
    commit, siblings = answer.get("sha"), answer.get("siblings")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise no_answer(where, "it names no commit")
    if not isinstance(siblings, list):
        raise no_answer(where, "it lists no files")
    files = [_parse_file(where, sibling) for sibling in siblings]
    listing = ModelListing.of(model, commit, files)
    if len(listing.files) < len(files) or not listing.files.keys().isdisjoint(listing.folders):
        raise no_answer(where, "it lists two things of one path")
    return listing


def is_contained(path: str) -> bool:
    """Whether a file's path stays inside its model, is written in one way only, and is as long as paths are."""
    is_sized = 0 < len(path) <= MOST_PATH_CHARACTERS and path.count("/") <= MOST_FOLDERS
    return is_sized and "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def _parse_file(where: Location, sibling: object) -> HubFile:
    path = sibling.get("rfilename") if isinstance(sibling, dict) else None
    if not isinstance(sibling, dict) or not isinstance(path, str) or not is_contained(path):
        raise no_answer(where, f"a file's path is {ascii(path)[:80]}")
    lfs = sibling.get("lfs")
    if isinstance(lfs, dict):
        size_bytes, digest, kind, pattern = lfs.get("size"), lfs.get("sha256"), SHA256, _SHA256
    else:
        size_bytes, digest, kind, pattern = sibling.get("size"), sibling.get("blobId"), GIT, COMMIT
    if type(size_bytes) is not int or not 0 <= size_bytes <= MOST_FILE_BYTES:
        raise no_answer(where, f"it has no size of '{ascii(path)[1:80]}'")
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        raise no_answer(where, f"it has no digest of '{ascii(path)[1:80]}'")
    return HubFile(str(PurePosixPath(path)), size_bytes, f"{kind}:{digest}")


def changed(location: Location, what: str, expected: object, answer: object) -> MergePipeError:
    """Make the error for bytes of another version than the pinned one."""
    message = f"is not what was pinned: {what} is {answer}, {expected} is needed"
    return ConflictError.of("input.changed", location, message, "run again; if it repeats, the server is at fault")


def no_answer(location: Location, why: str) -> MergePipeError:
    """Make the error for an answer that is not that of a Hub."""
    message = f"the Hub's answer is not as expected: {why}"
    return CorruptError.of(_CODE, location, message, _HINT)
