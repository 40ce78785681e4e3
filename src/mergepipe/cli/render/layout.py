"""Lays text out in lines: labelled facts, and columns of cells, no wider than the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from mergepipe.cli.render.terminal import available_columns
from mergepipe.core.escaping import printable
from mergepipe.core.notices import Notice
from mergepipe.core.units import format_percent

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
