"""The catalog's interface for the rest of the package: typed calls, each one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType

from mergepipe.catalog import contents, models, snapshots, statistics_transfer, tensor_statistics
from mergepipe.catalog.contents import FileDigest
from mergepipe.catalog.database import LOCK_TIMEOUT_SECONDS, Database, open_database
from mergepipe.catalog.manifests import SnapshotRecord, parse_manifest, read_manifest
from mergepipe.catalog.rows import (
    CatalogStats,
    LineageNode,
    ModelRow,
    SnapshotRow,
    StaleModel,
)
from mergepipe.catalog.statistics_file import PortablePair, StatisticsFile
from mergepipe.catalog.usage import catalog_stats
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.core.strict_json import JsonValue
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.snapshots.manifest import Manifest
from mergepipe.storage.contract import Store
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
        """Open the catalog under `home`; create it if needed. Models are looked at through `store`.

        Raises:
            ConflictError: `catalog.locked`.
            CorruptError: `catalog.corrupt`.
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

    # --- models ---

    def register_model(self, checkpoint: Checkpoint, content_id: str | None = None) -> ModelRow:
        """Record a checkpoint in its present state, or find its row; what was unknown of its content is added.

        Digests that its fingerprints hold are recorded for the versions of its files. If they say that another model
        has the same content, the two share all that is known of either.

        Raises:
            UnsupportedError: `catalog.path-encoding`.
        """
        with self._database.write_transaction() as connection:
            described = models.known_digests(connection, self._store, checkpoint)
            digests = models.digests_of(self._store, described)
            contents.record_digests(connection, digests)
            row = models.model_row(self._store, described, content_id)
            registered = models.register(connection, row, digests)
            if row.content_digest is not None and registered.content_digest is None:
                self._share(connection, registered, row.content_digest)
            return models.model_with_id(connection, registered.id)

    def model_for(self, checkpoint: Checkpoint) -> ModelRow | None:
        """Find the row of exactly this checkpoint: same path and versions of files, or the same digests of them.

        One that is known by its digests alone is registered.
        """
        with self._database.read_transaction() as connection:
            described = models.known_digests(connection, self._store, checkpoint)
            row = models.model_row(self._store, described, None)
            present = models.find(connection, row.id)
            if present is not None or row.content_digest is None:
                return present
            is_known = contents.content_with_digest(connection, row.content_digest) is not None
        return self.register_model(described) if is_known else None

    def twins(self, checkpoint: Checkpoint, content_id: str) -> tuple[ModelRow, ...]:
        """Return models of known digest that look like this checkpoint: headers, sizes and content id are equal.

        Whether they are the same, only the digests of this one's files say.
        """
        with self._database.read_transaction() as connection:
            return models.twins(connection, models.model_row(self._store, checkpoint, None), content_id)

    def with_known_digests(self, checkpoint: Checkpoint) -> Checkpoint:
        """Add to a checkpoint's fingerprints the digests that are on record for these versions of its files."""
        with self._database.read_transaction() as connection:
            return models.known_digests(connection, self._store, checkpoint)

    def known_sha256(self, location: str, version: str, size_bytes: int) -> str | None:
        """Return the SHA-256 that a version of a file had, or has, at a location with links resolved."""
        with self._database.read_transaction() as connection:
            return contents.known_sha256(connection, location, version, size_bytes)

    def models(self) -> tuple[ModelRow, ...]:
        """Return every model, oldest first; a path whose files changed has several."""
        with self._database.read_transaction() as connection:
            return models.all_models(connection)

    def stale_models(self) -> tuple[StaleModel, ...]:
        """Return the models whose files are missing or have another size or version now."""
        return tuple(stale for row in self.models() if (stale := models.staleness(self._store, row)) is not None)

    def forget_models(self, rows: Iterable[ModelRow]) -> int:
        """Remove models with all their statistics; return how many there were."""
        with self._database.write_transaction() as connection:
            return models.forget(connection, rows)

    def gone_digests(self) -> tuple[FileDigest, ...]:
        """Return the digests of files of this machine that are gone or changed, and that no snapshot was made from."""
        with self._database.read_transaction() as connection:
            return models.gone_digests(connection, self._store)

    def forget_digests(self, digests: Iterable[FileDigest]) -> None:
        """Forget the digests of files."""
        with self._database.write_transaction() as connection:
            contents.forget_digests(connection, digests)

    @staticmethod
    def _share(connection: sqlite3.Connection, model: ModelRow, digest: str) -> None:
        """Record a model's digest; share all that is known with the content that has it already."""
        keys = models.set_digest(connection, model, digest)
        if keys is not None:
            tensor_statistics.merge_contents(connection, *keys)

    # --- statistics ---

    def put_many(self, expert: ModelRow, base: ModelRow, statistics: Mapping[str, TensorStatistics]) -> int:
        """Store the statistics of several tensors, all or none; return how many rows were written.

        Raises:
            ConflictError: `catalog.model-gone`, a model was removed meanwhile.
        """
        with self._database.write_transaction() as connection:
            return tensor_statistics.put(connection, expert, base, statistics)

    def statistics(self, expert: ModelRow, base: ModelRow) -> Mapping[str, TensorStatistics]:
        """Return statistics of an expert's tensors against a base, by name.

        Raises:
            CorruptError: `catalog.corrupt-statistics`, naming the tensor.
        """
        with self._database.read_transaction() as connection:
            rows = list(tensor_statistics.rows_of(connection, expert, base))
        return {row.tensor: row.unpacked() for row in rows}

    def tensors_on_record(self, expert: ModelRow, base: ModelRow) -> frozenset[str]:
        """Return the tensors of a pair that have statistics, sound or not."""
        with self._database.read_transaction() as connection:
            return tensor_statistics.tensors_of(connection, expert, base)

    def missing_statistics(
        self, expert: ModelRow, base: ModelRow, names: Iterable[str], block_elements: int, densities: Iterable[float]
    ) -> tuple[str, ...]:
        """Return those of `names`, in their order, that still have to be analysed.

        A tensor is complete if it has sound statistics on this grid with the cuts of all these densities.
        """
        required_densities = tuple(densities)
        with self._database.read_transaction() as connection:
            rows = list(tensor_statistics.rows_of(connection, expert, base))
        complete = {row.tensor for row in rows if tensor_statistics.covers(row, block_elements, required_densities)}
        return tuple(name for name in names if name not in complete)

    def portable_pair(self, expert: ModelRow, base: ModelRow) -> PortablePair:
        """Return all statistics of a pair, bound to the digests of the contents in place of this catalog's rows.

        Raises:
            CorruptError: `catalog.corrupt-statistics`, naming the tensor.
            ValueError: a digest is unknown.
        """
        with self._database.read_transaction() as connection:
            return statistics_transfer.portable_pair(connection, expert, base)

    def take_in(self, file: StatisticsFile, where: object) -> int:
        """Record the statistics of a file for whichever models have these contents; return how many rows were new.

        Raises:
            CorruptError: `stats.row`; nothing was recorded.
            UnsupportedError: `stats.version`.
        """
        with self._database.write_transaction() as connection:
            return statistics_transfer.take_in(connection, file, where)

    # --- snapshots ---

    def record_snapshot(self, manifest: Manifest, path: Path, *, created: datetime) -> SnapshotRow:
        """Index a published snapshot with its inputs, replacing the row of the same path.

        Raises:
            UnsupportedError: `catalog.path-encoding`.
            ValueError: `created` has no time zone.
        """
        if created.tzinfo is None:
            raise ValueError("`created` needs a time zone")
        snapshot_record = parse_manifest(manifest.to_json(), path)
        return self._record(snapshot_record, path, created, keep_created=False)

    def adopt_snapshot(self, path: Path, *, created: datetime) -> SnapshotRow:
        """Index a snapshot from its stored manifest; `created` is used if the catalog has no earlier record.

        Raises:
            CorruptError: `manifest.*`.
            NotFoundError: `manifest.missing`.
            StorageError: it cannot be read.
            UnsupportedError: `manifest.version`, `catalog.path-encoding`.
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
            NotFoundError: `snapshot.unknown`.
            RecipeError: `snapshot.ambiguous`.
        """
        with self._database.read_transaction() as connection:
            return snapshots.one_snapshot(connection, reference)

    def coverage(self, reference: str | Path) -> JsonValue:
        """Return the coverage from a snapshot's manifest, None if it has none. Raises as `snapshot` does."""
        with self._database.read_transaction() as connection:
            return snapshots.coverage_of(connection, snapshots.one_snapshot(connection, reference))

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
        """Return counts and sizes."""
        with self._database.read_transaction() as connection:
            return catalog_stats(connection, self.path)

    def check_integrity(self) -> None:
        """Read every page of the file and every row except statistics, which have their own checksums.

        Raises:
            CorruptError: `catalog.corrupt`.
        """
        self._database.check_integrity()
        with self._database.read_transaction() as connection:
            models.check_rows(connection)
            snapshots.check_rows(connection)

    def drop_corrupt_statistics(self) -> int:
        """Remove statistics that fail their checksum; return how many."""
        with self._database.write_transaction() as connection:
            return tensor_statistics.drop_corrupt(connection)
