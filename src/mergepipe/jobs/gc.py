"""Collect garbage: remove staging of dead runs, and catalog rows of deleted snapshots and models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.rows import SnapshotRow, Staleness
from mergepipe.errors import NotFoundError
from mergepipe.reports import Garbage, GcReport
from mergepipe.snapshots.journal import JOURNAL_NAME, read_journal
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.snapshots.staging import find_staging, is_dead, remove_dead


def collect_garbage(home: Path, roots: Sequence[Path], *, dry_run: bool) -> GcReport:
    """Remove staging of dead runs under `roots` and beside known snapshots, and rows of deleted files.

    Files on a disk that is not mounted do not count as deleted: a row goes only if the folder that held its
    files is there and they are not. What another snapshot was made from keeps its row.

    Raises:
        NotFoundError: `gc.root-missing`, a root is not a directory.
        MergePipeError: the catalog cannot be used.
    """
    for root in roots:
        if not root.is_dir():
            raise NotFoundError.of("gc.root-missing", root, "no such directory", "check the path")
    living: list[str] = []
    garbage: list[Garbage] = []
    if not (home / CATALOG_NAME).exists():
        garbage.extend(_staging(_folders((), roots), living, dry_run=dry_run))
        return GcReport(tuple(garbage), tuple(living), dry_run)
    with Catalog.open(home) as catalog:
        garbage.extend(_staging(_folders(catalog.snapshots(), roots), living, dry_run=dry_run))
        garbage.extend(_snapshot_rows(catalog, dry_run=dry_run))
        garbage.extend(_model_rows(catalog, dry_run=dry_run))
    return GcReport(tuple(garbage), tuple(living), dry_run)


def _folders(snapshots: Iterable[SnapshotRow], roots: Iterable[Path]) -> list[Path]:
    """List the directories that may hold staging: beside every known snapshot, and in and below the roots."""
    folders = {snapshot.path.parent for snapshot in snapshots if snapshot.path.parent.is_dir()}
    for root in roots:
        for folder, children, _ in os.walk(root):
            children[:] = [name for name in children if not name.startswith(".")]
            folders.add(Path(folder))
    return sorted(folders)


def _staging(folders: Iterable[Path], living: list[str], *, dry_run: bool) -> Iterator[Garbage]:
    for folder in folders:
        for staging in find_staging(folder):
            if staging.owner is not None:
                living.append(f"{staging.directory}: {staging.owner}")
                continue
            nbytes = _allocated_bytes(staging.directory)
            state = read_journal(staging.directory / JOURNAL_NAME)
            durable = len(state.digests) if state is not None else 0
            reason = f"left by a dead run, {durable} tensors could be resumed" if durable else "left by a dead run"
            is_removed = not dry_run and remove_dead(staging.directory)
            if not is_removed and not is_dead(staging.directory):
                continue  # another process removed it, or works there by now
            yield Garbage("staging", str(staging.directory), reason, nbytes, is_removed)


def _allocated_bytes(directory: Path) -> int:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_blocks * 512 for path in files)


def _snapshot_rows(catalog: Catalog, *, dry_run: bool) -> Iterator[Garbage]:
    """Find rows of deleted snapshots that no other snapshot was made from."""
    rows = catalog.snapshots()
    needed = {source.sid for row in rows for source in row.inputs if source.sid is not None}
    for row in rows:
        if row.sid in needed or (row.path / MANIFEST_NAME).exists() or not row.path.parent.is_dir():
            continue
        if not dry_run:
            catalog.forget(row)
        yield Garbage("snapshot-row", f"{row.sid} {row.path}", "the snapshot is gone", 0, not dry_run)


def _model_rows(catalog: Catalog, *, dry_run: bool) -> Iterator[Garbage]:
    """Find rows of models, with their statistics, whose files no longer exist."""
    for stale in catalog.stale_models():
        if stale.staleness is Staleness.MISSING and not stale.model.root.parent.local_path.is_dir():
            continue
        if not dry_run:
            catalog.forget_models([stale.model])
        reason = "its files have changed" if stale.staleness is Staleness.CHANGED else "its files are gone"
        yield Garbage("model-row", str(stale.model.path), reason, 0, not dry_run)
