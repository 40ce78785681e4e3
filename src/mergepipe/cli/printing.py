"""Print the reports of commands: as tables for people, as JSON for programs, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from mergepipe.cli.render.layout import coloured_report
from mergepipe.core.escaping import json_line, printable, printable_lines
from mergepipe.core.flags import Flag, option

if TYPE_CHECKING:
    from mergepipe.core.notices import Notice

REPORT_FORMAT = "mergepipe-report/1"
"""The first field of everything that `--json` prints but plans, which have a format of their own.

The number grows when a field goes away or changes its meaning; new fields may come at any time.
"""
PRINT_PANEL = "Printing"
DEBUG = Flag("On failure, print the traceback too.", panel=PRINT_PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintOptions:
    """Options of printing. The guard reads `--debug` before there is a command."""

    as_json: bool = option(False, Flag("Print one JSON object, and no progress.", name="--json", panel=PRINT_PANEL))
    debug: bool = option(False, DEBUG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(PrintOptions):
    """Options of printing for commands that run long."""

    quiet: bool = option(
        False,
        Flag(
            "No progress, no report: errors, and warnings that the result is not what the recipe says.",
            short="-q",
            panel=PRINT_PANEL,
        ),
    )

    @property
    def silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.as_json


def print_text(text: str) -> None:
    """Print a table for people: nothing of it can control the terminal but our own colours."""
    print(coloured_report(printable_lines(text)))


def print_report(report: object, printing: PrintOptions) -> None:
    """Print a report: as JSON, as a table, or, of a quiet command, its warnings alone."""
    if printing.as_json:
        print(report_json(report))
    elif isinstance(printing, ReportOptions) and printing.quiet:
        print_warnings(getattr(report, "recipe_notices", ()))
    else:
        print_text(report_text(report))


def print_warnings(notices: Iterable[Notice]) -> None:
    """Write those notices to standard error that say that the result is another than the recipe asks for."""
    if sys.stderr is not None:
        for notice in (notice for notice in notices if notice.changes_result):
            print(f"{notice.kind}: {printable(str(notice))} [{notice.code}]", file=sys.stderr)


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


def report_json(report: object, **more: object) -> str:
    """Return one line: the format, then the fields of a report and its `COMPUTED` ones, or the items of a mapping."""
    if is_dataclass(report):
        names = (*(field.name for field in fields(report)), *getattr(report, "COMPUTED", ()))
        content: Mapping[str, object] = {name: getattr(report, name) for name in names}
    elif isinstance(report, Mapping):
        content = report
    else:
        raise TypeError(f"a report has named fields: {type(report).__name__}")
    return json_line({"format": REPORT_FORMAT, **content, **more})
