"""MergePipe: merge and tailor large-model checkpoints at disk speed, all or nothing."""

from __future__ import annotations

from sys import modules
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe.catalog.catalog import Catalog
    from mergepipe.errors import MergePipeError
    from mergepipe.plan import Plan
    from mergepipe.reports import (
        AnalyzeReport,
        CheckReport,
        Explanation,
        MergeReport,
        Progress,
        SnapshotReport,
        SweepReport,
    )
    from mergepipe.session import (
        analyze,
        catalog_stats,
        check,
        explain,
        lineage,
        merge,
        plan,
        rebuild_catalog,
        run,
        show,
        snapshots,
        store_plan,
        sweep,
    )

__version__ = "0.1.0"
__all__ = [
    "AnalyzeReport",
    "Catalog",
    "CheckReport",
    "Explanation",
    "MergePipeError",
    "MergeReport",
    "Plan",
    "Progress",
    "SnapshotReport",
    "SweepReport",
    "__version__",
    "analyze",
    "catalog_stats",
    "check",
    "explain",
    "lineage",
    "merge",
    "plan",
    "rebuild_catalog",
    "run",
    "show",
    "snapshots",
    "store_plan",
    "sweep",
]

_HOMES = {
    "AnalyzeReport": "reports",
    "Catalog": "catalog.catalog",
    "CheckReport": "reports",
    "Explanation": "reports",
    "MergePipeError": "errors",
    "MergeReport": "reports",
    "Plan": "plan",
    "Progress": "reports",
    "SnapshotReport": "reports",
    "SweepReport": "reports",
    "analyze": "session",
    "catalog_stats": "session",
    "check": "session",
    "explain": "session",
    "lineage": "session",
    "merge": "session",
    "plan": "session",
    "rebuild_catalog": "session",
    "run": "session",
    "show": "session",
    "snapshots": "session",
    "store_plan": "session",
    "sweep": "session",
}


class _Facade(ModuleType):
    """The package, in which a public function keeps its name where a module is called the same."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return  # importing `mergepipe.plan` would put the module in the place of the function
        super().__setattr__(name, value)


modules[__name__].__class__ = _Facade


def __getattr__(name: str) -> object:
    """Load public names when they are first used, so that the command line starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mergepipe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"mergepipe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
