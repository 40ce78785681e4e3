"""The public API of kept snapshots: verify, repair, replay, materialise, compare, and collect garbage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.asked import engine_options, home_asked, threads_asked
from mergepipe.errors import LimitError

if TYPE_CHECKING:
    from mergepipe.reports import (
        GcReport,
        MaterialiseReport,
        MergeReport,
        ProgressCallback,
        RepairReport,
        SnapshotDiff,
        VerifyReport,
    )

DEFAULT_DEEP_FRACTION = 0.05


def verify(
    snapshot: str | Path,
    *,
    deep_fraction: float = 0.0,
    threads: int | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Read a whole snapshot and hold every block, digest and file against its manifest; damage is in the report.

    Args:
        snapshot: its directory, its sid, or first digits of it.
        deep_fraction: make tensors with this share of the bytes again from the inputs and compare.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing could be verified.
    """
    started = time.perf_counter()
    from mergepipe.workflows.verifying import verify_snapshot

    if not 0.0 <= deep_fraction <= 1.0:
        raise LimitError.of("option.sample", "--sample", f"{deep_fraction:g} was given", "give a share from 0 to 1")
    engine = engine_options(threads, memory_bytes)
    path = _path(snapshot, home)
    return verify_snapshot(path, engine, deep_fraction, started=started, on_progress=on_progress)


def repair(
    snapshot: str | Path,
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> RepairReport:
    """Make what is damaged in a snapshot again from its inputs, and write exactly that.

    Raises:
        MergePipeError: see `mergepipe.errors`; something could not be made again.
    """
    started = time.perf_counter()
    from mergepipe.workflows.repairing import repair_snapshot

    engine = engine_options(threads, memory_bytes)
    return repair_snapshot(_path(snapshot, home), engine, started=started, on_progress=on_progress)


def replay(
    snapshot: str | Path,
    out: str | Path,
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    force: bool = False,
    home: str | Path | None = None,
    catalog: bool = True,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Make a snapshot again at `out` from its manifest alone: the same bytes, or an error that says why not.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing was published.
    """
    started = time.perf_counter()
    from mergepipe.workflows.merging import MergeSettings
    from mergepipe.workflows.replaying import replay_snapshot

    settings = MergeSettings(
        engine=engine_options(threads, memory_bytes),
        seed=0,
        force=force,
        shard_bytes=1,
        home=home_asked(home) if catalog else None,
    )
    path = _path(snapshot, home)
    return replay_snapshot(path, Path(out), settings, started=started, on_progress=on_progress)


def materialise(
    overlay: str | Path,
    out: str | Path | None = None,
    *,
    base: str | Path | None = None,
    threads: int | None = None,
    force: bool = False,
    home: str | Path | None = None,
    catalog: bool = True,
    on_progress: ProgressCallback | None = None,
) -> MaterialiseReport:
    """Make the whole snapshot that an overlay stands for, every block compared with its digest on the way.

    Args:
        overlay: its directory, its sid, or first digits of it.
        out: the directory to create; without it the snapshot replaces the overlay, which needs `force`.
        base: the directory in which the base's files are by now; default, where they were.
        force: replace a snapshot that is already there.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing was published.
    """
    started = time.perf_counter()
    n_threads = threads_asked(threads)
    from mergepipe.workflows.materialising import MaterialiseSettings, materialise_overlay

    path = _path(overlay, home)
    settings = MaterialiseSettings(
        n_threads,
        force,
        home_asked(home) if catalog else None,
        Path(base) if base is not None else None,
    )
    return materialise_overlay(
        path, path if out is None else Path(out), settings, started=started, on_progress=on_progress
    )


def diff(
    a: str | Path,
    b: str | Path,
    *,
    reads_tensors: bool = True,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> SnapshotDiff:
    """Compare two snapshots: recipes, settings, inputs, coverage, and tensors with the norms of what differs.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.workflows.comparing import compare_snapshots

    return compare_snapshots(_path(a, home), _path(b, home), reads_tensors=reads_tensors, on_progress=on_progress)


def gc(roots: Sequence[str | Path] = (), *, dry_run: bool = False, home: str | Path | None = None) -> GcReport:
    """Remove staging of dead runs, beside known snapshots and under `roots`, and catalog rows of what is gone.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.workflows.collecting import collect_garbage

    return collect_garbage(home_asked(home), [Path(root) for root in roots], dry_run=dry_run)


def _path(snapshot: str | Path, home: str | Path | None) -> Path:
    from mergepipe.workflows.snapshots import find_snapshot_path

    return find_snapshot_path(str(snapshot), home_asked(home))
