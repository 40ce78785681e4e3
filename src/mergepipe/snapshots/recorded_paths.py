"""Keep paths of this machine out of what is written: records hold relative ones, other files last names.

A reference is `path` or `path+adapter`, as `reference_text` writes it. Relative parts begin with `./` or `../`.
Law: `absolute_reference(relative_reference(text, folder), Location.local(folder)) == text` for normal paths.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from mergepipe.core.strict_json import JsonValue
from mergepipe.snapshots.manifest import Manifest
from mergepipe.storage.location import Location

CACHED_MODEL = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/|$)")
"""A folder in the cache of the Hub's tools."""
_RELATIVE_STARTS = ("./", "../")
_RELATIVE_WHOLES = (".", "..")
_JSON_STRING = re.compile(rb'"((?:[^"\\]++|\\.)*+)(?:"|\Z)(\s*+:)?', re.DOTALL)
_MAY_BE_PATH = re.compile(rb"/|~|file:|[A-Za-z]:|\\")
_ABSOLUTE = re.compile(r"(?:file://)?(?:/|~[^/\\]*/|[A-Za-z]:[\\/]|\\\\)")
_SEPARATORS = re.compile(r"[\\/]+")
_PATH_KEY = re.compile(rb"path|file|dir|folder|name", re.IGNORECASE)
_TEXT_KEY = re.compile(rb"content|\d*|.*(?:tokens?|template|prompt|pattern|regex)", re.IGNORECASE | re.DOTALL)
_TOKENS_NAMES = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
"""JSON files whose strings are tokens, whatever they look like."""


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


def record_without_paths(value: JsonValue, folder: Path | None) -> JsonValue:
    """Return the JSON value of a record with strings that are absolute paths as `relative_reference` writes them."""
    if isinstance(value, dict):
        return {key: record_without_paths(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [record_without_paths(item, folder) for item in value]
    is_path = isinstance(value, str) and value.startswith("/")
    return relative_reference(str(value), folder) if is_path else value


def file_without_paths(name: str, raw: bytes) -> bytes:
    """Return the content of a small file of a model in which no value is an absolute path, wherever it points to.

    In JSON a path is replaced by its last name, a folder in the cache of the Hub's tools by the model's id; everything
    else stays byte for byte. Values that are tokens or texts are no paths, and no other files hold any.
    """
    if not name.endswith(".json") or PurePosixPath(name).name in _TOKENS_NAMES:
        return raw
    key = b""

    def replaced(match: re.Match[bytes]) -> bytes:
        nonlocal key
        if match[2] is not None:
            key = match[1]
        elif _MAY_BE_PATH.match(match[1]) and not _TEXT_KEY.fullmatch(key):
            name = _name_of_path(match[0], needs_folders=not _PATH_KEY.search(key))
            return match[0] if name is None else json.dumps(name, ensure_ascii=False, allow_nan=False).encode()
        return match[0]

    return _JSON_STRING.sub(replaced, raw)


def _name_of_path(quoted: bytes, *, needs_folders: bool) -> str | None:
    """Return the name that stands for an absolute path; None for any other text. One of one part may be a word."""
    try:
        text = str(json.loads(quoted))
    except ValueError:  # no JSON, or no UTF-8: whoever parses it says so
        return None
    parts = [part for part in _SEPARATORS.split(text.removeprefix("file://")) if part]
    if not _ABSOLUTE.match(text) or not text.isprintable() or len(parts) < (2 if needs_folders else 1):
        return None
    cached = CACHED_MODEL.search(text)
    return cached["name"].replace("--", "/") if cached and parts[-1] == cached["commit"] else parts[-1]


def _plan_with_paths(plan: Mapping[str, object] | None, change: Callable[[str], str]) -> Mapping[str, object] | None:
    """Change the paths of a plan's models and of the importance that it follows."""
    if plan is None:
        return None
    changed = dict(plan)
    models = changed.get("models")
    if isinstance(models, list | tuple):
        changed["models"] = [_record_with_path(model, change) for model in models]
    if "importance" in changed:
        changed["importance"] = _record_with_path(changed["importance"], change)
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
