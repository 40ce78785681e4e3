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
    from mergepipe.catalog.catalog import Catalog
    from mergepipe.catalog.snapshots import CatalogStats, LineageNode, RebuildReport
    from mergepipe.cli.progress import progress_bar
    from mergepipe.errors import MergePipeError
    from mergepipe.jobs.analyze import analyze
    from mergepipe.jobs.diff import diff
    from mergepipe.jobs.explain import explain
    from mergepipe.jobs.extract_lora import extract_lora
    from mergepipe.jobs.load import LoadedTensors, load_file, load_model, merge_into, merged_tensors
    from mergepipe.jobs.merge import merge, run
    from mergepipe.jobs.merge_lora import apply_lora, merge_lora
    from mergepipe.jobs.pack import pack, unpack
    from mergepipe.jobs.parts import parts_status, run_part
    from mergepipe.jobs.plan import check, plan
    from mergepipe.jobs.push import push
    from mergepipe.jobs.replay import replay
    from mergepipe.jobs.search import search, sweep
    from mergepipe.jobs.snapshots import catalog_stats, gc, lineage, list_snapshots, rebuild_catalog, show
    from mergepipe.jobs.verify import repair, verify
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
    from mergepipe.planning.plan import Plan, store_plan
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
_HOMES = {
    "catalog.catalog": ("Catalog",),
    "catalog.snapshots": ("CatalogStats", "LineageNode", "RebuildReport"),
    "cli.progress": ("progress_bar",),
    "errors": ("MergePipeError",),
    "jobs.load": ("LoadedTensors", "load_file", "load_model", "merge_into", "merged_tensors"),
    "jobs.merge": ("merge", "run"),
    "jobs.merge_lora": ("apply_lora", "merge_lora"),
    "jobs.pack": ("pack", "unpack"),
    "jobs.parts": ("parts_status", "run_part"),
    "jobs.plan": ("check", "plan"),
    "jobs.search": ("search", "sweep"),
    "jobs.verify": ("repair", "verify"),
    "operators.custom": ("operator",),
    "options": tuple(name for name in __all__ if name.endswith("Options")),
    "planning.plan": ("Plan", "store_plan"),
    "reports": (
        "Explanation", "PartsStatus", "Progress", "SnapshotDiff",
        *(name for name in __all__ if name.endswith("Report") and name != "RebuildReport"),
    ),
    "jobs.snapshots": ("catalog_stats", "gc", "lineage", "list_snapshots", "rebuild_catalog", "show"),
}  # fmt: skip
"""Modules of the public names; a call that is not listed is in the module of `jobs` that has its name."""


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, so that the command line starts at once."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"mergepipe.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'mergepipe' has no attribute {name!r}")
    from mergepipe.errors import check_platform

    check_platform()
    home = next((module for module, names in _HOMES.items() if name in names), f"jobs.{name}")
    return getattr(import_module(f"mergepipe.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
