"""Manifests of snapshots on storage and their rows, one per path, with their inputs; lineage follows sids."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from blake3 import blake3

from mergepipe.catalog.database import REBUILD_HINT, stored_text
from mergepipe.catalog.rows import LineageNode, SnapshotRow
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, Problem, RecipeError, did_you_mean
from mergepipe.snapshots.manifest import (
    MANIFEST_NAME,
    Input,
    InputRecord,
    Manifest,
    RealizedBytes,
    parse_manifest,
    with_absolute_paths,
)
from mergepipe.storage.contract import Store, is_folder
from mergepipe.storage.limits import MANIFEST_BYTES
from mergepipe.storage.location import Location, is_remote


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A manifest that is indexed, and the digest of its file."""

    manifest: Manifest
    digest: str


def read_manifest(store: Store, directory: Path) -> SnapshotRecord:
    """Read the manifest of a snapshot on storage; the paths of its inputs become absolute."""
    path = directory / MANIFEST_NAME
    try:
        raw = store.read_small(Location.local(path), MANIFEST_BYTES)
    except NotFoundError as error:
        raise NotFoundError.of("snapshot.not-found", path, "no such file") from error
    manifest = with_absolute_paths(parse_manifest(raw, path), Location.local(directory))
    return SnapshotRecord(manifest, blake3(raw).hexdigest(16))


def sid_of_unchanged_input(store: Store, source: InputRecord) -> str | None:
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
        return read_manifest(store, root.local_path).manifest.sid
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


MIN_PREFIX_DIGITS = 4
_DIGITS = re.compile(r"[0-9a-f]{7,64}")
_COMMIT_DIGITS = 40
_COLUMNS = """
    pk, sid, path, operator, created, plan_digest, manifest_digest,
    base_bytes, expert_bytes, analysis_bytes, metadata_bytes, output_bytes
"""
_EDGE_COLUMNS = "role, model, path, content_id, read_bytes, sid"


def path_text(path: Path) -> str:
    """Return the path of a snapshot with links resolved, in the form that is stored."""
    return stored_text(os.path.realpath(path), path)


def record(
    connection: sqlite3.Connection,
    store: Store,
    snapshot_record: SnapshotRecord,
    path: Path,
    *,
    created: datetime,
    keep_created: bool,
) -> None:
    """Insert the snapshot, or replace the row of its path.

    From other rows of the same manifest it keeps the sids of the inputs, which may be gone later, and with
    `keep_created` the time.
    """
    known_sids, known_created = _earlier_records(connection, snapshot_record.digest)
    if keep_created and known_created is not None:
        created = known_created
    connection.execute("DELETE FROM snapshots WHERE path = ?", (path_text(path),))
    key = _insert(connection, snapshot_record, path, created)
    for position, source in enumerate(snapshot_record.manifest.inputs):
        sid = known_sids.get(position) or sid_of_unchanged_input(store, source)
        connection.execute(
            "INSERT INTO snapshot_inputs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (key, position, source.role, source.model, source.path, source.content_id, source.read_bytes, sid),
        )


def _earlier_records(connection: sqlite3.Connection, manifest_digest: str) -> tuple[dict[int, str], datetime | None]:
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM snapshots WHERE manifest_digest = ? ORDER BY created", (manifest_digest,)
    ).fetchall()
    earlier = [_snapshot(connection, row) for row in rows]
    sids = {
        position: source.sid
        for snapshot in earlier
        for position, source in enumerate(snapshot.inputs)
        if source.sid is not None
    }
    return sids, earlier[0].created if earlier else None


def _insert(connection: sqlite3.Connection, snapshot_record: SnapshotRecord, path: Path, created: datetime) -> int:
    manifest = snapshot_record.manifest
    realized = manifest.realized
    cursor = connection.execute(
        """
        INSERT INTO snapshots (
            sid, path, operator, created, plan_digest, manifest_digest,
            base_bytes, expert_bytes, analysis_bytes, metadata_bytes, output_bytes
        ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        (
            manifest.sid,
            path_text(path),
            manifest.operator,
            created.astimezone(UTC).isoformat(timespec="microseconds"),
            manifest.plan_digest,
            snapshot_record.digest,
            realized.base,
            realized.expert,
            realized.analysis,
            realized.metadata,
            realized.output,
        ),
    )
    return int(cursor.lastrowid or 0)


def all_snapshots(connection: sqlite3.Connection) -> tuple[SnapshotRow, ...]:
    """Return every row, newest first."""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM snapshots ORDER BY created DESC, pk DESC").fetchall()
    return tuple(_snapshot(connection, row) for row in rows)


def one_snapshot(connection: sqlite3.Connection, reference: str | Path) -> SnapshotRow:
    """Find a snapshot by path, sid or a prefix of its sid; of several with that sid, the newest."""
    at_path = _row_at(connection, Path(reference))
    if at_path is not None:
        return at_path
    prefix = str(reference).lower()
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM snapshots WHERE substr(sid, 1, ?) = ? ORDER BY created DESC, pk DESC",
        (len(prefix), prefix),
    ).fetchall()
    sids = sorted({str(row[1]) for row in rows})
    if not sids or not prefix:
        raise _unknown(connection, reference)
    needed = max(MIN_PREFIX_DIGITS, *(_n_common(a, b) + 1 for a, b in pairwise((*sids, ""))))
    if len(prefix) < MIN_PREFIX_DIGITS:
        message = f"{len(prefix)} digits of a sid are too few"
        hint = f"give {needed}: {' or '.join(sid[:needed] for sid in sids[:5])}"
        raise NotFoundError.of("snapshot.not-found", reference, message, hint)
    if len(sids) > 1:
        message = f"could be {', '.join(sids[:5])}"
        raise RecipeError.of("snapshot.ambiguous", reference, message, f"give {needed} digits")
    return _snapshot(connection, rows[0])


def _n_common(a: str, b: str) -> int:
    """The number of digits with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _unknown(connection: sqlite3.Connection, reference: str | Path) -> MergePipeError:
    references = [str(value) for row in connection.execute("SELECT sid, path FROM snapshots") for value in row]
    hint = did_you_mean(str(reference), references) if references else "the catalog holds no snapshots"
    return NotFoundError.of("snapshot.not-found", reference, "no such snapshot in the catalog", hint)


def _row_at(connection: sqlite3.Connection, path: Path) -> SnapshotRow | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM snapshots WHERE path = ?", (path_text(path),)).fetchone()
    return None if row is None else _snapshot(connection, row)


def forget(connection: sqlite3.Connection, snapshot: SnapshotRow) -> None:
    """Remove a row with its inputs; the snapshot itself is not touched."""
    connection.execute("DELETE FROM snapshots WHERE path = ?", (str(snapshot.path),))


def lineage(connection: sqlite3.Connection, root: SnapshotRow) -> tuple[LineageNode, ...]:
    """Return all direct and indirect inputs of a snapshot as a tree in preorder.

    Cycles (a snapshot replaced in place by one made from it) end where they close.
    """
    newest = {snapshot.sid: snapshot for snapshot in reversed(all_snapshots(connection))}
    newest[root.sid] = root
    nodes: list[LineageNode] = []
    expanded: set[str] = set()
    pending = [LineageNode(0, "snapshot", str(root.path), str(root.path), root.sid, root.operator, None)]
    while pending:
        node = pending.pop()
        snapshot = newest.get(node.sid) if node.sid is not None else None
        if snapshot is None:
            nodes.append(node)
            continue
        is_repeated = snapshot.sid in expanded
        nodes.append(_node_of(node, snapshot, is_repeated=is_repeated))
        if not is_repeated:
            expanded.add(snapshot.sid)
            pending.extend(_input_node(node.depth + 1, source) for source in reversed(snapshot.inputs))
    return tuple(nodes)


def descent(connection: sqlite3.Connection, root: SnapshotRow) -> tuple[LineageNode, ...]:
    """Return the snapshots that are made from one, directly or indirectly, as a tree in preorder, oldest first.

    Role and bytes of a node are those of its parent in it. A snapshot is expanded once.
    """
    children: dict[str, dict[str, tuple[Input, SnapshotRow]]] = {}
    for child in all_snapshots(connection):
        for source in child.inputs:
            if source.sid is not None:
                children.setdefault(source.sid, {}).setdefault(child.sid, (source, child))
    nodes: list[LineageNode] = []
    expanded: set[str] = set()
    pending = [LineageNode(0, "snapshot", str(root.path), str(root.path), root.sid, root.operator, None)]
    while pending:
        node = pending.pop()
        sid = str(node.sid)
        nodes.append(replace(node, is_repeated=sid in expanded))
        if sid in expanded:
            continue
        expanded.add(sid)
        pending.extend(
            LineageNode(node.depth + 1, source.role, str(row.path), str(row.path), row.sid, row.operator,
                        source.read_bytes)
            for source, row in children.get(sid, {}).values()
        )  # fmt: skip
    return tuple(nodes)


def containing(rows: Sequence[SnapshotRow], reference: str) -> tuple[SnapshotRow, ...]:
    """Keep the snapshots that a model is in: as an input of their own, or of snapshots they are made from.

    `reference` is a path (of a model or of a file in it), a name, an `hf://` address, or the first digits of a commit,
    a content digest or a sid.
    """
    holding = {row.sid for row in rows if any(_is_named(source, reference) for source in row.inputs)}
    inherited = holding
    while inherited:
        inherited = {row.sid for row in rows if any(source.sid in inherited for source in row.inputs)} - holding
        holding |= inherited
    return tuple(row for row in rows if row.sid in holding)


def _is_named(source: Input, reference: str) -> bool:
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


def _node_of(node: LineageNode, snapshot: SnapshotRow, *, is_repeated: bool) -> LineageNode:
    return LineageNode(
        node.depth, node.role, node.model, node.path, node.sid, snapshot.operator, node.read_bytes, is_repeated
    )


def _input_node(depth: int, source: Input) -> LineageNode:
    return LineageNode(depth, source.role, source.model, source.path, source.sid, None, source.read_bytes)


def _snapshot(connection: sqlite3.Connection, row: tuple[object, ...]) -> SnapshotRow:
    pk, sid, path, operator, created, plan_digest, manifest_digest, *sizes = row
    edges = connection.execute(
        f"SELECT {_EDGE_COLUMNS} FROM snapshot_inputs WHERE snapshot = ? ORDER BY position", (pk,)
    ).fetchall()  # the row may be refused: no cursor stays open
    try:
        return SnapshotRow(
            sid=str(sid),
            path=Path(str(path)),
            operator=str(operator),
            created=datetime.fromisoformat(str(created)),
            plan_digest=None if plan_digest is None else str(plan_digest),
            manifest_digest=str(manifest_digest),
            realized=RealizedBytes(*(int(str(size)) for size in sizes)),
            inputs=tuple(
                Input(
                    role=str(role),
                    model=str(model),
                    path=str(source),
                    content_id=content_id,
                    read_bytes=int(read_bytes),
                    sid=source_sid,
                )
                for role, model, source, content_id, read_bytes, source_sid in edges
            ),
        )
    except (ValueError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: object, error: Exception) -> MergePipeError:
    return CorruptError.of("catalog.damaged", path, f"the snapshot's row is damaged: {error}", REBUILD_HINT)
