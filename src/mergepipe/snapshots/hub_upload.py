"""Publish a snapshot, a composite or a packed expert on the Hub: large files first, then one commit with all the rest.

What the commit of an earlier output holds is replaced by it, and nothing of other origin is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import mergepipe
from mergepipe.checkpoints.directory import STORE_HEADER_NAME
from mergepipe.core.outcome import note_committed
from mergepipe.errors import ConflictError, NotFoundError, OutputError, StorageError
from mergepipe.snapshots.composite import is_composite, read_composite
from mergepipe.snapshots.manifest import MANIFEST_NAME, parse_manifest
from mergepipe.snapshots.object_upload import ObjectUpload
from mergepipe.snapshots.shards import INDEX_NAME
from mergepipe.storage.contract import Store, files_below
from mergepipe.storage.limits import MANIFEST_BYTES
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.remote.bucket_folder import BucketFolder
from mergepipe.storage.remote.hub_commit import HubRepository
from mergepipe.storage.stores import Stores

_WEIGHTS: Final = (".safetensors", ".bin", INDEX_NAME, STORE_HEADER_NAME)


class HubUpload:
    """One commit to a branch of the Hub, used as an `ObjectUpload` is. Left without `commit`, nothing is visible.

    The Hub keeps a large file that no commit has added for about a day. `packed_names` tells which files of a folder
    are those of a packed expert. Every method raises as those of `HubRepository`.
    """

    def __init__(
        self,
        location: Location,
        record_name: str = MANIFEST_NAME,
        *,
        force: bool,
        message: str = "",
        packed_names: Callable[[Store, Location], set[str]] = lambda _store, _place: set(),
    ) -> None:
        """Refuse to write without a token; makes no request."""
        self._location = location
        self._record_name = record_name
        self._force = force
        self._message = message or f"Merge (mergepipe {mergepipe.__version__})"
        self._packed_names = packed_names
        self._repository = HubRepository(location)
        self._small: dict[str, bytes] = {}
        self.commit_id = ""
        self.sent_bytes = self.kept_bytes = 0

    def __enter__(self) -> HubUpload:
        """Remember what the branch leads to, and refuse what may not be replaced."""
        self._parent = self._repository.head()
        self._replaced = self._replaced_names(self._location.with_revision(self._parent))
        if self._replaced and not self._force:
            hint = "choose another repository, folder or branch, or replace it in one commit with --force"
            raise OutputError.of("output.exists", self._location, "holds an output already", hint)
        self._repository.check_writable()
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: what was uploaded is used by the next run, or forgotten by the Hub."""

    def has(self, name: str, digest: str, size_bytes: int) -> bool:
        """Whether a large file is there that an earlier run sent as `digest`; then `commit` adds it."""
        return self._repository.holds(name, digest, size_bytes)

    def send(self, name: str, content: bytes | Path, digest: str) -> str:
        """Upload a file unless it is there, or keep a small one for the commit; return its SHA-256 or `digest`."""
        if isinstance(content, bytes):
            self.sent_bytes += len(content)
            self._small[name] = content
            return digest
        self.sent_bytes += content.stat().st_size
        return self._repository.upload(name, content)

    def commit(self, record: bytes, sizes: Mapping[str, int]) -> None:
        """Make the output visible; where the answer is lost, what is there decides. `sizes` are those of all files."""
        deleted = sorted(self._replaced - sizes.keys() - {self._record_name})
        files = {**self._small, self._record_name: record}
        try:
            self.commit_id = self._repository.commit(files, deleted, self._parent, self._message)
        except (ConflictError, StorageError):
            self.commit_id = self._repository.head()
            if self.commit_id == self._parent or not self._holds(record):
                raise
        note_committed(self._location)

    def _holds(self, record: bytes) -> bool:
        """Whether the branch holds our record: then the commit is ours."""
        place = self._location.with_revision(self.commit_id) / self._record_name
        try:
            return Stores().read_small(place, len(record)) == record
        except NotFoundError:
            return False

    def _replaced_names(self, place: Location) -> set[str]:
        """The files of the output that the folder holds by now."""
        store = Stores()
        try:
            names = set(files_below(store, place))
        except NotFoundError:  # no such folder in the repository
            return set()
        listed: set[str] = set()
        if MANIFEST_NAME in names and is_composite(store, place):
            listed = {MANIFEST_NAME, *(file.name for file in read_composite(store, place).files)}
        elif MANIFEST_NAME in names:
            path = place / MANIFEST_NAME
            earlier = parse_manifest(store.read_small(path, MANIFEST_BYTES), path)
            records = (*earlier.files, *earlier.sidecars, earlier.blocks)
            listed = {MANIFEST_NAME, *(record.name for record in records)}
        if STORE_HEADER_NAME in names:
            listed |= self._packed_names(store, place)
        weights = sorted(name for name in names - listed if "/" not in name and name.endswith(_WEIGHTS))
        if weights:
            message = f"holds weights that are no output of mergepipe: {weights[0]}"
            hint = "use another repository, folder or branch"
            raise OutputError.of("output.not-ours", place, message, hint)
        return listed & names


def open_upload(location: Location, *, force: bool, message: str = "") -> ObjectUpload | HubUpload:
    """Open the upload of a snapshot or composite to a bucket or to the Hub; `force` has a meaning for the Hub alone."""
    if location.scheme == HUB_SCHEME:
        return HubUpload(location, force=force, message=message)
    return ObjectUpload(BucketFolder(location))
