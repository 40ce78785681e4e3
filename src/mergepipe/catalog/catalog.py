"""The catalog's interface for the rest of the package: typed calls, each one transaction."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import TracebackType

from blake3 import blake3

from mergepipe.catalog import snapshots as snapshots
from mergepipe.catalog.database import LOCK_TIMEOUT_SECONDS, Database, open_database, stored_text
from mergepipe.catalog.home import statistics_folder
from mergepipe.catalog.rows import CatalogStats, LineageNode, SnapshotRow
from mergepipe.catalog.snapshots import SnapshotRecord, read_manifest
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.snapshots.manifest import Manifest
from mergepipe.storage.contract import Store, resolved
from mergepipe.storage.file_version import FileId
from mergepipe.storage.stores import Stores


class Catalog:
    """An open catalog; a context manager. One object may be used by many threads, one file by many processes.

    Every call is one transaction. In addition to the errors listed, all methods raise those of `open` when the file is
    locked, damaged or inaccessible.
    """

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

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
        return cls(open_database(home, timeout_seconds=timeout_seconds), store or Stores())

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; calls after it are errors, closing again is not."""
        self._database.close()

    @property
    def path(self) -> Path:
        """The catalog's file."""
        return self._database.path

    # --- digests of files ---

    def with_known_digests(self, checkpoint: Checkpoint) -> Checkpoint:
        """Add to a checkpoint's fingerprints the SHA-256 digests that are on record for these versions of its files."""
        digests = {}
        with self._database.read_transaction() as connection:
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
        with self._database.write_transaction() as connection:
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
        snapshot_record = SnapshotRecord(manifest, blake3(manifest.to_json()).hexdigest(16))
        return self._record(snapshot_record, path, created, keep_created=False)

    def adopt_snapshot(self, path: Path, *, created: datetime) -> SnapshotRow:
        """Index a snapshot from its stored manifest; `created` is used if the catalog has no earlier record.

        Raises:
            CorruptError: `format.damaged`.
            NotFoundError: `snapshot.not-found`.
            StorageError: it cannot be read.
            UnsupportedError: `format.version`, `format.kind`, `catalog.path-encoding`.
        """
        return self._record(read_manifest(self._store, path), path, created, keep_created=True)

    def _record(self, record: SnapshotRecord, path: Path, created: datetime, *, keep_created: bool) -> SnapshotRow:
        with self._database.write_transaction() as connection:
            snapshots.record(connection, self._store, record, path, created=created, keep_created=keep_created)
            return snapshots.one_snapshot(connection, path)

    def snapshots(self) -> tuple[SnapshotRow, ...]:
        """Return every recorded snapshot, newest first."""
        with self._database.read_transaction() as connection:
            return snapshots.all_snapshots(connection)

    def snapshot(self, reference: str | Path) -> SnapshotRow:
        """Find a snapshot by its path, its sid, or at least the first four digits of it.

        Raises:
            NotFoundError: `snapshot.not-found`.
            RecipeError: `snapshot.ambiguous`.
        """
        with self._database.read_transaction() as connection:
            return snapshots.one_snapshot(connection, reference)

    def lineage(self, reference: str | Path, *, down: bool = False) -> tuple[LineageNode, ...]:
        """Return all that a snapshot was made from, or with `down` all that is made from it: a tree in preorder.

        Raises as `snapshot` does.
        """
        with self._database.read_transaction() as connection:
            trace = snapshots.descent if down else snapshots.lineage
            return trace(connection, snapshots.one_snapshot(connection, reference))

    def forget(self, reference: str | Path | SnapshotRow) -> SnapshotRow:
        """Remove a snapshot from the catalog, not from the disk. Raises as `snapshot` does, but not for a row."""
        with self._database.write_transaction() as connection:
            row = reference if isinstance(reference, SnapshotRow) else snapshots.one_snapshot(connection, reference)
            snapshots.forget(connection, row)
            return row

    # --- maintenance ---

    def stats(self) -> CatalogStats:
        """Return counts and sizes; `file_bytes` includes SQLite's log."""
        with self._database.read_transaction() as connection:
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
        self._database.check_integrity()
        self.snapshots()
