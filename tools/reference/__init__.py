"""Writes the reference pages of the documentation from the code: `python -m tools.reference docs/reference`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "mergepipe"
NOTE = "<!-- Written by `make reference` from the code. Do not edit. -->\n"


def pages() -> dict[str, str]:
    """Return the text of every generated page by its file name."""
    from tools.reference.command_line import command_line_page
    from tools.reference.error_codes import error_page
    from tools.reference.parameters import parameter_page
    from tools.reference.places import place_page
    from tools.reference.python_api import python_page

    writers: dict[str, Callable[[], str]] = {
        "cli.md": command_line_page,
        "errors.md": lambda: error_page(SOURCE),
        "parameters.md": parameter_page,
        "places.md": place_page,
        "python.md": python_page,
    }
    return {name: NOTE + write().rstrip() + "\n" for name, write in writers.items()}


def cell(text: str) -> str:
    """Return `text` as the content of one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def row(*cells: str) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def table(*head: str) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [row(*head), "|" + "---|" * len(head)]
