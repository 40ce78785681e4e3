"""The values that the catalog returns: frozen rows of models, snapshots and lineage, and its reports."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from mergepipe.checkpoints.contract import FileFingerprint
from mergepipe.errors import Problem
from mergepipe.snapshots.manifest import RealizedBytes
from mergepipe.storage.location import Location


class ModelKind(StrEnum):
    """The kind of a model's path when it was registered."""

    DIRECTORY = "directory"
    FILE = "file"
    SNAPSHOT = "snapshot"  # a directory with a manifest


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One checkpoint in the state in which it was registered. `id` digests the resolved path and file fingerprints.

    `content_digest` (see `checkpoints.file_digests`) is None where it is unknown. Models of the same one share their
    statistics and their `content_id`. `dtypes` pairs each dtype's name with the number of parameters stored in it.
    """

    id: str
    path: Location
    kind: ModelKind
    content_id: str | None
    n_tensors: int
    n_parameters: int
    tensor_bytes: int
    dtypes: tuple[tuple[str, int], ...]
    files: tuple[FileFingerprint, ...]
    content_digest: str | None = None

    @property
    def root(self) -> Location:
        """The directory that file names are relative to."""
        return self.path.parent if self.kind is ModelKind.FILE else self.path


class Staleness(StrEnum):
    """The reason why a registered model no longer describes its files."""

    CHANGED = "changed"  # sizes or times differ
    MISSING = "missing"  # a file was deleted or moved, or its disk is not mounted


@dataclass(frozen=True, slots=True)
class StaleModel:
    """A model whose statistics cannot be used at present."""

    model: ModelRow
    staleness: Staleness


@dataclass(frozen=True, slots=True)
class InputRow:
    """One input of a snapshot, `path` as recorded; `sid` is set if the input was itself a snapshot."""

    role: str
    model: str
    path: str
    content_id: str | None
    read_bytes: int
    sid: str | None


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """One published snapshot. `created` is in UTC."""

    sid: str
    path: Path
    operator: str
    created: datetime
    plan_digest: str | None
    manifest_digest: str
    realized: RealizedBytes
    inputs: tuple[InputRow, ...]


@dataclass(frozen=True, slots=True)
class LineageNode:
    """One node of a lineage in preorder, `depth` 0 for the requested snapshot.

    `operator` is None for models, and for snapshots that the catalog does not hold. A snapshot is expanded once:
    further occurrences have `is_repeated` set and no children.
    """

    depth: int
    role: str
    model: str
    path: str
    sid: str | None
    operator: str | None
    read_bytes: int | None
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class TableUsage:
    """Rows of one table, and the bytes of their values (without SQLite's overhead)."""

    name: str
    rows: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Sizes and counts of a catalog. `described_bytes` are the tensor bytes of the experts of all pairs."""

    path: Path
    file_bytes: int
    tables: tuple[TableUsage, ...]
    models: int
    pairs: int
    described_bytes: int
    analysed_tensors: int
    snapshots: int


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """The result of `rebuild`.

    `missing` are recorded paths without a manifest; rows that could be read are kept. `composites` are training
    checkpoints composed by tailor, which are not snapshots and are skipped.
    """

    snapshots: int
    missing: tuple[Path, ...]
    unreadable: tuple[Problem, ...]
    dropped_statistics: int
    moved_aside: Path | None
    composites: tuple[Path, ...] = ()
