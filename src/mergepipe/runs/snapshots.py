"""Look up snapshots for users: list, show, find by path or sid, trace lineage. Writes nothing.

A missing catalog counts as empty and is not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.catalog.catalog import Catalog, rebuild
from mergepipe.catalog.snapshots import (
    CatalogStats,
    LineageNode,
    RebuildReport,
    SnapshotRow,
    containing,
    read_manifest,
    row_of,
    sid_of_unchanged_input,
)
from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.options import home_of
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
    *,
    contained: str | Path | None = None,
    operator: str | None = None,
    since: date | None = None,
    home: str | Path | None = None,
) -> tuple[SnapshotReport, ...]:
    """List the snapshots that the catalog knows, newest first.

    Args:
        contained: only those that this model is in, directly or through snapshots that they were made from: its path,
            that of a file in it, its name, its address on the Hub (`hf://org/name`, with or without a commit), or seven
            or more first digits of a commit, a content digest or a sid.
        operator: only those that this operator made.
        since: only those that were made on this day (UTC) or later.
    """
    rows = Catalog(home_of(home)).snapshots()
    if contained is not None:
        rows = containing(rows, str(contained))
    return tuple(
        _report(row, is_recorded=True)
        for row in rows
        if operator in (None, row.operator) and (since is None or row.created.date() >= since)
    )


def show(snapshot: str | Path, *, home: str | Path | None = None) -> SnapshotReport:
    """Look a snapshot up by its directory, its sid, or at least four first digits of it.

    Raises:
        NotFoundError, RecipeError: no snapshot is known by that name, or several are.
    """
    try:
        return _report(Catalog(home_of(home)).snapshot(str(snapshot)), is_recorded=True)
    except NotFoundError:
        path = Path(snapshot)
        if not _has_manifest(path):
            raise
        created, store = modified_at(path / MANIFEST_NAME), Stores()
        manifest, digest = read_manifest(store, path)
        sids = [sid_of_unchanged_input(store, source) for source in manifest.inputs]
        return _report(row_of(manifest, digest, path.absolute(), created, sids), is_recorded=False)


def lineage(snapshot: str | Path, *, down: bool = False, home: str | Path | None = None) -> tuple[LineageNode, ...]:
    """Trace all that went into a snapshot through all generations: a tree in preorder. Raises as `show` does.

    Args:
        down: trace what was made from the snapshot instead. The bytes of a node are those that it read of its parent.
    """
    try:
        return Catalog(home_of(home)).lineage(str(snapshot), down=down)
    except NotFoundError:
        if not _has_manifest(Path(snapshot)):
            raise
        read_manifest(Stores(), Path(snapshot))  # which says so where it is no snapshot's
        hint = f"run `mergepipe catalog rebuild {snapshot}`"
        raise NotFoundError.of("snapshot.not-found", snapshot, "a snapshot that is not in the catalog", hint) from None


def catalog_stats(*, home: str | Path | None = None) -> CatalogStats:
    """Count what the catalog holds.

    Raises:
        NotFoundError: there is none.
    """
    folder = home_of(home)
    if not folder.exists():
        hint = "`mergepipe analyze` or a merge makes one; --home names another place"
        raise NotFoundError.of("catalog.not-found", folder, "there is no catalog", hint)
    return Catalog(folder).stats()


def rebuild_catalog(roots: Sequence[str | Path] = (), *, home: str | Path | None = None) -> RebuildReport:
    """Make the catalog again from the manifests under `roots` and at known paths.

    Raises:
        NotFoundError: a root does not exist.
    """
    return rebuild(home_of(home), [Path(root) for root in roots])


def find_snapshot_path(reference: str | Path, home: Path) -> Path:
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
    return Catalog(home).snapshot(str(reference)).path


def find_snapshot(reference: str | Path, home: str | Path | None) -> Location:
    """Find a snapshot as `find_snapshot_path` does, or in a bucket or repository by its address."""
    if is_remote(str(reference)):
        return Location.parse(str(reference))
    return Location.local(find_snapshot_path(reference, home_of(home)))


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
