"""Find the manifests of snapshots on storage, and read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from mergepipe.errors import MergePipeError, NotFoundError, Problem
from mergepipe.snapshots.manifest import MANIFEST_NAME, InputRecord, Manifest, parse_manifest
from mergepipe.snapshots.recorded_paths import with_absolute_paths
from mergepipe.storage.contract import Store, is_folder
from mergepipe.storage.limits import MANIFEST_BYTES
from mergepipe.storage.location import Location, is_remote


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A manifest that is indexed, and the digest of its file."""

    manifest: Manifest
    digest: str


def read_manifest(store: Store, directory: Path) -> SnapshotRecord:
    """Read the manifest of a snapshot on storage; the paths of its inputs become absolute."""
    path = directory / MANIFEST_NAME
    try:
        raw = store.read_small(Location.local(path), MANIFEST_BYTES)
    except NotFoundError as error:
        raise NotFoundError.of("snapshot.not-found", path, "no such file") from error
    manifest = with_absolute_paths(parse_manifest(raw, path), Location.local(directory))
    return SnapshotRecord(manifest, blake3(raw).hexdigest(16))


def sid_of_unchanged_input(store: Store, source: InputRecord) -> str | None:
    """Return the sid of an input that is a snapshot whose files are unchanged; None otherwise."""
    try:
        if is_remote(source.path):
            return None
        path = Location.parse(source.path)
        root = path if is_folder(store, path) else path.parent
        for file in source.files:
            status = store.stat(root / file.name)
            if status is None or (status.size_bytes, status.version) != (file.size_bytes, file.version):
                return None
        return read_manifest(store, root.local_path).manifest.sid
    except MergePipeError:  # missing, unreadable or not a snapshot
        return None


def find_manifests(roots: Sequence[Path], unreadable: list[Problem]) -> Iterator[Path]:
    """Yield the directories with a manifest at or under `roots`, by name; links and staging are not followed.

    Directories that cannot be listed are appended to `unreadable`.
    """
    for root in roots:
        if not root.is_dir():
            raise NotFoundError.of("storage.not-found", root, "no such directory", "check the path")

    def append_unreadable(error: OSError) -> None:
        unreadable.append(Problem("catalog.skipped", str(error.filename), error.strerror or str(error)))

    for root in roots:
        for directory, children, files in os.walk(root, onerror=append_unreadable):
            children[:] = sorted(name for name in children if not _is_staging(name))
            if MANIFEST_NAME in files:
                yield Path(directory)


def _is_staging(name: str) -> bool:
    return name.startswith(".") and ".mergepipe-" in name
