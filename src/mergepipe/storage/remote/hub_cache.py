"""The local cache of the Hugging Face tools, read as it lies: references, snapshots and blobs of models.

    models--ORG--NAME/refs/BRANCH           the commit that a branch or tag led to when it was last downloaded
    models--ORG--NAME/snapshots/COMMIT/...  the files of a commit as far as they were downloaded, as links to blobs
    models--ORG--NAME/blobs/DIGEST          the content of files, named by SHA-256 (large files) or git's blob id

A blob gets its name only when it is whole. It may itself be a link, into a store that models share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mergepipe.storage.file_version import version_of
from mergepipe.storage.remote.hub_listing import COMMIT, GIT, SHA256, HubFile, ModelListing, is_contained
from mergepipe.storage.remote.hub_names import bare_name

_REFERENCE_LIMIT_BYTES = 1 << 10
_KIND_OF_LENGTH = {64: SHA256, 40: GIT}


@dataclass(frozen=True, slots=True)
class HubCache:
    """The cache in `folder`, which need not exist. Nothing is ever written to it."""

    folder: Path

    def commit_of(self, model: str, revision: str) -> str | None:
        """The commit of a branch, tag or commit, as far as the cache knows it."""
        if COMMIT.fullmatch(revision):
            return revision if (self._model_folder(model) / "snapshots" / revision).is_dir() else None
        if not is_contained(revision):
            return None
        try:
            with (self._model_folder(model) / "refs" / revision).open("rb") as file:
                commit = file.read(_REFERENCE_LIMIT_BYTES).decode("ascii", "replace").strip()
        except OSError:
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def listing(self, model: str, commit: str) -> ModelListing | None:
        """The files of a commit that the cache holds; None where it holds none."""
        snapshot = self._model_folder(model) / "snapshots" / commit
        files = [file for path in _paths_below(snapshot) if (file := _described(snapshot, path)) is not None]
        return ModelListing.of(model, commit, files) if files else None

    def path_of(self, model: str, commit: str, file: HubFile) -> Path | None:
        """Return the cached file, by its digest or by its commit, path and size; None where it is not cached."""
        model_folder = self._model_folder(model)
        in_snapshot = model_folder / "snapshots" / commit / file.path
        if _size_bytes(in_snapshot) == file.size_bytes and _linked_blob(in_snapshot) in (None, file.content_id):
            return in_snapshot
        blob = model_folder / "blobs" / file.content_id
        is_digest = file.version.partition(":")[0] in (SHA256, GIT)
        return blob if is_digest and _size_bytes(blob) == file.size_bytes else None

    def _model_folder(self, model: str) -> Path:
        folder, name = self.folder / f"models--{model.replace('/', '--')}", bare_name(model)
        return folder if name is None or folder.is_dir() else self.folder / f"models--{name}"


def _paths_below(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            yield (Path(parent) / name).relative_to(folder).as_posix()


def _described(snapshot: Path, path: str) -> HubFile | None:
    """Describe a file of a snapshot; None where its blob is missing."""
    place = snapshot / path
    size_bytes = _size_bytes(place)
    if size_bytes is None:
        return None
    digest = _linked_blob(place) or ""
    kind = _KIND_OF_LENGTH.get(len(digest))
    if kind is None:  # a cache on a file system without links holds plain files
        return HubFile(path, size_bytes, f"file:{version_of(place, place.stat())}")
    return HubFile(path, size_bytes, f"{kind}:{digest}")


def _linked_blob(place: Path) -> str | None:
    """The name of the blob that a file of a snapshot links to; None for a plain file."""
    try:
        return place.readlink().name
    except OSError:
        return None


def _size_bytes(place: Path) -> int | None:
    """The size of a regular file, links followed; None where there is none."""
    try:
        return place.stat().st_size if place.is_file() else None
    except (OSError, ValueError):
        return None
