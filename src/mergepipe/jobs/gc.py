"""Collect garbage: remove staging of dead runs, and catalog rows of deleted snapshots."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.snapshots import SnapshotRow
from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.options import home_of
from mergepipe.reports import Garbage, GcReport
from mergepipe.runs.snapshots import is_snapshot_of
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.snapshots.object_upload import UPLOADS_NAME
from mergepipe.snapshots.parts_places import FolderParts, read_job
from mergepipe.snapshots.staging import find_staging, is_dead, remove_dead
from mergepipe.snapshots.work_log import merge_state, read_work_log
from mergepipe.storage import owned
from mergepipe.storage.location import Location
from mergepipe.storage.owner import is_alive, newest_change

ABANDONED_SECONDS: Final = 7 * 24 * 3600.0
"""Parts of an output that nobody has written to for so long are garbage: jobs may wait in a queue for days."""
BIRTH_SECONDS: Final = 60.0


def gc(roots: Sequence[str | Path] = (), *, dry_run: bool = False, home: str | Path | None = None) -> GcReport:
    """Remove staging of dead runs, next to known snapshots and under `roots`, and catalog rows of what is gone."""
    folder, places = home_of(home), [Location.of(root).local_path for root in roots]
    for root in places:
        if not root.is_dir():
            raise NotFoundError.of("storage.not-found", root, "no such directory", "check the path")
    uploads = folder / UPLOADS_NAME
    catalog = Catalog(folder)
    folders = _folders(catalog.snapshots(), [*places, *([uploads] if uploads.is_dir() else [])])
    living: list[str] = []
    garbage = [*_staging(folders, living, dry_run=dry_run), *_parts(folders, dry_run=dry_run)]
    garbage += _snapshot_rows(catalog, dry_run=dry_run)
    return GcReport(garbage=tuple(garbage), living=tuple(living), is_dry_run=dry_run)


def _folders(snapshots: Iterable[SnapshotRow], roots: Iterable[Path]) -> list[Path]:
    """List the directories that may hold staging: the parents of known snapshots, and the roots with all below them."""
    folders = {snapshot.path.parent for snapshot in snapshots if snapshot.path.parent.is_dir()}
    for root in roots:
        for folder, children, _ in os.walk(root):
            children[:] = [name for name in children if not name.startswith(".")]
            folders.add(Path(folder))
    return sorted(folders)


def _staging(folders: Iterable[Path], living: list[str], *, dry_run: bool) -> Iterator[Garbage]:
    for folder in folders:
        for directory, owner in find_staging(folder):
            if owner is not None:
                living.append(f"{directory}: {owner}")
                continue
            if _is_just_made(directory):
                continue
            nbytes = _allocated_bytes(directory)
            logged = read_work_log(directory)
            state = None if logged is None else merge_state(logged)
            durable = 0 if state is None else len(state.digests)
            reason = f"left by a dead run, {durable} tensors could be resumed" if durable else "left by a dead run"
            is_removed = not dry_run and remove_dead(directory)
            if not is_removed and not is_dead(directory):
                continue  # another process removed it, or works there by now
            yield Garbage("staging", str(directory), reason, nbytes, is_removed)


def _is_just_made(directory: Path) -> bool:
    """Whether a staging directory is empty and new, as it is for a moment before its maker locks and records it."""
    with contextlib.suppress(OSError):
        return not any(directory.glob("*")) and time.time() - directory.stat().st_mtime < BIRTH_SECONDS
    return True  # it is gone


def _parts(folders: Iterable[Path], *, dry_run: bool) -> Iterator[Garbage]:
    """Find parts directories whose output is published, or that are abandoned; others wait for their workers."""
    for folder in folders:
        for path in sorted(folder.glob(f".*{owned.PARTS_MARK}*")):
            if not owned.is_parts_name(path.name) or path.is_symlink():
                continue
            silent_seconds = time.time() - max(newest_change(path), path.stat().st_mtime)
            is_finished = _is_finished(path, silent_seconds)
            if not is_finished and (silent_seconds < ABANDONED_SECONDS or _has_worker(path)):
                continue
            nbytes = _allocated_bytes(path)
            if not dry_run:
                owned.remove_tree(path, ignore_errors=True)
            reason = "its output is published" if is_finished else "nobody has worked on it for a week"
            yield Garbage("parts", str(path), reason, nbytes, not dry_run)


def _has_worker(directory: Path) -> bool:
    """Whether a process of this machine reads for a part, whatever the clock says, which may have jumped."""
    try:
        job = read_job(directory)
        claims = () if job is None else FolderParts(directory.parent / job.out, job).account().claims
    except MergePipeError:
        return False
    return any(claim.is_open and is_alive(claim.owner, ABANDONED_SECONDS) for claim in claims)


def _is_finished(directory: Path, silent_seconds: float) -> bool:
    """Whether its output is published, or its job is gone, which a worker removes first and makes first."""
    try:
        job = read_job(directory)
        if job is None:
            return silent_seconds > BIRTH_SECONDS
        return is_snapshot_of(directory.parent / job.out, job.plan_digest)
    except MergePipeError:  # damaged: not ours to judge
        return False


def _allocated_bytes(directory: Path) -> int:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_blocks * 512 for path in files)


def _snapshot_rows(catalog: Catalog, *, dry_run: bool) -> Iterator[Garbage]:
    """Find rows of deleted snapshots that no other snapshot was made from.

    A snapshot on a disk that is not mounted does not count as deleted: a row goes only if the folder that held it is
    there and it is not.
    """
    rows = catalog.snapshots()
    needed = {source.sid for row in rows for source in row.inputs if source.sid is not None}
    for row in rows:
        if row.sid in needed or (row.path / MANIFEST_NAME).exists() or not row.path.parent.is_dir():
            continue
        if not dry_run:
            catalog.forget(row)
        yield Garbage("snapshot-row", f"{row.sid} {row.path}", "the snapshot is gone", 0, not dry_run)
