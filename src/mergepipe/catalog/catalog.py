"""The catalog's interface for the rest of the package: typed calls, each one transaction."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

from blake3 import blake3

from mergepipe.catalog.database import (
    CATALOG_NAME,
    LOCK_TIMEOUT_SECONDS,
    REBUILD_HINT,
    open_database,
    set_aside,
    stored_text,
    typed_errors,
)
from mergepipe.catalog.snapshots import (
    CatalogStats,
    LineageNode,
    RebuildReport,
    SnapshotRow,
    find_manifests,
    read_manifest,
    row_of,
    sid_of_unchanged_input,
    trace,
)
from mergepipe.catalog.statistics_file import statistics_folder
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.core.records import decode, encode
from mergepipe.errors import (
    CorruptError,
    MergePipeError,
    NotFoundError,
    Problem,
    RecipeError,
    UnsupportedError,
    did_you_mean,
)
from mergepipe.snapshots.manifest import MANIFEST_NAME, Input, Manifest, RealizedBytes
from mergepipe.storage.contract import FileId, Store, modified_at, resolved
from mergepipe.storage.stores import Stores

MIN_PREFIX_DIGITS: Final = 4


class Catalog:
    """An open catalog, the file at `path`; a context manager. One object may be used by many threads, one file by
    many processes.

    Every call is one transaction. In addition to the errors listed, all methods raise those of `open` when the file is
    locked, damaged or inaccessible.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, store: Store) -> None:
        self.path = path
        self._connection = connection
        self._store = store
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @classmethod
    def open(cls, home: Path, *, store: Store | None = None, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Catalog:
        """Open the catalog under `home`; create it if needed. Inputs are looked at through `store`.

        Raises:
            ConflictError: `catalog.locked`.
            CorruptError: `catalog.damaged`.
            MismatchError: `catalog.foreign`.
            StorageError: `catalog.permission`, `catalog.no-space`, `catalog.io`.
            UnsupportedError: `catalog.newer`, `catalog.older`.
        """
        path = home / CATALOG_NAME
        return cls(path, open_database(home, path, timeout_seconds), store or Stores())

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; calls after it are errors, closing again is not.

        The last one in all processes moves the log of SQLite into the file.
        """
        with self._lock, typed_errors(self.path):
            self._connection.close()

    @contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a transaction with one consistent view of the file, committed if the block succeeds."""
        if os.getpid() != self._pid:
            raise RuntimeError("a catalog must be opened again after a fork")
        connection = self._connection
        with self._lock, typed_errors(self.path):
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    # --- digests of files ---

    def with_known_digests(self, checkpoint: Checkpoint) -> Checkpoint:
        """Add to a checkpoint's fingerprints the SHA-256 digests that are on record for these versions of its files."""
        digests = {}
        with self._transaction() as connection:
            for file in checkpoint.files:
                if file.sha256 is None:
                    row = connection.execute(
                        "SELECT sha256 FROM file_digests WHERE location = ? AND version = ? AND size_bytes = ?",
                        (self._place_of(checkpoint, file), file.version, file.size_bytes),
                    ).fetchone()
                    if row is not None:
                        digests[file.name] = str(row[0])
        return with_digests(checkpoint, digests) if digests else checkpoint

    def record_digests(self, checkpoint: Checkpoint) -> None:
        """Record the digests that a checkpoint's fingerprints hold; a location keeps that of its last version.

        Raises:
            UnsupportedError: `catalog.path-encoding`.
        """
        rows = [
            (self._place_of(checkpoint, file), file.version, file.size_bytes, file.sha256)
            for file in checkpoint.files
            if file.sha256 is not None
        ]
        with self._transaction(writes=True) as connection:
            connection.executemany("INSERT OR REPLACE INTO file_digests VALUES (?, ?, ?, ?)", rows)

    def _place_of(self, checkpoint: Checkpoint, file: FileId) -> str:
        """Return the location of a file, links resolved."""
        location = checkpoint.root / file.name
        return stored_text(str(resolved(self._store, location)), location)

    # --- snapshots ---

    def record_snapshot(self, manifest: Manifest, path: Path, *, created: datetime) -> SnapshotRow:
        """Index a published snapshot with its inputs, replacing the row of the same path.

        Raises:
            UnsupportedError: `catalog.path-encoding`.
            ValueError: `created` has no time zone.
        """
        if created.tzinfo is None:
            raise ValueError("`created` needs a time zone")
        return self._record(manifest, blake3(manifest.to_json()).hexdigest(16), path, created, keep_created=False)

    def adopt_snapshot(self, path: Path, *, created: datetime) -> SnapshotRow:
        """Index a snapshot from its stored manifest; `created` is used if the catalog has no earlier record.

        Raises:
            CorruptError: `format.damaged`.
            NotFoundError: `snapshot.not-found`.
            StorageError: it cannot be read.
            UnsupportedError: `format.version`, `format.kind`, `catalog.path-encoding`.
        """
        return self._record(*read_manifest(self._store, path), path, created, keep_created=True)

    def _record(
        self, manifest: Manifest, digest: str, path: Path, created: datetime, *, keep_created: bool
    ) -> SnapshotRow:
        """Insert the snapshot, or replace the row of its path.

        From other rows of the same manifest it keeps the sids of the inputs, which may be gone later, and with
        `keep_created` the time.
        """
        with self._transaction(writes=True) as connection:
            earlier = _rows(connection, "manifest_digest = ?", digest)
            if keep_created and earlier:
                created = earlier[-1].created
            sids = [
                next((row.inputs[i].sid for row in earlier if row.inputs[i].sid is not None), None)
                or sid_of_unchanged_input(self._store, source)
                for i, source in enumerate(manifest.inputs)
            ]
            row = row_of(manifest, digest, Path(path_text(path)), created.astimezone(UTC), sids)
            facts = _Facts(row.operator, row.plan_digest, row.realized, row.inputs)
            time = row.created.isoformat(timespec="microseconds")
            text = stored_text(json.dumps(encode(facts), ensure_ascii=False, allow_nan=False), path)
            connection.execute("DELETE FROM snapshots WHERE path = ?", (str(row.path),))
            connection.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?, ?, ?)", (str(row.path), row.sid, time, digest, text)
            )
            return row

    def snapshots(self) -> tuple[SnapshotRow, ...]:
        """Return every recorded snapshot, newest first."""
        with self._transaction() as connection:
            return _rows(connection, "TRUE")

    def snapshot(self, reference: str | Path) -> SnapshotRow:
        """Find a snapshot by its path, its sid, or at least the first four digits of it; of several the newest.

        Raises:
            NotFoundError: `snapshot.not-found`.
            RecipeError: `snapshot.ambiguous`.
        """
        with self._transaction() as connection:
            return _one_row(connection, reference)

    def lineage(self, reference: str | Path, *, down: bool = False) -> tuple[LineageNode, ...]:
        """Return all that a snapshot was made from, or with `down` all that is made from it: a tree in preorder.

        Raises as `snapshot` does.
        """
        with self._transaction() as connection:
            return trace(_rows(connection, "TRUE"), _one_row(connection, reference), down=down)

    def forget(self, reference: str | Path | SnapshotRow) -> SnapshotRow:
        """Remove a snapshot from the catalog, not from the disk. Raises as `snapshot` does, but not for a row."""
        with self._transaction(writes=True) as connection:
            row = reference if isinstance(reference, SnapshotRow) else _one_row(connection, reference)
            connection.execute("DELETE FROM snapshots WHERE path = ?", (str(row.path),))
            return row

    # --- maintenance ---

    def stats(self) -> CatalogStats:
        """Return counts and sizes; `file_bytes` includes SQLite's log."""
        with self._transaction() as connection:
            counts = [
                int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
                for table in ("snapshots", "file_digests")
            ]
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        statistics = list(statistics_folder(self.path.parent).glob("*.stats"))
        return CatalogStats(
            path=self.path,
            file_bytes=sum(file.stat().st_size for file in files if file.exists()),
            snapshots=counts[0],
            digests=counts[1],
            statistics=len(statistics),
            statistics_bytes=sum(file.stat().st_size for file in statistics),
        )

    def check_integrity(self) -> None:
        """Read every page of the file and every snapshot.

        Raises:
            CorruptError: `catalog.damaged`.
        """
        with self._transaction() as connection:
            finding = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if finding != "ok":
            raise CorruptError.of("catalog.damaged", self.path, finding, REBUILD_HINT)
        self.snapshots()
        self.stats()


# --- rows of snapshots ---


@dataclass(frozen=True, slots=True)
class _Facts:
    """The column `facts` of a row of `snapshots`, which is JSON."""

    operator: str
    plan_digest: str | None
    realized: RealizedBytes
    inputs: tuple[Input, ...]


def path_text(path: Path) -> str:
    """Return the path of a snapshot with links resolved, in the form that is stored."""
    return stored_text(os.path.realpath(path), path)


def _rows(connection: sqlite3.Connection, condition: str, *values: object) -> tuple[SnapshotRow, ...]:
    """Return the snapshots of which an SQL condition holds, newest first."""
    query = f"SELECT * FROM snapshots WHERE {condition} ORDER BY created DESC, rowid DESC"
    return tuple(map(_row, connection.execute(query, values).fetchall()))


def _row(columns: tuple[str, str, str, str, str]) -> SnapshotRow:
    path, sid, created, digest, text = columns
    try:
        facts = decode(_Facts, json.loads(text))
        return SnapshotRow(
            sid, Path(path), facts.operator, datetime.fromisoformat(created), facts.plan_digest, digest,
            facts.realized, facts.inputs,
        )  # fmt: skip
    except (ValueError, TypeError, RecursionError) as error:
        message = f"the snapshot's row is damaged: {error}"
        raise CorruptError.of("catalog.damaged", path, message, REBUILD_HINT) from error


def _one_row(connection: sqlite3.Connection, reference: str | Path) -> SnapshotRow:
    """Find a snapshot by path, sid or a prefix of its sid; of several with that sid, the newest."""
    at_path = _rows(connection, "path = ?", path_text(Path(reference)))
    if at_path:
        return at_path[0]
    prefix = str(reference).lower()
    rows = _rows(connection, "substr(sid, 1, ?) = ?", len(prefix), prefix)
    sids = sorted({row.sid for row in rows})
    if not sids or not prefix:
        known = [text for row in _rows(connection, "TRUE") for text in (row.sid, str(row.path))]
        hint = did_you_mean(str(reference), known) if known else "the catalog holds no snapshots"
        raise NotFoundError.of("snapshot.not-found", reference, "no such snapshot in the catalog", hint)
    common = (len(os.path.commonprefix([a, b])) + 1 for a, b in pairwise((*sids, "")))  # noqa: RUF071 - digits
    needed = max(MIN_PREFIX_DIGITS, *common)
    if len(prefix) < MIN_PREFIX_DIGITS:
        message = f"{len(prefix)} digits of a sid are too few"
        hint = f"give {needed}: {' or '.join(sid[:needed] for sid in sids[:5])}"
        raise NotFoundError.of("snapshot.not-found", reference, message, hint)
    if len(sids) > 1:
        message = f"could be {', '.join(sids[:5])}"
        raise RecipeError.of("snapshot.ambiguous", reference, message, f"give {needed} digits")
    return rows[0]


# --- the catalog made again: snapshots from their manifests; digests of files stay where the file is sound ---


_FATAL = ("catalog.locked", "catalog.no-space", "catalog.io")


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
        moved = set_aside(home / CATALOG_NAME)
        return Catalog.open(home, timeout_seconds=timeout_seconds), moved
    try:
        catalog.check_integrity()
    except CorruptError:
        catalog.close()
        moved = set_aside(home / CATALOG_NAME)
        return Catalog.open(home, timeout_seconds=timeout_seconds), moved
    except BaseException:
        catalog.close()
        raise
    return catalog, None


def _still_missing(catalog: Catalog, digests: set[str], missing: list[Path]) -> tuple[Path, ...]:
    """Forget rows of snapshots that were found elsewhere; return the remaining paths without a manifest."""
    lost = list(missing)
    for snapshot in catalog.snapshots():
        is_elsewhere = snapshot.path in missing or os.path.realpath(snapshot.path) != str(snapshot.path)
        if is_elsewhere and snapshot.manifest_digest in digests:
            catalog.forget(snapshot)
            lost = [path for path in lost if path != snapshot.path]
    return tuple(lost)
