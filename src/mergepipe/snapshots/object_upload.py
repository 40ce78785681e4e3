"""Publish a snapshot or a packed expert in a bucket: its objects first, its record last, by a put that succeeds once.

On the Hub large files come first, then one commit with all the rest.

The record (the manifest of a snapshot, the header of a packed expert) is what makes a prefix one of these; until it is
there a marker names the process that writes. Of two that want to write at one place the marker lets one pass, and
objects that a dead one left are used if they have the digest that is wanted.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias

import mergepipe
from mergepipe.checkpoints.directory import STORE_HEADER_NAME
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.outcome import note_committed
from mergepipe.core.records import RecordFormat
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import (
    ConflictError,
    CorruptError,
    MergePipeError,
    NotFoundError,
    OutputError,
    RecipeError,
    StorageError,
    UnsupportedError,
)
from mergepipe.snapshots.layout import read_small_file, small_digest
from mergepipe.snapshots.manifest import (
    MANIFEST_NAME,
    Manifest,
    file_without_paths,
    is_composite,
    parse_manifest,
    read_composite,
    relative_reference,
    with_absolute_paths,
    with_changed_paths,
)
from mergepipe.snapshots.shards import INDEX_NAME
from mergepipe.storage.contract import MANIFEST_BYTES, OWNER_BYTES, Digested, Store, files_below
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.owned import PARTS_MARK
from mergepipe.storage.owners import SILENCE_SECONDS as STAGING_SILENCE_SECONDS
from mergepipe.storage.owners import Owner, is_alive, this_process
from mergepipe.storage.remote.hub_commit import HubRepository
from mergepipe.storage.remote.objects import BucketFolder, ObjectFacts
from mergepipe.storage.stores import Stores

MARKER_NAME: Final = ".mergepipe-upload.json"
UPLOADS_NAME: Final = "uploads"
"""The folder of the catalog's home in which outputs for buckets are staged."""
SILENCE_SECONDS: Final = 24 * 3600.0
"""A process of another machine is taken for dead after so long without a new object."""
LAST_NAMES: Final = (CONFIG_NAME, INDEX_NAME)
"""What loaders look for first is sent last."""
_RECORD_ATTEMPTS: Final = 3
_PROBE_PREFIX: Final = ".mergepipe-probe-"
_active: set[str] = set()  # the uploads of this process


@dataclass(frozen=True, slots=True)
class _Marker:
    """The marker of an upload: its own id, the process that makes it, and the name of the record it ends with."""

    upload: str
    owner: Owner
    record_name: str = MANIFEST_NAME

    def to_record(self) -> bytes:
        return _MARKER_FORMAT.to_json(self)

    def may_be_alive(self, silent_seconds: float, silence_seconds: float = SILENCE_SECONDS) -> bool:
        """Whether the process may still write; of another machine, none is trusted to be dead before long."""
        if self.owner == this_process():
            return self.upload in _active
        return is_alive(self.owner, 0.0) and (is_alive(self.owner, float("inf")) or silent_seconds < silence_seconds)


_MARKER_FORMAT: Final = RecordFormat("mergepipe-upload", 2, _Marker, "run again")


@dataclass(frozen=True, slots=True)
class ObjectContent:
    """The content of an object: its bytes or the file that has them, how many they are, and a digest of them."""

    source: bytes | Path
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class OutputContent:
    """A finished output as others get it: its record, and its other objects by name."""

    record_name: str
    record: bytes
    objects: Mapping[str, ObjectContent]

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """The sizes of the objects, the record apart."""
        return {name: content.size_bytes for name, content in self.objects.items()}

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes_bytes.values())

    def send_by(self, upload: Upload, advance: Callable[[int], None] = lambda _: None) -> None:
        """Publish it, calling `advance` with the bytes of each object; raises as the methods of the upload."""
        for name, content in sorted(self.objects.items(), key=lambda entry: entry[0] in LAST_NAMES):
            upload.send(name, content.source, content.digest)
            advance(content.size_bytes)
        upload.commit(self.record, self.sizes_bytes)


def published_snapshot(store: Store, path: Path) -> tuple[Manifest, OutputContent]:
    """Return a finished snapshot of a folder as others get it: without paths of this machine.

    Small files are compared with their digests, of large ones the size.
    """
    folder = Location.local(path)
    place = folder / MANIFEST_NAME
    manifest = with_absolute_paths(parse_manifest(store.read_small(place, MANIFEST_BYTES), place), folder)
    if not manifest.files:
        hint = "upload the file itself: `hf upload org/name FILE`"
        raise UnsupportedError.of("model.unsupported", path, "is the record of a GGUF file", hint)
    for file in manifest.files:
        size_bytes = store.size_bytes(folder / file.name)
        if size_bytes != file.size_bytes:
            message = f"has {size_bytes} bytes, {file.size_bytes} were written"
            raise CorruptError.of("snapshot.damaged", folder / file.name, message, "`mergepipe repair` the snapshot")
    records = (*manifest.sidecars, manifest.blocks)
    small = {record.name: read_small_file(store, folder / record.name, record.size_bytes) for record in records}
    for record in records:
        if small_digest(small[record.name]) != record.blake3:
            message = "differs from what was written"
            raise CorruptError.of("snapshot.damaged", folder / record.name, message, "`mergepipe repair` the snapshot")
    small = {name: file_without_paths(name, raw) for name, raw in small.items()}
    sidecars = tuple(Digested.of(record.name, small[record.name]) for record in manifest.sidecars)
    files = zip(manifest.in_folder().files, manifest.files, strict=True)
    objects = {to.name: ObjectContent(path / file.name, file.size_bytes, file.blake3) for to, file in files}
    objects |= {name: ObjectContent(small[name], len(small[name]), small_digest(small[name])) for name in sorted(small)}
    copy = replace(manifest.in_folder(), sidecars=sidecars)
    copy = with_changed_paths(copy, lambda text: relative_reference(text, None))
    return copy, OutputContent(MANIFEST_NAME, copy.to_json(), objects)


class ObjectUpload:
    """One upload to a prefix, complete with the object `record_name`. A context manager: left without `commit`, nothing
    is visible.

    What was sent stays for the next run; the marker goes only if nothing was.
    """

    def __init__(
        self, folder: BucketFolder, record_name: str = MANIFEST_NAME, *, completes_parts: bool = False
    ) -> None:
        """With `completes_parts` the shards, and records of them, lie there: only small files are uploaded."""
        self._folder = folder
        self.completes_parts = completes_parts
        self._record_name = record_name
        self._marker = _Marker(uuid.uuid4().hex, this_process(), record_name)
        self.sent_bytes = 0
        self.kept_bytes = 0

    def __enter__(self) -> ObjectUpload:
        """Claim the prefix."""
        self._check_unpublished()
        self._check_conditions()
        _active.add(self._marker.upload)
        try:
            if not self._folder.create(MARKER_NAME, self._marker.to_record()):
                silence_seconds = STAGING_SILENCE_SECONDS if self.completes_parts else SILENCE_SECONDS
                _take_over(self._folder, self._marker, silence_seconds)
            elif not self.completes_parts:
                self._check_alone()
            else:
                self._check_unpublished()  # another process may have published between the first look and the claim
        except BaseException as error:
            self.__exit__(None, error if self.completes_parts else None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None:
                self._leave(error)
        finally:
            _active.discard(self._marker.upload)

    def _check_unpublished(self) -> None:
        if self._folder.look(self._record_name) is not None:
            raise _exists(self._folder, self._record_name)

    def has(self, name: str, digest: str, size_bytes: int) -> bool:
        """Whether an object of this digest is there."""
        facts = self._folder.look(name)
        return facts is not None and (facts.digest, facts.size_bytes) == (digest, size_bytes)

    def send(self, name: str, content: bytes | Path, digest: str) -> str:
        """Write an object, unless it is there already; return the digest by which `has` finds it."""
        is_small = isinstance(content, bytes)
        nbytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        if is_small and self._folder.create(name, content, digest):
            self.sent_bytes += nbytes
            return digest
        facts = self._folder.look(name)
        if facts is not None and (facts.digest, facts.size_bytes) == (digest, nbytes):
            self.kept_bytes += nbytes
            return digest
        if facts is not None or not self._folder.create(name, content, digest):
            self._check_ours()
            self._folder.overwrite(name, content, digest)
        self.sent_bytes += nbytes
        return digest

    def commit(self, record: bytes, sizes: Mapping[str, int]) -> None:
        """Make the output visible by its record: `sizes` are those of all its other objects."""
        self._check_ours()
        listing = self._folder.list_all()
        for name, size_bytes in sizes.items():
            if name not in listing or listing[name].size_bytes != size_bytes:
                message = f"{name} is not there as it was uploaded: somebody else deleted or replaced it"
                raise StorageError.of("output.incomplete", self._folder.location, message, "run again")
        for name in _own_names(listing):
            if name not in sizes and name != MARKER_NAME and _is_ours(self._folder, name):
                self._folder.delete(name)
        self._create_record(record)
        note_committed(self._folder.location)
        try:
            self._folder.delete(MARKER_NAME)
        except MergePipeError:  # harmless beside a record
            return

    def _create_record(self, record: bytes) -> None:
        """Create the record; where the answer was lost, or was that of a repeated request, what is there decides.

        S3 also refuses (409) beside another request for the same name, which may write nothing: then it is tried again.
        """
        for _ in range(_RECORD_ATTEMPTS):
            failure: StorageError | None = None
            try:
                if self._folder.create(self._record_name, record, small_digest(record)):
                    return
            except StorageError as error:
                failure = error
            there = self._folder.read(self._record_name, len(record) + 1)
            if there == record:
                return
            if failure is not None:
                raise failure
            if there is not None:
                raise self._appeared("another output was published there")
        raise _busy(self._folder, "another process")

    def _check_conditions(self) -> None:
        """Refuse a store that ignores conditions: of two writers, both would be told that they succeeded."""
        probe = f"{_PROBE_PREFIX}{self._marker.upload}"
        self._folder.create(probe, b"1")
        is_ignored = self._folder.create(probe, b"2")
        self._folder.delete(probe)
        if is_ignored:
            raise no_conditions(self._folder.location)

    def _check_alone(self) -> None:
        """Refuse a prefix under which something else lies."""
        try:
            check_unused(self._folder, (MARKER_NAME, _PROBE_PREFIX), self._record_name)
        except MergePipeError:
            self._folder.delete(MARKER_NAME)
            raise

    def _check_ours(self) -> None:
        content = self._folder.read(MARKER_NAME, OWNER_BYTES)
        if content != self._marker.to_record():
            raise self._appeared("another process took the prefix over")

    def _leave(self, error: BaseException) -> None:
        """After a failure, remove the marker if nothing else is there, or who completes parts may do so at once."""
        try:
            if self.completes_parts:
                self._check_ours()
                self._folder.delete(MARKER_NAME)
                return
            listing = self._folder.list_all()
            if self._record_name in listing:
                return
            if set(listing) <= {MARKER_NAME}:
                self._check_ours()
                self._folder.delete(MARKER_NAME)
                return
        except MergePipeError:
            return
        error.add_note("what is uploaded stays: the same command continues; to give up, delete the prefix")

    def _appeared(self, message: str) -> MergePipeError:
        hint = "use what is there, or choose another prefix"
        return ConflictError.of("output.changed", self._folder.location, message, hint)


def staging_place(destination: Location, home: Path) -> Path:
    """The output of this machine in whose staging directory the one for a bucket grows: one for each destination."""
    return home / UPLOADS_NAME / f"{destination.model_name}-{digest_of(str(destination))[:12]}"


def check_apart(destination: Location, inputs: Iterable[Location]) -> None:
    """Refuse an output in or around an input."""
    for source in inputs:
        if destination.is_relative_to(source) or source.is_relative_to(destination):
            message, hint = f"overlaps the input {source}", "choose a prefix apart from every input"
            raise OutputError.of("output.place", destination, message, hint)


def check_replaceable(destination: Location, *, force: bool) -> None:
    """Refuse to replace what is in a bucket; an output of the Hub is replaced by a commit."""
    if force and destination.scheme != HUB_SCHEME:
        message = f"a snapshot in a bucket is never replaced ({destination}): a reader would get parts of two"
        hint = "choose another prefix, and delete the old one when it is no longer read"
        raise RecipeError.of("option.conflict", "--force", message, hint)


def no_conditions(location: Location) -> MergePipeError:
    """Return the error of a store in which outputs cannot be made."""
    return UnsupportedError.of(
        "output.unsupported",
        location,
        "its store ignores conditional puts (If-None-Match), so that no output there is safe from another run",
        "merge into a folder and copy it there, or use a store that has them",
    )


def _take_over(folder: BucketFolder, marker: _Marker, silence_seconds: float) -> None:
    """Put our marker in the place of a dead run's."""
    facts = folder.look(MARKER_NAME)
    earlier = _read_marker(folder)
    if facts is None:
        raise _busy(folder, "another process")
    if earlier is None:
        message = f"its {MARKER_NAME} is no record of an upload"
        raise OutputError.of("output.not-ours", folder.location, message, "choose another prefix, or remove it")
    listing, now = folder.list_all(), datetime.now(UTC)
    silent_seconds = min((listing[name].age_seconds(now) for name in _own_names(listing)), default=0.0)
    if earlier.may_be_alive(silent_seconds, silence_seconds):
        raise _busy(folder, str(earlier.owner))
    if not folder.exchange(MARKER_NAME, marker.to_record(), facts):
        raise _busy(folder, "another process")


def check_unused(folder: BucketFolder, own_starts: tuple[str, ...], record_name: str = MANIFEST_NAME) -> None:
    """Raise if the prefix holds objects that are not ours: their names start otherwise."""
    strangers = [name for name in folder.list_all() if not name.startswith(own_starts)]
    if record_name in strangers:
        raise _exists(folder, record_name)
    if MARKER_NAME in strangers:
        raise _busy(folder, "another process")
    if strangers:
        message = f"holds {len(strangers)} objects that do not belong to this output, {strangers[0]} among them"
        raise OutputError.of("output.not-ours", folder.location, message, "choose another prefix")


def _exists(folder: BucketFolder, record_name: str) -> MergePipeError:
    kind = "snapshot" if record_name == MANIFEST_NAME else "packed expert"
    message = f"holds a {kind} already, and one in a bucket is never replaced"
    return OutputError.of("output.exists", folder.location, message, "choose another prefix")


def _busy(folder: BucketFolder, who: str) -> MergePipeError:
    return ConflictError.of(
        "output.busy",
        folder.location,
        f"is being made by {who}",
        "wait for it, or choose another prefix; after a crash of its machine, delete the prefix",
    )


def _read_marker(folder: BucketFolder) -> _Marker | None:
    """The marker of a prefix; None where there is none of this format, or it was changed."""
    raw = folder.read(MARKER_NAME, OWNER_BYTES)
    with contextlib.suppress(CorruptError, UnsupportedError):
        return None if raw is None else _MARKER_FORMAT.parse(raw, MARKER_NAME)
    return None


def _own_names(listing: Mapping[str, ObjectFacts]) -> list[str]:
    """The names that belong to the folder itself, not to an output or upload below it."""
    ends = (MANIFEST_NAME, STORE_HEADER_NAME, MARKER_NAME)
    below = {str(PurePosixPath(name).parent) for name in listing if PurePosixPath(name).name in ends} - {"."}
    return [name for name in listing if not below & {str(parent) for parent in PurePosixPath(name).parents}]


def _is_ours(folder: BucketFolder, name: str) -> bool:
    """Whether an upload of ours wrote an object."""
    if name.startswith(PARTS_MARK):
        return False
    if PurePosixPath(name).name.startswith(_PROBE_PREFIX):
        return True
    facts = folder.look(name)
    return facts is not None and bool(facts.digest)


# --- the Hub: what the commit of an earlier output holds is replaced, and nothing of other origin is ---


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
            message = f"holds weights that MergePipe did not make: {weights[0]}"
            hint = "use another repository, folder or branch"
            raise OutputError.of("output.not-ours", place, message, hint)
        return listed & names


Upload: TypeAlias = ObjectUpload | HubUpload
"""An output on its way to a bucket or to the Hub."""


def open_upload(location: Location, *, force: bool, message: str = "") -> Upload:
    """Open the upload of a snapshot or composite to a bucket or to the Hub; `force` has a meaning for the Hub alone."""
    if location.scheme == HUB_SCHEME:
        return HubUpload(location, force=force, message=message)
    return ObjectUpload(BucketFolder(location))
