"""Verify a composite of tailor: every written file, by its digest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from mergepipe.core.canonical_json import digest_of
from mergepipe.core.strict_json import JsonValue, parse_object
from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.reports import Damage, Progress, ProgressCallback, VerifyReport
from mergepipe.snapshots.layout import file_digest
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import MANIFEST_BYTES
from mergepipe.storage.location import Location

_FORMAT: Final = "mergepipe-composite/1"
_HEAD_BYTES = 400


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file of a composite as it was written."""

    name: str
    size_bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class CompositeRecord:
    """The manifest of a composite: its content, and the files that it lists."""

    content: Mapping[str, JsonValue]
    files: tuple[RecordedFile, ...]

    @property
    def sid(self) -> str:
        """The id of the recipe, the version and the files; what `content` says of it was compared."""
        return composite_sid(self.content)


def composite_sid(content: Mapping[str, JsonValue]) -> str:
    """Work out the id that a manifest with this content has."""
    return digest_of({key: content.get(key) for key in ("version", "recipe", "files")})


def is_composite(store: Store, path: Location) -> bool:
    """Whether a directory holds the manifest of a composite."""
    try:
        return f'"format": "{_FORMAT}"'.encode() in store.read_metadata(path / MANIFEST_NAME, 0, _HEAD_BYTES)
    except MergePipeError:
        return False


def read_composite(store: Store, path: Location) -> CompositeRecord:
    """Read the manifest of a composite."""
    manifest = path / MANIFEST_NAME
    content = parse_object(store.read_small(manifest, MANIFEST_BYTES), where=manifest, code="manifest.damaged")
    record = CompositeRecord(content, tuple(_recorded(content.get("files"), manifest)))
    if content.get("sid") != record.sid:
        message = "its sid is not that of its content"
        raise CorruptError.of("manifest.damaged", manifest, message, "compose it again")
    return record


def verify_composite(
    store: Store, path: Location, threads: int, *, started: float, on_progress: ProgressCallback | None
) -> VerifyReport:
    """Read every file of a composite and compare it with the manifest."""
    record = read_composite(store, path)
    files, sid = record.files, record.sid
    damages: list[Damage] = []
    done, total = 0, sum(file.size_bytes for file in files)
    with ThreadPoolExecutor(max(2, threads), "mergepipe-verify") as pool:
        for file, damage in zip(files, pool.map(lambda recorded: damage_of(store, path, recorded), files), strict=True):
            done += file.size_bytes
            damages.extend([damage] if damage is not None else [])
            if on_progress is not None:
                on_progress(Progress("verify", done, total))
    seconds = time.perf_counter() - started
    return VerifyReport(
        path.local_path if path.is_local else path, sid, len(files), 0, len(files), done, seconds, tuple(damages), ()
    )


def _recorded(value: JsonValue, where: Location) -> Iterator[RecordedFile]:
    for item in value if isinstance(value, list) else [None]:
        match item:
            case {"name": str(name), "size_bytes": int(size), "blake3": str(digest)} if _is_inside(name):
                yield RecordedFile(name, size, digest)
            case _:
                raise CorruptError.of("manifest.damaged", where, "'files' is not a list of files", "compose it again")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def damage_of(store: Store, directory: Location, file: RecordedFile) -> Damage | None:
    """Read a file of a composite and say in what it is not what was written; None if it is."""
    try:
        size, digest = file_digest(store, directory / file.name, file.size_bytes)
    except MergePipeError as error:
        return Damage("missing", file.name, "", 0, file.size_bytes, error.problems[0].message)
    if size != file.size_bytes:
        first, last = sorted((size, file.size_bytes))
        return Damage("size", file.name, "", first, last, f"has {size} bytes, {file.size_bytes} were written")
    if digest != file.blake3:
        return Damage("small-file", file.name, "", 0, file.size_bytes, "is not what was written")
    return None
