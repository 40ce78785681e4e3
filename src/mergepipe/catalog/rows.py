"""What the catalog gives back: frozen rows of models, snapshots and lineage, and reports about itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from mergepipe.checkpoints.contract import FileFingerprint
from mergepipe.errors import Problem
from mergepipe.snapshots.manifest import RealizedBytes


class ModelKind(StrEnum):
    """What a model's path was when it was registered."""

    DIRECTORY = "directory"
    FILE = "file"
    SNAPSHOT = "snapshot"  # a directory with a manifest


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One checkpoint as it was when it was registered. `id` digests the resolved path and the files' fingerprints.

    `dtypes` pairs each dtype's name with the number of parameters stored in it.
    """

    id: str
    path: Path
    kind: ModelKind
    content_id: str | None
    n_tensors: int
    n_parameters: int
    tensor_bytes: int
    dtypes: tuple[tuple[str, int], ...]
    files: tuple[FileFingerprint, ...]

    @property
    def root(self) -> Path:
        """The directory that file names are relative to."""
        return self.path.parent if self.kind is ModelKind.FILE else self.path


class Staleness(StrEnum):
    """Why a registered model no longer describes what is on storage."""

    CHANGED = "changed"  # sizes or times differ
    MISSING = "missing"  # a file is not there: deleted, moved, or its disk is not mounted


@dataclass(frozen=True, slots=True)
class StaleModel:
    """A model whose statistics cannot be used as things are."""

    model: ModelRow
    staleness: Staleness


class Evidence(StrEnum):
    """What statistics rest on."""

    EXACT = "exact"  # every element was read
    PROBE = "probe"  # estimated from a sample


@dataclass(frozen=True, slots=True)
class InputRow:
    """One input of a snapshot; `sid` is set where the input was itself a snapshot."""

    role: str
    model: str
    path: Path
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
    """One line of a lineage: a tree in preorder, `depth` 0 for the snapshot that was asked for.

    `operator` is None for what is not a snapshot, or is one that the catalog does not hold. Every snapshot is
    unfolded once: where it occurs again, `is_repeated` is set and nothing follows below it.
    """

    depth: int
    role: str
    model: str
    path: Path
    sid: str | None
    operator: str | None
    read_bytes: int | None
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class TableUsage:
    """Rows of one table, and the bytes of their values (without SQLite's own)."""

    name: str
    rows: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """What the catalog holds. `described_bytes` are the tensor bytes of the experts of all pairs."""

    path: Path
    file_bytes: int
    tables: tuple[TableUsage, ...]
    models: int
    pairs: int
    described_bytes: int
    exact_tensors: int
    probed_tensors: int
    snapshots: int


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What `rebuild` did.

    `missing` are recorded paths without a manifest; rows that could be read are kept. `composites` are training
    checkpoints that tailor composed: they are no snapshots, and are left out.
    """

    snapshots: int
    missing: tuple[Path, ...]
    unreadable: tuple[Problem, ...]
    dropped_statistics: int
    salvaged_statistics: int
    moved_aside: Path | None
    composites: tuple[Path, ...] = ()
