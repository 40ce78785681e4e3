"""Lays text out in lines: labelled facts, and columns of cells."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.core.escaping import printable

Fact = tuple[str, str]


def facts_text(facts: Sequence[Fact]) -> str:
    """One line a fact, the values under each other."""
    width = max((len(label) for label, _ in facts), default=0)
    return "\n".join(f"{label:<{width}}  {printable(value)}" for label, value in facts)


def columns_text(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table: the first `left` columns flush left, the others flush right."""
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def share_text(part: float, whole: float) -> str:
    """A share in percent with three digits: `12.5 %`; `-` of nothing."""
    return f"{100 * part / whole:.3g} %" if whole else "-"


def number_text(value: float | None) -> str:
    """Three significant digits; `-` where there is no number."""
    return "-" if value is None else f"{value:.3g}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c, d and 16 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
