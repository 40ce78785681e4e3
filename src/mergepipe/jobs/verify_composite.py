"""Verify a composite of tailor: every written file, by its digest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Final

from mergepipe.checkpoints.formats.strict_json import JsonValue, parse_object
from mergepipe.core.canonical_json import digest_of
from mergepipe.core.values import dataclass
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
class _Recorded:
    name: str
    size_bytes: int
    blake3: str


def is_composite(store: Store, path: Location) -> bool:
    """Whether a directory holds the manifest of a composite."""
    try:
        return f'"format": "{_FORMAT}"'.encode() in store.read_metadata(path / MANIFEST_NAME, 0, _HEAD_BYTES)
    except MergePipeError:
        return False


def verify_composite(
    store: Store, path: Location, threads: int, *, started: float, on_progress: ProgressCallback | None
) -> VerifyReport:
    """Read every file of a composite and compare it with the manifest.

    Raises:
        CorruptError: the manifest is damaged.
    """
    manifest = path / MANIFEST_NAME
    content = parse_object(store.read_small(manifest, MANIFEST_BYTES), where=manifest, code="manifest")
    files = tuple(_recorded(content.get("files"), manifest))
    identity = {"version": content.get("version"), "recipe": content.get("recipe"), "files": content.get("files")}
    sid = digest_of(identity)
    if content.get("sid") != sid:
        message = "its sid is not that of its content"
        raise CorruptError.of("manifest.sid", manifest, message, "compose it again")
    damages: list[Damage] = []
    done, total = 0, sum(file.size_bytes for file in files)
    with ThreadPoolExecutor(max(2, threads), "mergepipe-verify") as pool:
        for file, damage in zip(
            files, pool.map(lambda recorded: _damage_of(store, path, recorded), files), strict=True
        ):
            done += file.size_bytes
            damages.extend([damage] if damage is not None else [])
            if on_progress is not None:
                on_progress(Progress("verify", done, total))
    seconds = time.perf_counter() - started
    return VerifyReport(
        path.local_path if path.is_local else path, sid, len(files), 0, len(files), done, seconds, tuple(damages), ()
    )


def _recorded(value: JsonValue, where: Location) -> Iterator[_Recorded]:
    for item in value if isinstance(value, list) else [None]:
        match item:
            case {"name": str(name), "size_bytes": int(size), "blake3": str(digest)} if _is_inside(name):
                yield _Recorded(name, size, digest)
            case _:
                raise CorruptError.of("manifest.field", where, "'files' is not a list of files", "compose it again")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _damage_of(store: Store, directory: Location, file: _Recorded) -> Damage | None:
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
