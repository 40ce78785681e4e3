"""MergePipe: merge and tailor large-model checkpoints at disk speed, all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe import tailor
    from mergepipe.api import (
        analyze,
        catalog_stats,
        check,
        diff,
        explain,
        gc,
        lineage,
        list_snapshots,
        materialise,
        merge,
        plan,
        rebuild_catalog,
        repair,
        replay,
        run,
        show,
        store_plan,
        sweep,
        verify,
    )
    from mergepipe.catalog.catalog import Catalog
    from mergepipe.errors import MergePipeError
    from mergepipe.jobs.pack import pack
    from mergepipe.jobs.unpack import unpack
    from mergepipe.operators.custom import operator
    from mergepipe.planning.plan import Plan
    from mergepipe.reports import (
        AnalyzeReport,
        CheckReport,
        Explanation,
        MergeReport,
        PackReport,
        Progress,
        SnapshotReport,
        SweepReport,
        UnpackReport,
    )

__version__ = "0.1.0"
__all__ = [
    "AnalyzeReport",
    "Catalog",
    "CheckReport",
    "Explanation",
    "MergePipeError",
    "MergeReport",
    "PackReport",
    "Plan",
    "Progress",
    "SnapshotReport",
    "SweepReport",
    "UnpackReport",
    "__version__",
    "analyze",
    "catalog_stats",
    "check",
    "diff",
    "explain",
    "gc",
    "lineage",
    "list_snapshots",
    "materialise",
    "merge",
    "operator",
    "pack",
    "plan",
    "rebuild_catalog",
    "repair",
    "replay",
    "run",
    "show",
    "store_plan",
    "sweep",
    "tailor",
    "unpack",
    "verify",
]

_HOMES = {
    "AnalyzeReport": "reports",
    "Catalog": "catalog.catalog",
    "CheckReport": "reports",
    "Explanation": "reports",
    "MergePipeError": "errors",
    "MergeReport": "reports",
    "PackReport": "reports",
    "Plan": "planning.plan",
    "Progress": "reports",
    "SnapshotReport": "reports",
    "SweepReport": "reports",
    "UnpackReport": "reports",
    "analyze": "api",
    "catalog_stats": "api",
    "check": "api",
    "diff": "api",
    "explain": "api",
    "gc": "api",
    "lineage": "api",
    "list_snapshots": "api",
    "materialise": "api",
    "merge": "api",
    "operator": "operators.custom",
    "pack": "jobs.pack",
    "plan": "api",
    "rebuild_catalog": "api",
    "repair": "api",
    "replay": "api",
    "run": "api",
    "show": "api",
    "store_plan": "api",
    "sweep": "api",
    "unpack": "jobs.unpack",
    "verify": "api",
}
_PACKAGES = ("tailor",)


def __getattr__(name: str) -> object:
    """Load public names when they are first used, so that the command line starts at once."""
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"mergepipe.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'mergepipe' has no attribute {name!r}")
    return getattr(import_module(f"mergepipe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
