"""The files of one commit of a model: what the Hub or its local cache says of them, before any is read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from types import MappingProxyType

from mergepipe.core.values import dataclass
from mergepipe.storage.contract import Entry, FileKind, FileStatus
from mergepipe.storage.location import Location
from mergepipe.storage.remote.hub_errors import changed, no_answer

COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
SHA256, GIT = "sha256", "git"


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
        """Hold the whole content against the digest.

        Raises:
            ConflictError: `input.changed`, it is other content.
        """
        kind = self.version.partition(":")[0]
        if kind not in (SHA256, GIT):
            return
        digest = hashlib.sha256(content).hexdigest() if kind == SHA256 else git_blob_id(content)
        if digest != self.content_id:
            raise changed(location, f"its {kind} digest", self.content_id, digest)


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


def parse_model_info(model: str, where: Location, answer: object) -> ModelListing:
    """Read the Hub's answer about one revision of a model.

    Raises:
        CorruptError: `hub.answer`, it lacks the commit, or a file's size or digest, or names a path outside the model.
    """
    if not isinstance(answer, dict):
        raise no_answer(where, "it is no JSON object")
    commit, siblings = answer.get("sha"), answer.get("siblings")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise no_answer(where, "it names no commit")
    if not isinstance(siblings, list):
        raise no_answer(where, "it lists no files")
    return ModelListing.of(model, commit, [_parse_file(where, sibling) for sibling in siblings])


def git_blob_id(content: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def is_contained(path: str) -> bool:
    """Whether a file's path stays inside its model and is written in one way only."""
    return bool(path) and "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def _parse_file(where: Location, sibling: object) -> HubFile:
    path = sibling.get("rfilename") if isinstance(sibling, dict) else None
    if not isinstance(sibling, dict) or not isinstance(path, str) or not is_contained(path):
        raise no_answer(where, f"a file's path is {ascii(path)[:80]}")
    lfs = sibling.get("lfs")
    if isinstance(lfs, dict):
        size_bytes, digest, kind, pattern = lfs.get("size"), lfs.get("sha256"), SHA256, _SHA256
    else:
        size_bytes, digest, kind, pattern = sibling.get("size"), sibling.get("blobId"), GIT, COMMIT
    if type(size_bytes) is not int or size_bytes < 0:
        raise no_answer(where, f"it has no size of '{ascii(path)[1:80]}'")
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        raise no_answer(where, f"it has no digest of '{ascii(path)[1:80]}'")
    return HubFile(str(PurePosixPath(path)), size_bytes, f"{kind}:{digest}")
