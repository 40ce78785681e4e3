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
    apply_lora, check_lora, merge_lora, extract_lora, convert_lora
Reading models
    load_file, LoadedTensors
Merges that are not written
    merged_tensors, load_model, merge_into
Looking after snapshots
    list_snapshots, show, lineage, diff, verify, repair, replay, without, push, gc
The catalog
    catalog_stats, rebuild_catalog, Catalog
Training checkpoints
    tailor.inspect, tailor.check, tailor.compose, tailor.recipe, tailor.diff

Options of a call are keywords, or one value that several calls share (`MergeOptions`, `PlanOptions`, `RunOptions`):
`merge(recipe, out, budget="25%", threads=8)` is `merge(recipe, out, options=MergeOptions(budget="25%", threads=8))`.
Sizes are numbers of bytes or texts: `memory="4GiB"`. Where a result is not what the recipe asks for, a call warns with
the category `MergePipeWarning`.
"""

from __future__ import annotations

__version__ = "0.1.0"
_MODULES = ("errors", "tailor")
_HOMES = {
    "catalog.catalog": ("Catalog",),
    "catalog.snapshots": ("CatalogStats", "LineageNode", "RebuildReport"),
    "cli.progress": ("progress_bar",),
    "errors": ("MergePipeError", "MergePipeWarning"),
    "jobs.analyze": ("analyze",),
    "jobs.check_lora": ("check_lora",),
    "jobs.convert_lora": ("convert_lora",),
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
    "jobs.repair": ("repair",),
    "jobs.replay": ("replay",),
    "jobs.search": ("search",),
    "jobs.snapshots": ("catalog_stats", "gc", "lineage", "list_snapshots", "rebuild_catalog", "show"),
    "jobs.sweep": ("sweep",),
    "jobs.verify": ("verify",),
    "jobs.without": ("without",),
    "operators.custom": ("operator",),
    "options": (
        "AnalyzeOptions", "ApplyLoraOptions", "CheckLoraOptions", "CheckOptions", "ConvertLoraOptions",
        "ExtractLoraOptions", "MergeLoraOptions", "MergeOptions", "OutputOptions", "PackOptions", "PlanOptions",
        "PushOptions", "RunOptions", "SearchOptions", "SweepOptions", "UnpackOptions", "VerifyOptions",
    ),
    "planning.plan": ("Plan", "store_plan"),
    "reports": (
        "AnalyzeReport", "CheckLoraReport", "CheckReport", "ConvertLoraReport", "Explanation", "ExtractLoraReport",
        "GcReport", "MergeLoraReport", "MergeReport", "PackReport", "PartReport", "PartsStatus", "Progress",
        "PushReport", "RepairReport", "SearchReport", "SnapshotDiff", "SnapshotReport", "SweepReport", "UnpackReport",
        "VerifyReport", "WithoutReport",
    ),
}  # fmt: skip
"""Modules of the public names. Type checkers see them in `__init__.pyi`, which `make reference` writes."""
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
