"""Snapshots as their manifests describe them, and what was made from what; lineage follows sids."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

from blake3 import blake3

from mergepipe.core.display import Displayed, shown
from mergepipe.core.records import AsText
from mergepipe.errors import MergePipeError, NotFoundError, Problem
from mergepipe.snapshots.manifest import (
    MANIFEST_NAME,
    Input,
    InputRecord,
    Manifest,
    RealizedBytes,
    parse_manifest,
    record_folder,
    with_absolute_paths,
)
from mergepipe.storage.contract import MANIFEST_BYTES, Store, is_folder
from mergepipe.storage.location import Location, is_remote


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """One published snapshot. `created` is in UTC."""

    sid: str
    path: Annotated[Path, AsText(str, Path)]
    operator: str
    created: Annotated[datetime, AsText(datetime.isoformat, datetime.fromisoformat)]
    plan_digest: str | None
    manifest_digest: str
    realized: RealizedBytes
    inputs: tuple[Input, ...]
    summary: str = ""

    def __post_init__(self) -> None:
        if self.created.tzinfo is None:
            raise ValueError("`created` needs a time zone")


@dataclass(frozen=True, slots=True)
class LineageNode:
    """One node of a lineage in preorder, `depth` 0 for the requested snapshot.

    `operator` is None for models, and for snapshots that the catalog does not hold. A snapshot is expanded once:
    further occurrences have `is_repeated` set and no children.
    """

    depth: int
    role: str
    model: str
    path: str
    sid: str | None
    operator: str | None
    read_bytes: int | None
    is_repeated: bool = False


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CatalogStats(Displayed):
    """Contents of the home folder: records of snapshots and digests, `file_bytes` of them, and files of statistics."""

    path: Path = shown("catalog")
    file_bytes: int = shown("size")
    snapshots: int = shown("snapshots")
    digests: int = shown("digests", "of {digests:file}")
    statistics: int = shown("statistics", "of {statistics:expert}, {statistics_bytes}")
    statistics_bytes: int


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class RebuildReport(Displayed):
    """The result of `rebuild`.

    `missing` are recorded paths without a manifest, which keep their records. `composites` are training checkpoints
    composed by tailor, which are not snapshots and are skipped.
    """

    snapshots: int = shown("snapshots")
    missing: tuple[Path, ...] = shown("missing")
    unreadable: tuple[Problem, ...] = shown("unreadable")
    composites: tuple[Path, ...] = shown(
        "composite", lambda path: f"{path}: a training checkpoint, not a snapshot", default=()
    )


def read_manifest(store: Store, directory: Path) -> tuple[Manifest, str]:
    """Read the manifest of a snapshot on storage, with absolute paths of its inputs, and the digest of its file."""
    path = directory / MANIFEST_NAME
    try:
        raw = store.read_small(Location.local(path), MANIFEST_BYTES)
    except NotFoundError as error:
        raise NotFoundError.of("snapshot.not-found", path, "no such file") from error
    manifest = with_absolute_paths(parse_manifest(raw, path), Location.local(directory))
    return manifest, blake3(raw).hexdigest(16)


def row_of(manifest: Manifest, digest: str, path: Path, created: datetime, sids: Sequence[str | None]) -> SnapshotRow:
    """Describe a snapshot by its manifest; `sids` are those of its inputs that are snapshots."""
    inputs = tuple(
        Input(role=i.role, model=i.model, path=i.path, content_id=i.content_id, read_bytes=i.read_bytes, sid=sid)
        for i, sid in zip(manifest.inputs, sids, strict=True)
    )
    return SnapshotRow(
        manifest.sid,
        path,
        manifest.operator,
        created,
        manifest.plan_digest,
        digest,
        manifest.realized,
        inputs,
        manifest.summary,
    )


def sid_of_unchanged_input(store: Store, source: InputRecord) -> str | None:
    """Return the sid of an input that is a snapshot whose files are unchanged; None otherwise."""
    try:
        if is_remote(source.path):
            return None
        path = Location.parse(source.path)
        is_model = is_folder(store, path)
        root = path if is_model else path.parent
        for file in source.files:
            status = store.stat(root / file.name)
            if status is None or (status.size_bytes, status.version) != (file.size_bytes, file.version):
                return None
        directory = root.local_path if is_model else record_folder(path.local_path)
        return read_manifest(store, directory)[0].sid
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
            children[:] = sorted(name for name in children if not (name.startswith(".") and ".mergepipe-" in name))
            if MANIFEST_NAME in files:
                yield Path(directory)


_DIGITS = re.compile(r"[0-9a-f]{7,64}")
_COMMIT_DIGITS = 40


def trace(rows: Sequence[SnapshotRow], root: SnapshotRow, *, down: bool) -> tuple[LineageNode, ...]:
    """Return all that a snapshot was made from, or with `down` all that is made from it: a tree in preorder.

    `rows` are newest first. A snapshot is expanded once: cycles (one replaced in place by one made from it) end where
    they close. With `down`, role and bytes of a node are those of its parent in it, and the oldest come first.
    """
    newest = {row.sid: row for row in reversed(rows)} | {root.sid: root}
    made_from: dict[str | None, dict[str, tuple[Input, SnapshotRow]]] = {}
    for row in rows if down else ():
        for source in row.inputs:
            made_from.setdefault(source.sid, {}).setdefault(row.sid, (source, row))
    nodes: list[LineageNode] = []
    expanded: set[str] = set()
    pending = [LineageNode(0, "snapshot", str(root.path), str(root.path), root.sid, None, None)]
    while pending:
        node = pending.pop()
        expandable = None if node.sid is None else newest.get(node.sid)
        if expandable is None:
            nodes.append(node)
            continue
        row = expandable
        nodes.append(replace(node, operator=row.operator, is_repeated=row.sid in expanded))
        if row.sid in expanded:
            continue
        expanded.add(row.sid)
        depth = node.depth + 1
        if down:
            pending += [
                LineageNode(depth, source.role, str(child.path), str(child.path), child.sid, None, source.read_bytes)
                for source, child in made_from.get(row.sid, {}).values()
            ]
        else:
            pending += [
                LineageNode(depth, source.role, source.model, source.path, source.sid, None, source.read_bytes)
                for source in reversed(row.inputs)
            ]
    return tuple(nodes)


def trace_model(rows: Sequence[SnapshotRow], reference: str, content_id: str | None = None) -> tuple[LineageNode, ...]:
    """Return all that is made from a model, as `trace` does of a snapshot; nothing where no snapshot is.

    `reference` and `content_id` name the model as `containing` takes it.
    """
    marked = [_marked(row, reference, content_id) for row in rows]
    made = [row for row in marked if any(source.sid == reference for source in row.inputs)]
    if not made:
        return ()
    model = replace(made[0], sid=reference, path=Path(reference), operator="", inputs=())
    first, *others = trace(marked, model, down=True)
    return (replace(first, role="model", model=reference, path=reference, sid=None, operator=None), *others)


def _marked(row: SnapshotRow, reference: str, content_id: str | None) -> SnapshotRow:
    """Return a row in which the inputs that a reference names have it as their sid."""
    inputs = (
        replace(source, sid=reference) if is_named(source, reference, content_id) else source for source in row.inputs
    )
    return replace(row, inputs=tuple(inputs))


def containing(rows: Sequence[SnapshotRow], reference: str, content_id: str | None = None) -> tuple[SnapshotRow, ...]:
    """Keep the snapshots that a model is in: as an input of their own, or of snapshots they are made from.

    `reference` is a path (of a model or of a file in it), a name, an `hf://` address, or the first digits of a commit,
    a content digest or a sid. Inputs with its `content_id` are the model, too, wherever they are.
    """
    holding = {row.sid for row in rows if any(is_named(source, reference, content_id) for source in row.inputs)}
    inherited = holding
    while inherited:
        inherited = {row.sid for row in rows if any(source.sid in inherited for source in row.inputs)} - holding
        holding |= inherited
    return tuple(row for row in rows if row.sid in holding)


def is_named(source: Input, reference: str, content_id: str | None = None) -> bool:
    """Whether a reference or a content id, as `containing` takes them, names an input."""
    if content_id is not None and source.content_id == content_id:
        return True
    places = (source.path, *source.path.split("+"))  # of a model with an adapter each by itself
    if reference.startswith("hf://"):
        return any(place == reference or place.startswith((f"{reference}@", f"{reference}/")) for place in places)
    names = {part for place in places for part in re.split("[/@]", place)}
    if _DIGITS.fullmatch(reference):
        digests = (source.content_id, source.sid, *(name for name in names if len(name) == _COMMIT_DIGITS))
        if any(digest is not None and digest.startswith(reference) for digest in digests):
            return True
    real = os.path.realpath(reference)
    last_names = (place.rstrip("/").rpartition("/")[2].partition("@")[0] for place in places)
    return reference in (source.model, *places, *last_names) or any(
        real == place or real.startswith(f"{place}/") for place in places if place.startswith("/")
    )
