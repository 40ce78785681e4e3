"""Print the reports of commands: as tables for people, as JSON for programs, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from mergepipe.cli.render.terminal import coloured_report
from mergepipe.core.escaping import printable, printable_lines

if TYPE_CHECKING:
    from mergepipe.core.notices import Notice
    from mergepipe.reports import MergeReport

Report = TypeVar("Report")


def print_text(text: str) -> None:
    """Print a table for people: nothing of it can control the terminal but our own colours."""
    print(coloured_report(printable_lines(text)))


def print_report(report: Report, table: Callable[[Report], str], *, as_json: bool, quiet: bool = False) -> None:
    """Tell what was found or done: as JSON, as `table` shows it, or, of a quiet command, the warnings alone."""
    if as_json:
        from mergepipe.cli.render.json import report_json

        print(report_json(report))
    elif quiet:
        print_warnings(getattr(report, "recipe_notices", ()))
    else:
        print_text(table(report))


def print_warnings(notices: Iterable[Notice]) -> None:
    """Write those notices to standard error that say that the result is another than the recipe asks for."""
    if sys.stderr is not None:
        for notice in (notice for notice in notices if notice.changes_result):
            print(f"{notice.kind}: {printable(str(notice))} [{notice.code}]", file=sys.stderr)


def print_merge_report(report: MergeReport, *, as_json: bool, quiet: bool) -> None:
    """Tell what a merge did."""
    if as_json:
        from mergepipe.cli.render.json import merge_json

        print(merge_json(report))
    elif quiet:
        print_warnings(report.recipe_notices)
    else:
        from mergepipe.cli.render.merges import merge_table

        print_text(merge_table(report))
