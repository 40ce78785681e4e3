"""Collect garbage: remove staging of dead runs, and catalog rows of deleted snapshots."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.rows import SnapshotRow
from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.reports import Garbage, GcReport
from mergepipe.runs.snapshots import is_snapshot_of
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.snapshots.object_upload import UPLOADS_NAME, find_uploads
from mergepipe.snapshots.parts_places import FolderParts, find_parts, read_job
from mergepipe.snapshots.staging import find_staging, is_dead, remove_dead
from mergepipe.snapshots.work_log import merge_state, read_work_log
from mergepipe.storage import owned
from mergepipe.storage.location import OBJECT_SCHEMES, Location
from mergepipe.storage.owner import is_alive, newest_change
from mergepipe.storage.remote.bucket_folder import BucketFolder

ABANDONED_SECONDS: Final = 7 * 24 * 3600.0
"""Parts of an output that nobody has written to for so long are garbage: jobs may wait in a queue for days."""


def collect_garbage(home: Path, places: Sequence[Location], *, dry_run: bool) -> GcReport:
    """Remove staging of dead runs in `places` and next to known snapshots, and rows of deleted snapshots.

    Of buckets, what unfinished uploads left at and below the places is removed, snapshots never.

    A snapshot on a disk that is not mounted does not count as deleted: a row goes only if the folder that held it is
    there and it is not. What another snapshot was made from keeps its row.
    """
    roots = [place.local_path for place in places if place.scheme not in OBJECT_SCHEMES]
    for root in roots:
        if not root.is_dir():
            raise NotFoundError.of("storage.not-found", root, "no such directory", "check the path")
    living: list[str] = []
    garbage: list[Garbage] = []
    for place in (place for place in places if place.scheme in OBJECT_SCHEMES):
        garbage.extend((*_bucket_parts(place, dry_run=dry_run), *_uploads(place, living, dry_run=dry_run)))
    if (home / UPLOADS_NAME).is_dir():
        roots.append(home / UPLOADS_NAME)
    with contextlib.ExitStack() as stack:
        catalog = stack.enter_context(Catalog.open(home)) if (home / CATALOG_NAME).exists() else None
        folders = _folders(() if catalog is None else catalog.snapshots(), roots)
        garbage.extend((*_staging(folders, living, dry_run=dry_run), *_parts(folders, dry_run=dry_run)))
        garbage.extend(() if catalog is None else _snapshot_rows(catalog, dry_run=dry_run))
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
            nbytes = _allocated_bytes(directory)
            logged = read_work_log(directory)
            state = None if logged is None else merge_state(logged)
            durable = 0 if state is None else len(state.digests)
            reason = f"left by a dead run, {durable} tensors could be resumed" if durable else "left by a dead run"
            is_removed = not dry_run and remove_dead(directory)
            if not is_removed and not is_dead(directory):
                continue  # another process removed it, or works there by now
            yield Garbage("staging", str(directory), reason, nbytes, is_removed)


def _uploads(place: Location, living: list[str], *, dry_run: bool) -> Iterator[Garbage]:
    for upload in find_uploads(BucketFolder(place)):
        where = str(upload.folder.location)
        if upload.owner is not None:
            living.append(f"{where}: {upload.owner}")
            continue
        reason = "the mark of a finished upload" if upload.is_published else "left by a dead upload"
        is_removed = not dry_run and upload.remove()
        if dry_run or is_removed:  # else a run continues it by now
            yield Garbage("upload", where, reason, upload.nbytes, is_removed)


def _bucket_parts(place: Location, *, dry_run: bool) -> Iterator[Garbage]:
    for parts in find_parts(BucketFolder(place), ABANDONED_SECONDS):
        is_removed = not dry_run and parts.remove()
        if dry_run or is_removed:  # else a worker finishes the output by now
            yield _parts_garbage(str(parts.output.location), parts.nbytes, parts.is_published, is_removed)


def _parts(folders: Iterable[Path], *, dry_run: bool) -> Iterator[Garbage]:
    """Find parts directories whose output is published, or that are abandoned; others wait for their workers."""
    for folder in folders:
        for path in sorted(folder.glob(f".*{owned.PARTS_MARK}*")):
            if not owned.is_parts_name(path.name) or path.is_symlink():
                continue
            is_finished = _is_finished(path)
            silent_seconds = time.time() - max(newest_change(path), path.stat().st_mtime)
            if not is_finished and (silent_seconds < ABANDONED_SECONDS or _has_worker(path)):
                continue
            nbytes = _allocated_bytes(path)
            if not dry_run:
                owned.remove_tree(path, ignore_errors=True)
            yield _parts_garbage(str(path), nbytes, is_finished, not dry_run)


def _has_worker(directory: Path) -> bool:
    """Whether a process of this machine reads for a part, whatever the clock says, which may have jumped."""
    try:
        job = read_job(directory)
        claims = () if job is None else FolderParts(directory.parent / job.out, job).account().claims
    except MergePipeError:
        return False
    return any(claim.is_open and is_alive(claim.owner, ABANDONED_SECONDS) for claim in claims)


def _parts_garbage(where: str, nbytes: int, is_published: bool, is_removed: bool) -> Garbage:
    reason = "its output is published" if is_published else "nobody has worked on it for a week"
    return Garbage("parts", where, reason, nbytes, is_removed)


def _is_finished(directory: Path) -> bool:
    if directory.name.endswith(owned.FINISHED_SUFFIX):
        return True
    try:
        job = read_job(directory)
        return job is not None and is_snapshot_of(directory.parent / job.out, job.plan_digest)
    except MergePipeError:  # damaged: not ours to judge
        return False


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
