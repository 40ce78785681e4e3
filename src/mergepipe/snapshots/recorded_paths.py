"""Write the paths of a manifest so that they hold wherever the snapshot lies, and read them back as absolute ones.

A reference is `path` or `path+adapter`, as `reference_text` writes it. Relative parts begin with `./` or `../`.
Law: `absolute_reference(relative_reference(text, folder), Location.local(folder)) == text` for normal paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from mergepipe.snapshots.manifest import Manifest
from mergepipe.storage.location import Location

_RELATIVE_STARTS = ("./", "../")
_RELATIVE_WHOLES = (".", "..")


def relative_reference(text: str, folder: Path | None) -> str:
    """Write the absolute local paths of a reference relative to a snapshot's `folder`; remote locations stay.

    Without a folder the snapshot goes to another machine: of a path its last name is left, as if beside the snapshot.
    """
    real_folder = None if folder is None else os.path.realpath(folder)
    return _by_part(text, lambda part: _relative(part, real_folder) if part.startswith("/") else part)


def absolute_reference(text: str, directory: Location) -> str:
    """Resolve the relative paths of a reference against the folder of a snapshot, wherever it lies."""
    folder = Location.local(Path(os.path.realpath(directory.path))) if directory.is_local else directory
    return _by_part(text, lambda part: _absolute(part, folder) if is_relative_part(part) else part)


def is_relative_part(text: str) -> bool:
    """Whether a part of a reference is a relative path."""
    return text.startswith(_RELATIVE_STARTS) or text in _RELATIVE_WHOLES


def with_changed_paths(manifest: Manifest, change: Callable[[str], str]) -> Manifest:
    """Return the manifest with every path of an input changed, also those in its plan, which no digest covers."""
    inputs = tuple(replace(record, path=change(record.path)) for record in manifest.inputs)
    return replace(manifest, inputs=inputs, plan=_plan_with_paths(manifest.plan, change))


def with_absolute_paths(manifest: Manifest, directory: Location) -> Manifest:
    """Return the manifest that was read from a snapshot at `directory` with absolute paths."""
    return with_changed_paths(manifest, lambda text: absolute_reference(text, directory))


def _plan_with_paths(plan: Mapping[str, object] | None, change: Callable[[str], str]) -> Mapping[str, object] | None:
    """Change the paths of a plan's models and of the snapshots that it reuses."""
    if plan is None:
        return None
    changed = dict(plan)
    for key in ("models", "reuse"):
        records = changed.get(key)
        if isinstance(records, list | tuple):
            changed[key] = [_record_with_path(record, change) for record in records]
    return changed


def _record_with_path(record: object, change: Callable[[str], str]) -> object:
    if isinstance(record, Mapping) and isinstance(record.get("path"), str):
        return {**record, "path": change(record["path"])}
    return record


def _by_part(text: str, change: Callable[[str], str]) -> str:
    return "+".join(change(part) for part in text.split("+"))


def _relative(part: str, folder: str | None) -> str:
    if folder is None:
        return f"../{PurePosixPath(part).name}"
    relative = os.path.relpath(part, folder)
    return relative if is_relative_part(relative) else f"./{relative}"


def _absolute(part: str, folder: Location) -> str:
    return str((folder / part).normal())
