"""Push a snapshot of this machine to a bucket or to the Hub: visible there whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mergepipe.core.outcome import note_committed
from mergepipe.errors import ConflictError, CorruptError, NotFoundError, OutputError, StorageError, UnsupportedError
from mergepipe.jobs.verify_composite import is_composite
from mergepipe.reports import Progress, ProgressCallback, PushReport
from mergepipe.runs.portable import PortableRecord, portable_record
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.snapshots.layout import read_small_file, small_digest
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest
from mergepipe.snapshots.object_upload import ObjectUpload
from mergepipe.snapshots.overlay.reader import is_overlay
from mergepipe.snapshots.shards import INDEX_NAME
from mergepipe.storage.contract import Store, files_below
from mergepipe.storage.limits import MANIFEST_BYTES
from mergepipe.storage.location import HUB_SCHEME, OBJECT_SCHEMES, Location
from mergepipe.storage.remote.bucket_folder import BucketFolder
from mergepipe.storage.remote.hub_commit import HubRepository
from mergepipe.storage.stores import Stores

_LAST_NAMES = ("config.json", INDEX_NAME)
_WEIGHTS = (".safetensors", ".bin", INDEX_NAME)


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Options of a push: whether a repository of the Hub is created, and whether it is private then."""

    creates: bool = False
    is_private: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Content:
    """The files to push: weight files by name, and the small ones, the manifest apart."""

    record: PortableRecord
    weights: Mapping[str, Path]
    small: Mapping[str, bytes]

    @property
    def manifest(self) -> Manifest:
        return self.record.manifest

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.manifest.files) + sum(map(len, self.small.values()))


def push_snapshot(
    path: Path, destination: Location, request: PushRequest, *, started: float, on_progress: ProgressCallback | None
) -> PushReport:
    """Push the snapshot at `path`; the files of a push that was killed are not uploaded again.

    Raises:
        NotFoundError, CorruptError: a file of the snapshot is gone, or is not what was written.
        UnsupportedError: `push.overlay`, `push.composite`.
        OutputError: `output.store`, `output.exists`, `output.not-ours`.
        ConflictError: `output.busy`, `output.appeared`, `hub.moved`.
        StorageError: the store refuses, or cannot be reached.
    """
    if destination.scheme not in (*OBJECT_SCHEMES, HUB_SCHEME):
        hint = "push to hf://org/name, s3://, gs:// or az://"
        raise OutputError.of("output.store", destination, "no snapshot can be pushed there", hint)
    content = _read_content(Stores(), path)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_progress is not None:
            on_progress(Progress("push", done, content.total_bytes))

    push = _push_to_hub if destination.scheme == HUB_SCHEME else _push_to_bucket
    sent = push(content, destination, request, advance)
    return PushReport(
        snapshot=path,
        destination=destination,
        sid=content.manifest.sid,
        files=len(content.weights) + len(content.small) + 1,
        total_bytes=content.total_bytes,
        kept_bytes=sent.kept_bytes,
        commit=sent.commit,
        replaced_paths=content.record.replaced_paths,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Sent:
    """The bytes that were there already (of a bucket), and the commit (of the Hub)."""

    kept_bytes: int = 0
    commit: str = ""


def _read_content(store: Store, path: Path) -> _Content:
    """Read the small files of a snapshot, each compared with its digest, and look for the large ones."""
    folder = Location.local(path)
    if is_composite(store, folder):
        message, hint = "is a composed training checkpoint, no merge", "copy its files as they are"
        raise UnsupportedError.of("push.composite", path, message, hint)
    manifest = read_manifest_value(store, folder)
    if is_overlay(manifest):
        message, hint = "is an overlay, which needs its base beside it", "`mergepipe materialise` it, and push that"
        raise UnsupportedError.of("push.overlay", path, message, hint)
    for file in manifest.files:
        size_bytes = store.size_bytes(folder / file.name)
        if size_bytes != file.size_bytes:
            message = f"has {size_bytes} bytes, {file.size_bytes} were written"
            raise CorruptError.of("push.damaged", folder / file.name, message, "`mergepipe repair` the snapshot")
    records = (*manifest.sidecars, manifest.blocks)
    small = {record.name: read_small_file(store, folder / record.name, record.size_bytes) for record in records}
    for record in records:
        if small_digest(small[record.name]) != record.blake3:
            message = "is not what was written"
            raise CorruptError.of("push.damaged", folder / record.name, message, "`mergepipe repair` the snapshot")
    blocks = small.pop(manifest.blocks.name)
    portable = portable_record(manifest, small, path)
    weights = {file.name: path / file.name for file in manifest.files}
    return _Content(portable, weights, {**portable.small, manifest.blocks.name: blocks})


def _push_to_bucket(
    content: _Content, destination: Location, request: PushRequest, advance: Callable[[int], None]
) -> _Sent:
    del request
    manifest = content.manifest
    with ObjectUpload(BucketFolder(destination)) as upload:
        for file in manifest.files:
            upload.send(file.name, content.weights[file.name], file.blake3)
            advance(file.size_bytes)
        for name in sorted(content.small, key=lambda name: (name in _LAST_NAMES, name)):
            upload.send(name, content.small[name], small_digest(content.small[name]))
            advance(len(content.small[name]))
        sizes = {file.name: file.size_bytes for file in manifest.files}
        upload.commit(manifest.to_json(), sizes | {name: len(raw) for name, raw in content.small.items()})
    return _Sent(kept_bytes=upload.kept_bytes)


def _push_to_hub(
    content: _Content, destination: Location, request: PushRequest, advance: Callable[[int], None]
) -> _Sent:
    repository = HubRepository(destination)
    if request.creates:
        repository.create(is_private=request.is_private)
    parent = repository.head()
    manifest = content.manifest.to_json()
    files: dict[str, bytes | Path] = {**content.weights, **content.small, MANIFEST_NAME: manifest}
    sizes = {file.name: file.size_bytes for file in content.manifest.files}
    sizes |= {name: len(raw) for name, raw in content.small.items()}
    replaced = _replaced_names(destination.with_revision(parent))
    message = request.message or f"Merge by {content.manifest.operator} (mergepipe {content.manifest.version})"
    deleted = sorted(replaced - files.keys())
    try:
        commit = repository.commit(files, deleted, parent, message, lambda name: advance(sizes.get(name, 0)))
    except (ConflictError, StorageError):
        commit = repository.head()
        if commit == parent or not _holds(destination.with_revision(commit), manifest):
            raise
    note_committed(destination)
    return _Sent(commit=commit)


def _holds(place: Location, manifest: bytes) -> bool:
    """Whether a commit holds our manifest: then it is ours, whose answer was lost."""
    try:
        return Stores().read_small(place / MANIFEST_NAME, MANIFEST_BYTES) == manifest
    except NotFoundError:
        return False


def _replaced_names(place: Location) -> set[str]:
    """The files of the snapshot that a repository holds by now, which the new one takes the place of.

    Raises:
        OutputError: `output.not-ours`, it holds weights that no snapshot of ours lists.
    """
    store = Stores()
    try:
        names = set(files_below(store, place))
    except NotFoundError:  # no such folder in the repository
        return set()
    listed: set[str] = set()
    if MANIFEST_NAME in names:
        earlier = read_manifest_value(store, place)
        listed = {file.name for file in earlier.files} | {record.name for record in earlier.sidecars}
        listed |= {earlier.blocks.name, MANIFEST_NAME}
    weights = sorted(name for name in names - listed if "/" not in name and name.endswith(_WEIGHTS))
    if weights:
        message = f"holds weights that are no snapshot of mergepipe's: {weights[0]}"
        raise OutputError.of("output.not-ours", place, message, "push to another repository, folder or branch")
    return listed & names
