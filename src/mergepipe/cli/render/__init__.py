"""Reports as text tables, pages and JSON."""

from __future__ import annotations

from importlib import import_module

_TABLES = {
    "AnalyzeReport": "merges.analyze_table",
    "CatalogStats": "snapshots.catalog_table",
    "Explanation": "budgets.explain_table",
    "ExtractLoraReport": "merges.extraction_table",
    "GcReport": "snapshots.gc_table",
    "MergeLoraReport": "merges.merged_adapter_table",
    "MergeReport": "merges.merge_table",
    "PackReport": "merges.pack_table",
    "PartReport": "merges.part_table",
    "PartsStatus": "merges.status_table",
    "PushReport": "snapshots.push_table",
    "RebuildReport": "snapshots.rebuild_table",
    "RepairReport": "snapshots.repair_table",
    "SnapshotDiff": "snapshots.diff_table",
    "SnapshotReport": "snapshots.snapshot_table",
    "SearchReport": "budgets.search_table",
    "SweepReport": "budgets.sweep_table",
    "UnpackReport": "merges.unpack_line",
}
"""The function that shows a report, by the class of the report; its module is loaded for the first report."""


def report_text(report: object) -> str:
    """Return a report as text for people."""
    module, _, function = _TABLES[type(report).__name__].partition(".")
    text: str = getattr(import_module(f"mergepipe.cli.render.{module}"), function)(report)
    return text
