"""The public API of delta checkpoints: made from an expert, and applied to its base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe.reports import ProgressCallback
    from mergepipe.workflows.deltas import DeltaReport


def make_delta(
    base: str | Path,
    expert: str | Path,
    out: str | Path,
    *,
    exact: bool = False,
    force: bool = False,
    on_progress: ProgressCallback | None = None,
) -> DeltaReport:
    """Store at `out` what an expert differs by from its base.

    Args:
        exact: store in full what no difference gives back bit for bit.
        force: replace `out`, if mergepipe made it.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing was published.
    """
    from mergepipe.workflows.deltas import write_delta

    return write_delta(Path(base), Path(expert), Path(out), exact=exact, force=force, on_progress=on_progress)


def apply_delta(
    base: str | Path, delta: str | Path, out: str | Path, *, on_progress: ProgressCallback | None = None
) -> DeltaReport:
    """Make at `out` the expert that a delta was made from; each tensor is checked against the expert's digest.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing was published.
    """
    from mergepipe.workflows import deltas

    return deltas.apply_delta(Path(base), Path(delta), Path(out), on_progress=on_progress)
