"""MergePipe: merge and tailor large-model checkpoints at disk speed, all or nothing."""

from __future__ import annotations

from sys import modules
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe import tailor
    from mergepipe.catalog.catalog import Catalog
    from mergepipe.errors import MergePipeError
    from mergepipe.keeping import diff, gc, materialise, repair, replay, verify
    from mergepipe.operators.custom import operator
    from mergepipe.plan import Plan
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
    from mergepipe.workflows.packing import pack
    from mergepipe.workflows.unpacking import unpack

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
    "snapshots",
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
    "Plan": "plan",
    "Progress": "reports",
    "SnapshotReport": "reports",
    "SweepReport": "reports",
    "UnpackReport": "reports",
    "analyze": "session",
    "catalog_stats": "session",
    "check": "session",
    "diff": "keeping",
    "explain": "session",
    "gc": "keeping",
    "lineage": "session",
    "materialise": "keeping",
    "merge": "session",
    "operator": "operators.custom",
    "pack": "workflows.packing",
    "plan": "session",
    "rebuild_catalog": "session",
    "repair": "keeping",
    "replay": "keeping",
    "run": "session",
    "show": "session",
    "snapshots": "session",
    "store_plan": "session",
    "sweep": "session",
    "unpack": "workflows.unpacking",
    "verify": "keeping",
}
_PACKAGES = ("tailor",)


class _Facade(ModuleType):
    """The package, in which a public function keeps its name where a module is called the same."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return  # importing `mergepipe.plan` would put the module in the place of the function
        super().__setattr__(name, value)


modules[__name__].__class__ = _Facade


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
