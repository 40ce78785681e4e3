"""Print the reports of commands: as text for people, in the terminal's width and colours, as JSON for programs, or not.

Text is facts, `label  value`, and tables: nothing in it can control the terminal but our own colours.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

from mergepipe.core.display import Displayed, Fact, Table, json_line, printable, printable_lines, sections
from mergepipe.core.flags import Flag, option

if TYPE_CHECKING:
    from mergepipe.core.outcome import Notice

REPORT_FORMAT = "mergepipe-report/1"
"""The first field of everything that `--json` prints, except plans, which have their own format.

The number grows when a field is removed or changes its meaning; new fields may be added at any time.
"""
PRINT_PANEL = "Printing"
DEBUG = Flag("On failure, also print the traceback.", panel=PRINT_PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintOptions:
    """Options of printing. The guard reads `--debug` before there is a command."""

    as_json: bool = option(False, "Print one JSON object, and no progress.", name="--json", panel=PRINT_PANEL)
    debug: bool = option(False, DEBUG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(PrintOptions):
    """Options of printing for commands that run long."""

    quiet: bool = option(
        False,
        "Print no progress and no report, only errors, and warnings if the result differs from what the recipe says.",
        short="-q",
        panel=PRINT_PANEL,
    )

    @property
    def silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.as_json


def print_report(report: Displayed, printing: PrintOptions) -> None:
    """Print a report: as JSON, as text, or, of a quiet command, its warnings alone."""
    if printing.as_json:
        print(report_json(report))
    elif isinstance(printing, ReportOptions) and printing.quiet:
        print_warnings(getattr(report, "recipe_notices", ()))
    else:
        print(coloured_report(printable_lines(report_text(report))))


def print_warnings(notices: Iterable[Notice]) -> None:
    """Write those notices to standard error that say that the result differs from what the recipe says."""
    tell(f"{notice.kind}: {notice} [{notice.code}]" for notice in notices if notice.changes_result)


def tell(lines: Iterable[str]) -> None:
    """Write lines to standard error."""
    if sys.stderr is not None:
        for line in lines:
            print(printable(line), file=sys.stderr)


def report_json(report: object) -> str:
    """Return one line: the format, then the fields of a report and its `COMPUTED` ones, or the items of a mapping.

    A report whose fields are not for others says what is told by `to_json`.
    """
    if hasattr(report, "to_json"):
        content: Mapping[str, object] = report.to_json()
    elif isinstance(report, Mapping):
        content = report
    else:
        names = (*(field.name for field in fields(report)), *getattr(report, "COMPUTED", ()))  # type: ignore[arg-type]
        content = {name: getattr(report, name) for name in names}
    return json_line({"format": REPORT_FORMAT, **content})


# --- what the terminal behind the standard streams supports ---

NARROWEST = 40
_STYLES = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "key": "\x1b[1m"}
_RESET = "\x1b[0m"
_WARNINGS = ("notice", "warning", "fallback", "adjusted", "missing")
_ERRORS = ("damaged", "unreadable", "could not remove")
_KEY_FIGURES = (
    "verdict", "result", "budget", "planned", "experts read", "time", "output", "snapshot", "full merge",
)  # fmt: skip
_STYLE_OF_LABEL = {
    **dict.fromkeys(_WARNINGS, "warning"),
    **dict.fromkeys(_ERRORS, "error"),
    **dict.fromkeys(_KEY_FIGURES, "key"),
}
_LABEL = re.compile(rf"^({'|'.join(map(re.escape, _STYLE_OF_LABEL))})(?=  )", re.MULTILINE)
_FAILURE = re.compile(r"^(error|internal error|interrupted|warning)(?=:)", re.MULTILINE)


def available_columns() -> int | None:
    """The columns that a line of standard output may take, at least `NARROWEST`; None without a terminal."""
    columns = terminal_columns(1)
    return None if columns is None else max(columns, NARROWEST)


def terminal_columns(descriptor: int) -> int | None:
    """The columns of the terminal that is open as `descriptor`: $COLUMNS, else what it says; None without one."""
    written = os.environ.get("COLUMNS", "")
    if written.isdecimal() and int(written) > 0:
        return int(written)
    try:
        return os.get_terminal_size(descriptor).columns if os.isatty(descriptor) else None
    except OSError:
        return None


def shows_colours(stream: TextIO | None) -> bool:
    """Whether to colour what is written to `stream`: $NO_COLOR, $FORCE_COLOR, else a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if stream is None or os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # it was closed
        return False


def coloured_report(text: str) -> str:
    """Colour the labels of warnings, damage and key figures in a report for standard output, if it shows colours."""
    return _coloured(_LABEL, text, _STYLE_OF_LABEL) if shows_colours(sys.__stdout__) else text


def coloured_failure(text: str) -> str:
    """Colour the first word of each line about a failure for standard error, if it shows colours."""
    styles = {"error": "error", "internal error": "error", "interrupted": "warning", "warning": "warning"}
    return _coloured(_FAILURE, text, styles) if shows_colours(sys.stderr) else text


def _coloured(pattern: re.Pattern[str], text: str, styles: dict[str, str]) -> str:
    return pattern.sub(lambda match: f"{_STYLES[styles[match[1]]]}{match[1]}{_RESET}", text)


# --- facts and columns ---

NARROWEST_CELL = 12
_GAP = "  "
_NUMBER = re.compile(r"-|(< )?-?[\d.,]+%?( [%A-Za-z/]+( \d\d \w+)?)?")


def report_text(report: Displayed) -> str:
    """Return a report as text: its facts and tables, with an empty line between them."""
    texts = []
    for section in sections(report):
        if isinstance(section, Table):
            texts.append(columns_text(section))
        else:
            texts.append(section.rstrip("\n") if isinstance(section, str) else facts_text(section))
    return "\n\n".join(texts)


def facts_text(facts: Sequence[Fact]) -> str:
    """One fact a line, the values under each other; long ones go on in the next line under their beginning."""
    width = max((len(label) for label, _ in facts), default=0)
    columns = available_columns()
    lines = []
    for label, value in facts:
        room = None if columns is None else max(columns - width - len(_GAP), NARROWEST_CELL)
        first, *rest = _wrapped(printable(value), room)
        lines.append(f"{label:<{width}}{_GAP}{first}")
        lines.extend(f"{'':<{width}}{_GAP}{line}" for line in rest)
    return "\n".join(lines)


def columns_text(table: Table) -> str:
    """A table: numbers flush right, but in the first column, all else flush left; nothing is dropped to make it fit.

    Where the terminal is narrower, cells of the widest columns go on below; where that is not enough, each row becomes
    a paragraph of labelled lines.
    """
    cells = [list(map(printable, row)) for row in (table.head, *table.rows)]
    by_column = list(zip(*cells, strict=True))
    numbers = [i > 0 and all(map(_NUMBER.fullmatch, column[1:])) for i, column in enumerate(by_column)]
    widths = [max(map(len, column)) for column in by_column]
    columns = available_columns()
    if columns is not None:
        fitted = _fitted(widths, columns - len(_GAP) * (len(widths) - 1))
        if fitted is None:
            return "\n\n".join(facts_text(list(zip(cells[0], row, strict=True))) for row in cells[1:])
        widths = fitted
    return "\n".join(line for row in cells for line in _row_lines(row, widths, numbers))


def _fitted(widths: Sequence[int], room: int) -> list[int] | None:
    """Shrink the widest columns until all fit; None where a column would be narrower than `NARROWEST_CELL`."""
    fitted = list(widths)
    while sum(fitted) > room:
        widest = max(range(len(fitted)), key=lambda i: fitted[i])
        if fitted[widest] <= NARROWEST_CELL:
            return None
        fitted[widest] -= 1
    return fitted


def _row_lines(row: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]) -> list[str]:
    """Lay out one row; cells that are longer than their columns go on in the lines below."""
    parts = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for texts in zip_longest(*parts, fillvalue=""):
        laid_out = [
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(texts, widths, numbers, strict=True)
        ]
        lines.append(_GAP.join(laid_out).rstrip())
    return lines


def _wrapped(text: str, room: int | None) -> list[str]:
    """Break at spaces, and inside of words that are longer than a line; every character but those spaces stays."""
    if room is None or len(text) <= room:
        return [text]
    return textwrap.wrap(text, room, break_on_hyphens=False) or [""]
