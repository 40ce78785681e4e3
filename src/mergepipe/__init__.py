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

if TYPE_CHECKING:  # what type checkers see of the names below; "isort: off" keeps one import a module
    # isort: off
    from mergepipe import errors as errors, tailor as tailor
    from mergepipe.catalog.catalog import Catalog as Catalog
    from mergepipe.catalog.snapshots import (
        CatalogStats as CatalogStats,
        LineageNode as LineageNode,
        RebuildReport as RebuildReport,
    )
    from mergepipe.cli.progress import progress_bar as progress_bar
    from mergepipe.errors import MergePipeError as MergePipeError
    from mergepipe.jobs.analyze import analyze as analyze
    from mergepipe.jobs.diff import diff as diff
    from mergepipe.jobs.explain import explain as explain
    from mergepipe.jobs.extract_lora import extract_lora as extract_lora
    from mergepipe.jobs.load import (
        LoadedTensors as LoadedTensors,
        load_file as load_file,
        load_model as load_model,
        merge_into as merge_into,
        merged_tensors as merged_tensors,
    )
    from mergepipe.jobs.merge import merge as merge, run as run
    from mergepipe.jobs.merge_lora import apply_lora as apply_lora, merge_lora as merge_lora
    from mergepipe.jobs.pack import pack as pack, unpack as unpack
    from mergepipe.jobs.parts import parts_status as parts_status, run_part as run_part
    from mergepipe.jobs.plan import check as check, plan as plan
    from mergepipe.jobs.push import push as push
    from mergepipe.jobs.replay import replay as replay
    from mergepipe.jobs.search import search as search, sweep as sweep
    from mergepipe.jobs.snapshots import (
        catalog_stats as catalog_stats,
        gc as gc,
        lineage as lineage,
        list_snapshots as list_snapshots,
        rebuild_catalog as rebuild_catalog,
        show as show,
    )
    from mergepipe.jobs.verify import repair as repair, verify as verify
    from mergepipe.operators.custom import operator as operator
    from mergepipe.options import (
        AnalyzeOptions as AnalyzeOptions,
        ApplyLoraOptions as ApplyLoraOptions,
        CheckOptions as CheckOptions,
        ExtractLoraOptions as ExtractLoraOptions,
        MergeLoraOptions as MergeLoraOptions,
        MergeOptions as MergeOptions,
        OutputOptions as OutputOptions,
        PackOptions as PackOptions,
        PlanOptions as PlanOptions,
        PushOptions as PushOptions,
        RunOptions as RunOptions,
        SearchOptions as SearchOptions,
        SweepOptions as SweepOptions,
        UnpackOptions as UnpackOptions,
        VerifyOptions as VerifyOptions,
    )
    from mergepipe.planning.plan import Plan as Plan, store_plan as store_plan
    from mergepipe.reports import (
        AnalyzeReport as AnalyzeReport,
        CheckReport as CheckReport,
        Explanation as Explanation,
        ExtractLoraReport as ExtractLoraReport,
        GcReport as GcReport,
        MergeLoraReport as MergeLoraReport,
        MergeReport as MergeReport,
        PackReport as PackReport,
        PartReport as PartReport,
        PartsStatus as PartsStatus,
        Progress as Progress,
        PushReport as PushReport,
        RepairReport as RepairReport,
        SearchReport as SearchReport,
        SnapshotDiff as SnapshotDiff,
        SnapshotReport as SnapshotReport,
        SweepReport as SweepReport,
        UnpackReport as UnpackReport,
        VerifyReport as VerifyReport,
    )

__version__ = "0.1.0"
_MODULES = ("errors", "tailor")
_HOMES = {
    "catalog.catalog": ("Catalog",),
    "catalog.snapshots": ("CatalogStats", "LineageNode", "RebuildReport"),
    "cli.progress": ("progress_bar",),
    "errors": ("MergePipeError",),
    "jobs.analyze": ("analyze",),
    "jobs.diff": ("diff",),
    "jobs.explain": ("explain",),
    "jobs.extract_lora": ("extract_lora",),
    "jobs.load": ("LoadedTensors", "load_file", "load_model", "merge_into", "merged_tensors"),
    "jobs.merge": ("merge", "run"),
    "jobs.merge_lora": ("apply_lora", "merge_lora"),
    "jobs.pack": ("pack", "unpack"),
    "jobs.parts": ("parts_status", "run_part"),
    "jobs.plan": ("check", "plan"),
    "jobs.push": ("push",),
    "jobs.replay": ("replay",),
    "jobs.search": ("search", "sweep"),
    "jobs.snapshots": ("catalog_stats", "gc", "lineage", "list_snapshots", "rebuild_catalog", "show"),
    "jobs.verify": ("repair", "verify"),
    "operators.custom": ("operator",),
    "options": (
        "AnalyzeOptions", "ApplyLoraOptions", "CheckOptions", "ExtractLoraOptions", "MergeLoraOptions", "MergeOptions",
        "OutputOptions", "PackOptions", "PlanOptions", "PushOptions", "RunOptions", "SearchOptions", "SweepOptions",
        "UnpackOptions", "VerifyOptions",
    ),
    "planning.plan": ("Plan", "store_plan"),
    "reports": (
        "AnalyzeReport", "CheckReport", "Explanation", "ExtractLoraReport", "GcReport", "MergeLoraReport",
        "MergeReport", "PackReport", "PartReport", "PartsStatus", "Progress", "PushReport", "RepairReport",
        "SearchReport", "SnapshotDiff", "SnapshotReport", "SweepReport", "UnpackReport", "VerifyReport",
    ),
}  # fmt: skip
"""Modules of the public names."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(("__version__", *_MODULES, *_HOME_OF))  # noqa: PLE0605


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, so that the command line starts at once."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"mergepipe.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'mergepipe' has no attribute {name!r}")
    from mergepipe.errors import check_platform

    check_platform()
    return getattr(import_module(f"mergepipe.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
