"""The public Python API: merge and check, each returning a typed report."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.errors import LimitError

if TYPE_CHECKING:
    from mergepipe.reports import CheckReport, MergeReport, ProgressCallback

DEFAULT_SHARD_BYTES = 5_000_000_000


def default_memory_bytes() -> int:
    """The default cap on buffers: the lesser of 4 GiB and half of the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 << 30, physical // 2)


def default_threads() -> int:
    """One compute thread per processor this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check(recipe: str | Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> CheckReport:
    """Validate a recipe and its inputs without reading any tensor data.

    Raises:
        MergePipeError: every problem found, in one error.
    """
    from mergepipe.engine.execute import plan_output
    from mergepipe.merging import check_report, open_inputs
    from mergepipe.storage.local import LocalStore

    _positive("--shard-size", shard_bytes)
    inputs = open_inputs(Path(recipe), LocalStore())
    return check_report(inputs, plan_output(inputs.resolution.tasks, shard_bytes))


def merge(
    recipe: str | Path,
    out: str | Path,
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    seed: int = 0,
    force: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Merge as the recipe says and publish the result at `out`, complete or not at all.

    Args:
        threads: compute threads; default, one per processor.
        memory_bytes: cap on buffers; default `default_memory_bytes()`.
        seed: seed of the random operators.
        force: replace a snapshot that is already at `out`.
        shard_bytes: largest output file, in bytes of tensor data.
        on_progress: called about ten times a second, from the calling thread.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind.
    """
    started = time.perf_counter()
    from mergepipe.engine.execute import EngineOptions
    from mergepipe.merging import run_merge

    options = EngineOptions(
        _positive("--threads", threads if threads is not None else default_threads()),
        _positive("--memory", memory_bytes if memory_bytes is not None else default_memory_bytes()),
    )
    return run_merge(
        Path(recipe),
        Path(out),
        options,
        seed=seed,
        force=force,
        shard_bytes=_positive("--shard-size", shard_bytes),
        started=started,
        on_progress=on_progress,
    )


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise LimitError.of("option.not-positive", option, f"{value} was given", "give a number above zero")
    return value
