"""Detect what the terminal behind the standard streams supports: its width, and colours."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

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
