"""Look up snapshots for users: list, show, find by path or sid, trace lineage. Writes nothing.

A missing catalog counts as empty and is not made.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.snapshots import (
    CatalogStats,
    LineageNode,
    SnapshotRow,
    containing,
    read_manifest,
    row_of,
    sid_of_unchanged_input,
)
from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.recipes.references import referenced_paths
from mergepipe.reports import SnapshotReport
from mergepipe.snapshots.manifest import (
    MANIFEST_NAME,
    InputRecord,
    Manifest,
    parse_manifest,
    record_folder,
    with_absolute_paths,
)
from mergepipe.storage.contract import MANIFEST_BYTES, modified_at
from mergepipe.storage.location import Location, is_remote
from mergepipe.storage.stores import Stores

if TYPE_CHECKING:
    from mergepipe.storage.contract import Store


def list_snapshots(
    home: Path, *, contained: str | None, operator: str | None, since: date | None
) -> tuple[SnapshotReport, ...]:
    """List the snapshots in the catalog, newest first; see `api.list_snapshots`."""
    rows = Catalog(home).snapshots()
    if contained is not None:
        rows = containing(rows, contained)
    return tuple(
        _report(row, is_recorded=True)
        for row in rows
        if operator in (None, row.operator) and (since is None or row.created.date() >= since)
    )


def show_snapshot(reference: str, home: Path) -> SnapshotReport:
    """Describe one snapshot from the catalog, else from its own manifest."""
    try:
        return _report(Catalog(home).snapshot(reference), is_recorded=True)
    except NotFoundError:
        path = Path(reference)
        if not _has_manifest(path):
            raise
        created, store = modified_at(path / MANIFEST_NAME), Stores()
        manifest, digest = read_manifest(store, path)
        sids = [sid_of_unchanged_input(store, source) for source in manifest.inputs]
        return _report(row_of(manifest, digest, path.absolute(), created, sids), is_recorded=False)


def trace_lineage(reference: str, home: Path, *, down: bool) -> tuple[LineageNode, ...]:
    """List everything that went into a catalogued snapshot, or with `down` came of it, as a tree in preorder."""
    try:
        return Catalog(home).lineage(reference, down=down)
    except NotFoundError:
        if not _has_manifest(Path(reference)):
            raise
        read_manifest(Stores(), Path(reference))  # which says so where it is no snapshot's
        hint = f"run `mergepipe catalog rebuild {reference}`"
        raise NotFoundError.of("snapshot.not-found", reference, "a snapshot that is not in the catalog", hint) from None


def catalog_statistics(home: Path) -> CatalogStats:
    """Counts and bytes of the catalog."""
    if not home.exists():
        hint = "`mergepipe analyze` or a merge makes one; --home names another place"
        raise NotFoundError.of("catalog.not-found", home, "there is no catalog", hint)
    return Catalog(home).stats()


def find_snapshot_path(reference: str, home: Path) -> Path:
    """Find the directory of a snapshot by its directory, its manifest, its sid or a prefix of the sid."""
    path = Path(reference)
    if path.name == MANIFEST_NAME and path.is_file():
        return path.parent
    if path.is_file() and _has_manifest(record_folder(path)):
        return record_folder(path)
    if path.is_dir():
        if not _has_manifest(path):
            message = f"holds no {MANIFEST_NAME}: not a snapshot"
            raise NotFoundError.of("snapshot.not-found", path, message, "give a snapshot, its sid, or a plan")
        return path
    return Catalog(home).snapshot(reference).path


def find_snapshot(reference: str, home: Path) -> Location:
    """Find a snapshot as `find_snapshot_path` does, or in a bucket or repository by its address."""
    if is_remote(reference):
        return Location.parse(reference)
    return Location.local(find_snapshot_path(reference, home))


def read_manifest_value(store: Store, directory: Location) -> Manifest:
    """Read the whole manifest of a snapshot, with absolute paths."""
    path = directory / MANIFEST_NAME
    return with_absolute_paths(parse_manifest(store.read_small(path, MANIFEST_BYTES), path), directory)


def is_snapshot_of(place: Path | Location, plan_digest: str) -> bool:
    """Whether a snapshot by this plan is published at a place."""
    try:
        return read_manifest_value(Stores(), Location.of(place)).plan_digest == plan_digest
    except NotFoundError:
        return False


def with_inputs_found(manifest: Manifest, store: Store, home: Path | None) -> Manifest:
    """Return the manifest with inputs at the paths that the catalog knows, where its own lead nowhere.

    A manifest names inputs relative to its snapshot, so they are lost where the snapshot alone is moved. The catalog
    recorded where they were when it was made.
    """
    if home is None or all(_is_there(record.path, store) for record in manifest.inputs):
        return manifest
    for row in Catalog(home).snapshots():
        names = [source.model for source in row.inputs]
        if row.sid == manifest.sid and names == [record.model for record in manifest.inputs]:
            places = [source.path for source in row.inputs]
            pairs = zip(manifest.inputs, places, strict=True)
            manifest = replace(manifest, inputs=tuple(_at_one_of(record, path, store) for record, path in pairs))
    return manifest


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file()


def _report(row: SnapshotRow, *, is_recorded: bool) -> SnapshotReport:
    return SnapshotReport(
        sid=row.sid,
        path=row.path,
        operator=row.operator,
        created=row.created,
        plan_digest=row.plan_digest,
        base_bytes=row.realized.base,
        expert_bytes=row.realized.expert,
        analysis_bytes=row.realized.analysis,
        output_bytes=row.realized.output,
        inputs=row.inputs,
        is_present=_has_manifest(row.path),
        is_recorded=is_recorded,
    )


def _at_one_of(record: InputRecord, known_path: str, store: Store) -> InputRecord:
    return (
        record
        if _is_there(record.path, store) or not _is_there(known_path, store)
        else replace(record, path=known_path)
    )


def _is_there(reference: str, store: Store) -> bool:
    try:
        return all(store.stat(path) is not None for path in referenced_paths(reference, store))
    except MergePipeError:  # what is wrong with it is said where it is opened
        return False
