"""Lays text out in lines: labelled facts, and columns of cells, no wider than the terminal, in its colours."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from mergepipe.core.escaping import printable
from mergepipe.core.notices import Notice
from mergepipe.core.units import format_percent

# --- what the terminal behind the standard streams supports ---

NARROWEST = 40
_STYLES = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "key": "\x1b[1m"}
_RESET = "\x1b[0m"
_WARNINGS = ("notice", "warning", "fallback", "adjusted", "missing", "not packed")
_ERRORS = ("damaged", "unreadable", "could not remove")
_KEY_FIGURES = (
    "verdict", "result", "budget", "planned", "error expected", "error bound", "experts read", "time", "output",
    "snapshot", "full merge", "stored",
)  # fmt: skip
_STYLE_OF_LABEL = {
    **dict.fromkeys(_WARNINGS, "warning"),
    **dict.fromkeys(_ERRORS, "error"),
    **dict.fromkeys(_KEY_FIGURES, "key"),
}
_LABEL = re.compile(rf"^({'|'.join(map(re.escape, _STYLE_OF_LABEL))})(?=  )", re.MULTILINE)
_FAILURE = re.compile(r"^(error|internal error|interrupted|warning)(?=:)", re.MULTILINE)


def available_columns() -> int | None:
    """The columns that a line of standard output may take: $COLUMNS, else the terminal's; None without a terminal."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return max(int(told), NARROWEST)
    try:
        return max(os.get_terminal_size(1).columns, NARROWEST) if os.isatty(1) else None
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

Fact = tuple[str, str]
NARROWEST_CELL = 12
_GAP = "  "


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


def notice_facts(notices: Iterable[Notice]) -> list[Fact]:
    """One fact a notice, warnings first."""
    ranked = sorted(notices, key=lambda notice: not notice.changes_result)
    return [(notice.kind, str(notice)) for notice in ranked]


def columns_text(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table: the first `left` columns flush left, the others flush right; nothing is dropped to make it fit.

    Where the terminal is narrower, cells of the widest columns go on below; where that is not enough, each row becomes
    a paragraph of labelled lines.
    """
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    columns = available_columns()
    if columns is not None:
        fitted = _fitted(widths, columns - len(_GAP) * (len(widths) - 1))
        if fitted is None:
            return "\n\n".join(facts_text(list(zip(cells[0], row, strict=True))) for row in cells[1:])
        widths = fitted
    return "\n".join(line for row in cells for line in _row_lines(row, widths, left))


def _fitted(widths: Sequence[int], room: int) -> list[int] | None:
    """Shrink the widest columns until all fit; None where a column would be narrower than `NARROWEST_CELL`."""
    fitted = list(widths)
    while sum(fitted) > room:
        widest = max(range(len(fitted)), key=lambda i: fitted[i])
        if fitted[widest] <= NARROWEST_CELL:
            return None
        fitted[widest] -= 1
    return fitted


def _row_lines(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    parts = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    return [
        _GAP.join(
            text.ljust(width) if i < left else text.rjust(width)
            for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            for text in [part[line] if line < len(part) else ""]
        ).rstrip()
        for line in range(max(map(len, parts)))
    ]


def _wrapped(text: str, room: int | None) -> list[str]:
    """Break at spaces, and inside of words that are longer than a line; every character but those spaces stays."""
    if room is None or len(text) <= room:
        return [text]
    return textwrap.wrap(text, room, break_on_hyphens=False) or [""]


def share_text(part: float, whole: float) -> str:
    """A share in percent with three digits: `12.5 %`; `-` of nothing."""
    return format_percent(part / whole) if whole else "-"


def number_text(value: float | None) -> str:
    """Three significant digits; `-` where there is no number."""
    return "-" if value is None else f"{value:.3g}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c, d and 16 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
