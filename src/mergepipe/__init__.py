"""MergePipe: merge and tailor large-model checkpoints at disk speed, all or nothing.

    import mergepipe

    print(mergepipe.check("recipe.yml").expert_bytes)          # reads no tensor data
    report = mergepipe.merge("recipe.yml", "merged", budget="25%")
    print(report.expert_bytes, mergepipe.verify("merged").is_sound)
    with mergepipe.progress_bar() as on_progress:              # in a notebook, on a terminal
        mergepipe.merge("recipe.yml", "other", on_progress=on_progress)

Every call checks its arguments, does one job and returns a report, an immutable value. What fails raises a
`MergePipeError` with a stable code (`mergepipe.errors`), and leaves nothing half done.

Merging
    check, merge, operator (merge rules of your own)
Planning under a budget
    analyze, plan, store_plan, run, explain, sweep, search
Merging on many machines
    run_part, parts_status
Packing experts
    pack, unpack
    apply_lora, merge_lora, extract_lora
Reading models
    load_file, LoadedTensors
Merges that are not written
    merged_tensors, load_model, merge_into
Looking after snapshots
    list_snapshots, show, lineage, diff, verify, repair, replay, push, gc
The catalog
    catalog_stats, rebuild_catalog, Catalog
Training checkpoints
    tailor.inspect, tailor.check, tailor.compose, tailor.recipe, tailor.diff

Options of a call are keywords, or one value that several calls share (`MergeOptions`, `PlanOptions`, `RunOptions`):
`merge(recipe, out, budget="25%", threads=8)` is `merge(recipe, out, options=MergeOptions(budget="25%", threads=8))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe import errors, tailor
    from mergepipe.api import (
        analyze,
        apply_lora,
        catalog_stats,
        check,
        diff,
        explain,
        extract_lora,
        gc,
        lineage,
        list_snapshots,
        load_file,
        load_model,
        merge,
        merge_into,
        merge_lora,
        merged_tensors,
        pack,
        parts_status,
        plan,
        push,
        rebuild_catalog,
        repair,
        replay,
        run,
        run_part,
        search,
        show,
        store_plan,
        sweep,
        unpack,
        verify,
    )
    from mergepipe.catalog.catalog import Catalog
    from mergepipe.catalog.snapshots import CatalogStats, LineageNode, RebuildReport
    from mergepipe.cli.progress import progress_bar
    from mergepipe.errors import MergePipeError
    from mergepipe.jobs.load import LoadedTensors
    from mergepipe.operators.custom import operator
    from mergepipe.options import (
        AnalyzeOptions,
        ApplyLoraOptions,
        CheckOptions,
        ExtractLoraOptions,
        MergeLoraOptions,
        MergeOptions,
        OutputOptions,
        PackOptions,
        PlanOptions,
        PushOptions,
        RunOptions,
        SearchOptions,
        SweepOptions,
        UnpackOptions,
        VerifyOptions,
    )
    from mergepipe.planning.plan import Plan
    from mergepipe.reports import (
        AnalyzeReport,
        CheckReport,
        Explanation,
        ExtractLoraReport,
        GcReport,
        MergeLoraReport,
        MergeReport,
        PackReport,
        PartReport,
        PartsStatus,
        Progress,
        PushReport,
        RepairReport,
        SearchReport,
        SnapshotDiff,
        SnapshotReport,
        SweepReport,
        UnpackReport,
        VerifyReport,
    )

__version__ = "0.1.0"
__all__ = [
    "AnalyzeOptions",
    "AnalyzeReport",
    "ApplyLoraOptions",
    "Catalog",
    "CatalogStats",
    "CheckOptions",
    "CheckReport",
    "Explanation",
    "ExtractLoraOptions",
    "ExtractLoraReport",
    "GcReport",
    "LineageNode",
    "LoadedTensors",
    "MergeLoraOptions",
    "MergeLoraReport",
    "MergeOptions",
    "MergePipeError",
    "MergeReport",
    "OutputOptions",
    "PackOptions",
    "PackReport",
    "PartReport",
    "PartsStatus",
    "Plan",
    "PlanOptions",
    "Progress",
    "PushOptions",
    "PushReport",
    "RebuildReport",
    "RepairReport",
    "RunOptions",
    "SearchOptions",
    "SearchReport",
    "SnapshotDiff",
    "SnapshotReport",
    "SweepOptions",
    "SweepReport",
    "UnpackOptions",
    "UnpackReport",
    "VerifyOptions",
    "VerifyReport",
    "__version__",
    "analyze",
    "apply_lora",
    "catalog_stats",
    "check",
    "diff",
    "errors",
    "explain",
    "extract_lora",
    "gc",
    "lineage",
    "list_snapshots",
    "load_file",
    "load_model",
    "merge",
    "merge_into",
    "merge_lora",
    "merged_tensors",
    "operator",
    "pack",
    "parts_status",
    "plan",
    "progress_bar",
    "push",
    "rebuild_catalog",
    "repair",
    "replay",
    "run",
    "run_part",
    "search",
    "show",
    "store_plan",
    "sweep",
    "tailor",
    "unpack",
    "verify",
]

_MODULES = ("errors", "tailor")
_REPORTS = frozenset(name for name in __all__ if name.endswith(("Report", "Diff")))
_OTHER_HOMES = {
    "Catalog": "catalog.catalog",
    "CatalogStats": "catalog.snapshots",
    "Explanation": "reports",
    "ExtractLoraReport": "reports",
    "MergeLoraReport": "reports",
    "LineageNode": "catalog.snapshots",
    "LoadedTensors": "jobs.load",
    "MergePipeError": "errors",
    "PartsStatus": "reports",
    "Plan": "planning.plan",
    "progress_bar": "cli.progress",
    "Progress": "reports",
    "RebuildReport": "catalog.snapshots",
    "operator": "operators.custom",
}
"""Modules of the names that are neither calls nor options nor reports."""


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, so that the command line starts at once."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"mergepipe.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'mergepipe' has no attribute {name!r}")
    from mergepipe.errors import check_platform

    check_platform()
    home = _OTHER_HOMES.get(name, "reports" if name in _REPORTS else "options" if name.endswith("Options") else "api")
    return getattr(import_module(f"mergepipe.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
