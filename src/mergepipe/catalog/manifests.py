"""Find snapshot manifests on storage, validate them, and extract what the catalog indexes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from blake3 import blake3

from mergepipe.core.canonical_json import canonical_json
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, Problem
from mergepipe.snapshots.manifest import MANIFEST_NAME, RealizedBytes
from mergepipe.snapshots.manifest_json import check_format
from mergepipe.snapshots.recorded_paths import absolute_reference
from mergepipe.storage.contract import Store, is_folder
from mergepipe.storage.limits import MANIFEST_BYTES
from mergepipe.storage.location import Location, is_remote

_HEX_DIGITS = frozenset("0123456789abcdef")
_SID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file of an input as the manifest records it; `name` is relative to the input."""

    name: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class RecordedInput:
    """An input as the manifest records it."""

    role: str
    model: str
    path: str
    content_id: str | None
    read_bytes: int
    files: tuple[RecordedFile, ...]


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """The indexed fields of one manifest. `coverage` is canonical JSON, None if the manifest has none."""

    sid: str
    operator: str
    plan_digest: str | None
    manifest_digest: str
    realized: RealizedBytes
    inputs: tuple[RecordedInput, ...]
    coverage: str | None


def parse_manifest(raw: bytes, where: Path) -> SnapshotRecord:
    """Parse and validate the indexed fields of a manifest."""
    content = _Fields(parse_object(raw, where=where, code="manifest.damaged"), where)
    check_format(content.text("format"), where)
    sid = content.text("sid")
    if len(sid) != _SID_DIGITS or not set(sid) <= _HEX_DIGITS:
        content.refuse(f"'sid' must be {_SID_DIGITS} hex digits, found {shown(sid)}")
    realized = content.inner("realized")
    return SnapshotRecord(
        sid=sid,
        operator=content.text("operator"),
        plan_digest=content.optional_text("plan_digest"),
        manifest_digest=blake3(raw).hexdigest(16),
        realized=RealizedBytes(
            base=realized.size("base"),
            expert=realized.size("expert"),
            analysis=realized.size("analysis"),
            metadata=realized.size("metadata"),
            output=realized.size("output"),
        ),
        inputs=tuple(_recorded_input(item) for item in content.items("inputs")),
        coverage=content.optional_json("coverage"),
    )


def _recorded_input(fields: _Fields) -> RecordedInput:
    return RecordedInput(
        role=fields.text("role"),
        model=fields.text("model"),
        path=fields.text("path"),
        content_id=fields.optional_text("content_id"),
        read_bytes=fields.size("read_bytes"),
        files=tuple(
            RecordedFile(file.text("name"), file.size("size_bytes"), file.text("version"))
            for file in fields.items("files")
        ),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """One JSON object of a manifest, with typed access to its fields."""

    values: dict[str, JsonValue]
    where: Path

    def refuse(self, message: str) -> NoReturn:
        raise CorruptError.of("manifest.damaged", self.where, message)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or "\0" in value:
            self.refuse(f"'{name}' must be a string, found {shown(value)}")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.values.get(name) is None else self.text(name)

    def optional_json(self, name: str) -> str | None:
        value = self.values.get(name)
        return None if value is None else canonical_json(value).decode()

    def integer(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
            self.refuse(f"'{name}' must be an integer of 64 bits, found {shown(value)}")
        return value

    def size(self, name: str) -> int:
        value = self.integer(name)
        if value < 0:
            self.refuse(f"'{name}' must not be negative, found {value}")
        return value

    def inner(self, name: str) -> _Fields:
        return self._object(name, self.values.get(name))

    def items(self, name: str) -> Iterator[_Fields]:
        value = self.values.get(name)
        if not isinstance(value, list):
            self.refuse(f"'{name}' must be a list, found {shown(value)}")
        return (self._object(name, item) for item in value)

    def _object(self, name: str, value: JsonValue) -> _Fields:
        if not isinstance(value, dict):
            self.refuse(f"'{name}' must hold objects, found {shown(value)}")
        return _Fields(value, self.where)


def read_manifest(store: Store, directory: Path) -> SnapshotRecord:
    """Read the manifest of a snapshot on storage; the paths of its inputs become absolute."""
    path = directory / MANIFEST_NAME
    try:
        raw = store.read_small(Location.local(path), MANIFEST_BYTES)
    except NotFoundError as error:
        raise NotFoundError.of("snapshot.not-found", path, "no such file") from error
    record = parse_manifest(raw, path)
    inputs = tuple(
        replace(source, path=absolute_reference(source.path, Location.local(directory))) for source in record.inputs
    )
    return replace(record, inputs=inputs)


def sid_of_unchanged_input(store: Store, source: RecordedInput) -> str | None:
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
        return read_manifest(store, root.local_path).sid
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
