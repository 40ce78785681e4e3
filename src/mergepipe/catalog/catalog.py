"""The catalog as the rest of the program sees it: typed calls, each one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType

from mergepipe.catalog import models, snapshots, tensor_statistics
from mergepipe.catalog.database import LOCK_TIMEOUT_SECONDS, Database, open_database
from mergepipe.catalog.manifests import parse_manifest, read_manifest
from mergepipe.catalog.rows import (
    CatalogStats,
    Evidence,
    LineageNode,
    ModelRow,
    SnapshotRow,
    StaleModel,
)
from mergepipe.catalog.usage import catalog_stats
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.formats.strict_json import JsonValue
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.snapshots.manifest import Manifest


class Catalog:
    """An open catalog; a context manager. One object may be used by many threads, one file by many processes.

    Every call is one transaction. Beside what they list, all methods raise the errors of `open` when the file is
    locked, damaged or out of reach.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, home: Path, *, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Catalog:
        """Open the catalog under `home`, made or migrated where needed.

        Raises:
            ConflictError: `catalog.locked`.
            CorruptError: `catalog.corrupt`.
            MismatchError: `catalog.foreign`.
            StorageError: `catalog.permission`, `catalog.no-space`, `catalog.io`.
            UnsupportedError: `catalog.newer`.
        """
        return cls(open_database(home, timeout_seconds=timeout_seconds))

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; calls after it are an error, closing again is not."""
        self._database.close()

    @property
    def path(self) -> Path:
        """The catalog's file."""
        return self._database.path

    # --- models ---

    def register_model(self, checkpoint: Checkpoint, content_id: str | None = None) -> ModelRow:
        """Record a checkpoint as it is now, or find it; a content id that was not known is added.

        Raises:
            UnsupportedError: `catalog.path-encoding`.
        """
        row = models.model_row(checkpoint, content_id)
        with self._database.writing() as connection:
            return models.register(connection, row)

    def model_for(self, checkpoint: Checkpoint) -> ModelRow | None:
        """Find the row of exactly this checkpoint: same path, same files, same sizes, times and headers."""
        with self._database.reading() as connection:
            return models.find(connection, models.model_row(checkpoint, None).id)

    def models(self) -> tuple[ModelRow, ...]:
        """Every model, oldest first; several of one path where its files changed."""
        with self._database.reading() as connection:
            return models.all_models(connection)

    def stale_models(self) -> tuple[StaleModel, ...]:
        """Models whose files are gone, or have another size or time by now."""
        return tuple(stale for row in self.models() if (stale := models.staleness(row)) is not None)

    def forget_models(self, rows: Iterable[ModelRow]) -> int:
        """Remove models with all their statistics; return how many there were."""
        with self._database.writing() as connection:
            return models.forget(connection, rows)

    # --- statistics ---

    def put_many(
        self,
        expert: ModelRow,
        base: ModelRow,
        statistics: Mapping[str, TensorStatistics],
        *,
        evidence: Evidence = Evidence.EXACT,
    ) -> int:
        """Store the statistics of several tensors, all or none; return how many rows were written.

        Exact statistics replace whatever is there, probes replace only probes.

        Raises:
            ConflictError: `catalog.model-gone`, a model was removed meanwhile.
        """
        with self._database.writing() as connection:
            return tensor_statistics.put(connection, expert, base, statistics, evidence)

    def statistics(
        self, expert: ModelRow, base: ModelRow, *, accept: Iterable[Evidence] = (Evidence.EXACT,)
    ) -> Mapping[str, TensorStatistics]:
        """Statistics of an expert's tensors against a base, by name; probes only where they are accepted.

        Raises:
            CorruptError: `catalog.corrupt-statistics`, naming the tensor.
        """
        with self._database.reading() as connection:
            rows = list(tensor_statistics.rows_of(connection, expert, base, accept))
        return {row.tensor: row.unpacked() for row in rows}

    def evidence(self, expert: ModelRow, base: ModelRow) -> Mapping[str, Evidence]:
        """What the statistics of each tensor of a pair rest on."""
        with self._database.reading() as connection:
            return tensor_statistics.evidence_of(connection, expert, base)

    def missing_statistics(
        self, expert: ModelRow, base: ModelRow, names: Iterable[str], block_elements: int, densities: Iterable[float]
    ) -> tuple[str, ...]:
        """Those of `names`, in their order, that still have to be analysed.

        A tensor is done when exact, undamaged statistics on this grid hold the cuts of all these densities.
        """
        wanted = tuple(densities)
        with self._database.reading() as connection:
            rows = list(tensor_statistics.rows_of(connection, expert, base, (Evidence.EXACT,)))
        done = {row.tensor for row in rows if tensor_statistics.is_enough(row, block_elements, wanted)}
        return tuple(name for name in names if name not in done)

    # --- snapshots ---

    def record_snapshot(self, manifest: Manifest, path: Path, *, created: datetime) -> SnapshotRow:
        """Index a published snapshot with its inputs; what was recorded of its path before is replaced.

        Raises:
            UnsupportedError: `catalog.path-encoding`.
            ValueError: `created` has no time zone.
        """
        if created.tzinfo is None:
            raise ValueError("`created` needs a time zone")
        found = parse_manifest(manifest.to_json(), path)
        with self._database.writing() as connection:
            snapshots.record(connection, found, path, created=created, keep_created=False)
            return snapshots.one_snapshot(connection, path)

    def adopt_snapshot(self, path: Path, *, created: datetime) -> SnapshotRow:
        """Index a snapshot from the manifest on storage; `created` counts only if the catalog does not know better.

        Raises:
            CorruptError: `manifest.*`.
            NotFoundError: `manifest.missing`.
            StorageError: it cannot be read.
            UnsupportedError: `manifest.version`, `catalog.path-encoding`.
        """
        found = read_manifest(path)
        with self._database.writing() as connection:
            snapshots.record(connection, found, path, created=created, keep_created=True)
            return snapshots.one_snapshot(connection, path)

    def snapshots(self) -> tuple[SnapshotRow, ...]:
        """Every recorded snapshot, newest first."""
        with self._database.reading() as connection:
            return snapshots.all_snapshots(connection)

    def snapshot(self, asked: str | Path) -> SnapshotRow:
        """Find a snapshot by its path, its sid, or at least four first digits of it.

        Raises:
            NotFoundError: `snapshot.unknown`.
            RecipeError: `snapshot.ambiguous`.
        """
        with self._database.reading() as connection:
            return snapshots.one_snapshot(connection, asked)

    def coverage(self, asked: str | Path) -> JsonValue:
        """The coverage in a snapshot's manifest as it was recorded, None if it had none. Raises as `snapshot` does."""
        with self._database.reading() as connection:
            return snapshots.coverage_of(connection, snapshots.one_snapshot(connection, asked))

    def lineage(self, asked: str | Path) -> tuple[LineageNode, ...]:
        """All that went into a snapshot through all generations: a tree in preorder. Raises as `snapshot` does."""
        with self._database.reading() as connection:
            return snapshots.lineage(connection, snapshots.one_snapshot(connection, asked))

    def forget(self, asked: str | Path | SnapshotRow) -> SnapshotRow:
        """Take a snapshot out of the catalog, not off the disk. Raises as `snapshot` does, but not for a row."""
        with self._database.writing() as connection:
            found = asked if isinstance(asked, SnapshotRow) else snapshots.one_snapshot(connection, asked)
            snapshots.forget(connection, found)
            return found

    # --- itself ---

    def stats(self) -> CatalogStats:
        """Counts and bytes."""
        with self._database.reading() as connection:
            return catalog_stats(connection, self.path)

    def check_integrity(self) -> None:
        """Read every page of the file and every row but the statistics, which carry checksums of their own.

        Raises:
            CorruptError: `catalog.corrupt`.
        """
        self._database.check_integrity()
        with self._database.reading() as connection:
            models.check_rows(connection)
            snapshots.check_rows(connection)

    def drop_corrupt_statistics(self) -> int:
        """Remove statistics that fail their checksum; return how many."""
        with self._database.writing() as connection:
            return tensor_statistics.drop_corrupt(connection)

    def restore(self, row: ModelRow) -> ModelRow:
        """Put back a model's row as it was saved from another catalog."""
        with self._database.writing() as connection:
            return models.register(connection, row)
