"""Make the record of a snapshot fit to be read elsewhere: no path of this machine stands in it any more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mergepipe.core.canonical_json import digest_of
from mergepipe.errors import MergePipeError
from mergepipe.planning.plan_json import parse_plan
from mergepipe.runs.reuse.accumulators import ACCUMULATORS_BLOCKS_NAME, ACCUMULATORS_NAME, ACCUMULATORS_RECORD_NAME
from mergepipe.runs.reuse.keys import KEYS_NAME
from mergepipe.snapshots.manifest import Manifest, record_of
from mergepipe.snapshots.manifest_json import manifest_of_json

LOCAL_NAMES: Final = (KEYS_NAME, ACCUMULATORS_NAME, ACCUMULATORS_RECORD_NAME, ACCUMULATORS_BLOCKS_NAME)
"""Files that serve later merges on this machine, and nobody else."""
SOURCE_KEY: Final = "pushed_from_sid"  # in `Manifest.run`: the snapshot of which this is the copy for others


@dataclass(frozen=True, slots=True)
class PortableRecord:
    """The manifest and the small files of a snapshot as others get them, and the paths that were replaced."""

    manifest: Manifest
    small: Mapping[str, bytes]
    replaced_paths: tuple[str, ...]


def portable_record(manifest: Manifest, small: Mapping[str, bytes], place: Path) -> PortableRecord:
    """Replace the paths of this machine by last names in the manifest and all texts; leave out `LOCAL_NAMES`.

    `small` are the sidecars by name. A recipe whose text changes gives the copy another sid, and a plan whose text
    changes is left out, for its digest is that of its text.

    Law: a record without such paths and files stays as it is.
    """
    texts = {name: content for name, content in small.items() if name not in LOCAL_NAMES}
    everything = manifest.to_json() + b"\n".join(texts.values())
    renames = {path: name for path, name in _renames(manifest, place).items() if path.encode() in everything}
    if not renames and len(texts) == len(small):
        return PortableRecord(manifest, small, ())
    copy = _renamed_manifest(manifest, renames)
    ids = {manifest.sid: copy.sid}
    texts = {name: _renamed_bytes(content, renames | ids) for name, content in texts.items()}
    sidecars = tuple(record_of(name, content) for name, content in sorted(texts.items()))
    source = {} if copy.sid == manifest.sid else {SOURCE_KEY: manifest.sid}
    copy = replace(copy, sidecars=sidecars, run={**copy.run, **source})
    return PortableRecord(copy, texts, tuple(renames))


def _renames(manifest: Manifest, place: Path) -> dict[str, str]:
    """Map absolute paths of inputs, of earlier snapshots and of the snapshot itself to their last names."""
    paths = {str(place.absolute()), str(place.resolve())}
    for record in manifest.inputs:
        paths.update(part for text in (record.path, record.model) for part in text.split("+"))
    plan = manifest.plan or {}
    for key in ("models", "reuse"):
        listed = plan.get(key)
        entries = listed if isinstance(listed, list | tuple) else ()
        paths.update(str(entry.get("path", "")) for entry in entries if isinstance(entry, Mapping))
    names = {path: Path(path).name for path in paths if path.startswith(("/", "~")) and Path(path).name}
    parents = {str(Path(path).parent): "." for path in names if len(Path(path).parts) > 3}
    return {**names, **{path: name for path, name in parents.items() if path not in names}}


def _renamed_manifest(manifest: Manifest, renames: Mapping[str, str]) -> Manifest:
    """Rename everywhere in a manifest, and give it the ids of its new content."""
    pattern = _pattern(renames)
    content = json.loads(manifest.to_json())
    plan = content.pop("plan")
    content = {key: _renamed_value(value, pattern, renames) for key, value in content.items() if key != "digest"}
    content["plan"] = _renamed_plan(plan, pattern, renames)
    identity = {key: content[key] for key in ("version", "recipe", "seed", "files")}
    content["sid"] = digest_of(identity)
    content["digest"] = digest_of(content)
    return manifest_of_json(json.dumps(content, allow_nan=False).encode())


def _renamed_plan(plan: object, pattern: re.Pattern[str], renames: Mapping[str, str]) -> object:
    """Rename in a plan; None where its digest would be another, for that is the digest of what was decided."""
    renamed = _renamed_value(plan, pattern, renames)
    if renamed == plan:
        return plan
    try:
        parse_plan(json.dumps(renamed, allow_nan=False).encode())
    except MergePipeError:
        return None
    return renamed


def _renamed_value(value: object, pattern: re.Pattern[str], renames: Mapping[str, str]) -> object:
    if isinstance(value, str):
        return pattern.sub(lambda match: renames[match[0]], value)
    if isinstance(value, list):
        return [_renamed_value(item, pattern, renames) for item in value]
    if isinstance(value, dict):
        return {key: _renamed_value(item, pattern, renames) for key, item in value.items()}
    return value


def _renamed_bytes(content: bytes, renames: Mapping[str, str]) -> bytes:
    """Rename in a text; what is no text stays as it is."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    return _pattern(renames).sub(lambda match: renames[match[0]], text).encode()


def _pattern(renames: Mapping[str, str]) -> re.Pattern[str]:
    """Match any of the names, the longest first, where no name goes on."""
    names = "|".join(map(re.escape, _longest_first(renames)))
    return re.compile(rf"(?<![\w:/.~-])(?:{names})(?![\w.-]*\w)" if names else r"(?!)")


def _longest_first(names: Mapping[str, str]) -> Iterator[str]:
    yield from sorted(names, key=lambda name: (-len(name), name))
