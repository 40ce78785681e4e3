"""The values that the catalog returns: frozen rows of snapshots and lineage, and its reports."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mergepipe.core.display import Displayed, shown
from mergepipe.errors import Problem
from mergepipe.snapshots.manifest import Input, RealizedBytes


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
    inputs: tuple[Input, ...]


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


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CatalogStats(Displayed):
    """Contents of the home folder: the index's file, its rows, and files of statistics."""

    path: Path = shown("catalog")
    file_bytes: int = shown("size")
    snapshots: int = shown("snapshots")
    digests: int = shown("digests", "of {digests:file}")
    statistics: int = shown("statistics", "of {statistics:expert}, {statistics_bytes}")
    statistics_bytes: int


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class RebuildReport(Displayed):
    """The result of `rebuild`.

    `missing` are recorded paths without a manifest; rows that could be read are kept. `composites` are training
    checkpoints composed by tailor, which are not snapshots and are skipped.
    """

    snapshots: int = shown("snapshots")
    missing: tuple[Path, ...] = shown("missing")
    unreadable: tuple[Problem, ...] = shown("unreadable")
    moved_aside: Path | None = shown("moved aside")
    composites: tuple[Path, ...] = shown(
        "composite", lambda path: f"{path}: a training checkpoint, no snapshot", default=()
    )
