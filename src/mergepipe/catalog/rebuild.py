"""Rebuild the catalog: snapshots from their manifests; digests of files stay where the file is sound."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import LOCK_TIMEOUT_SECONDS, catalog_os_error, check_regular_files, typed_errors
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.snapshots import RebuildReport, SnapshotRow, find_manifests
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, Problem, UnsupportedError
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.contract import modified_at

_FATAL = ("catalog.locked", "catalog.no-space", "catalog.io")
_SIDE_FILES = ("", "-wal", "-shm")


def rebuild(home: Path, roots: Sequence[Path], *, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> RebuildReport:
    """Recreate snapshots and lineage from the manifests under `roots` and at recorded paths.

    Digests of files in a sound catalog are kept. One that is damaged or of an older version is moved aside, never
    deleted. Close other processes that use it first: they would continue to write to the moved file.
    """
    unreadable: list[Problem] = []
    manifest_paths = list(find_manifests(roots, unreadable))
    catalog, moved_aside = _open_sound(home, timeout_seconds)
    recorded: list[SnapshotRow] = []
    missing: list[Path] = []
    composites: list[Path] = []
    with catalog:
        paths = [*manifest_paths, *(snapshot.path for snapshot in catalog.snapshots())]
        for path in dict.fromkeys(Path(os.path.realpath(path)) for path in paths):
            try:
                recorded.append(catalog.adopt_snapshot(path, created=modified_at(path / MANIFEST_NAME)))
            except NotFoundError:
                missing.append(path)
            except MergePipeError as error:
                codes = {problem.code for problem in error.problems}
                if not codes.isdisjoint(_FATAL):
                    raise
                if "format.kind" in codes:
                    composites.append(path)
                else:
                    unreadable.extend(error.problems)
        lost = _still_missing(catalog, {snapshot.manifest_digest for snapshot in recorded}, missing)
    return RebuildReport(
        snapshots=len(recorded),
        missing=lost,
        unreadable=tuple(unreadable),
        moved_aside=moved_aside,
        composites=tuple(composites),
    )


def _open_sound(home: Path, timeout_seconds: float) -> tuple[Catalog, Path | None]:
    try:
        catalog = Catalog.open(home, timeout_seconds=timeout_seconds)
    except (CorruptError, UnsupportedError) as error:
        if error.code == "catalog.newer":
            raise
        moved = _move_aside(home / CATALOG_NAME)
        return Catalog.open(home, timeout_seconds=timeout_seconds), moved
    try:
        catalog.check_integrity()
    except CorruptError:
        catalog.close()
        moved = _move_aside(home / CATALOG_NAME)
        return Catalog.open(home, timeout_seconds=timeout_seconds), moved
    except BaseException:
        catalog.close()
        raise
    return catalog, None


def _move_aside(path: Path) -> Path:
    """Rename the file and its WAL to the first free `.corrupt-N`."""
    _refuse_if_in_use(path)
    number = 1
    while path.with_name(f"{path.name}.corrupt-{number}").exists():
        number += 1
    aside = path.with_name(f"{path.name}.corrupt-{number}")
    try:
        for suffix in _SIDE_FILES:
            if path.with_name(path.name + suffix).exists():
                path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise catalog_os_error(error, path) from error
    return aside


def _refuse_if_in_use(path: Path) -> None:
    """Raise `catalog.locked` if another process is writing; a damaged file is accepted."""
    check_regular_files(path)
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        try:
            with typed_errors(path):
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except CorruptError:
            return


def _still_missing(catalog: Catalog, digests: set[str], missing: list[Path]) -> tuple[Path, ...]:
    """Forget rows of snapshots that were found elsewhere; return the remaining paths without a manifest."""
    lost = list(missing)
    for snapshot in catalog.snapshots():
        is_elsewhere = snapshot.path in missing or os.path.realpath(snapshot.path) != str(snapshot.path)
        if is_elsewhere and snapshot.manifest_digest in digests:
            catalog.forget(snapshot)
            lost = [path for path in lost if path != snapshot.path]
    return tuple(lost)
