"""Reports fit the terminal, and are coloured where it shows colours."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.cli.render.layout import coloured_failure, coloured_report, columns_text, facts_text, shows_colours

WORDS = st.text("abcdefgh/.-", min_size=1, max_size=60)


def without_spaces(text: str) -> str:
    return "".join(sorted("".join(text.split())))


@given(cells=st.lists(st.lists(WORDS, min_size=5, max_size=5), min_size=1, max_size=4), columns=st.integers(60, 200))
def test_columns__fit_and_nothing_is_dropped(cells: list[list[str]], columns: int) -> None:
    head = ["expert", "read", "of its own", "blocks read", "error expected"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        text = columns_text(head, cells)
    assert max(map(len, text.splitlines())) <= columns
    written = without_spaces(text)
    for row in cells:
        for cell in row:
            assert all(written.count(letter) >= cell.count(letter) for letter in set(cell))


@given(values=st.lists(WORDS, min_size=1, max_size=6), columns=st.integers(40, 200))
def test_facts__fit_and_nothing_is_dropped(values: list[str], columns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        text = facts_text([("label", " ".join(values))])
    assert max(map(len, text.splitlines())) <= columns
    assert without_spaces(text) == without_spaces("label" + "".join(values))


def test_columns__are_not_broken_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert columns_text(["name"], [["x" * 500]]).splitlines()[1] == "x" * 500


def test_columns__become_paragraphs_where_the_terminal_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    head = [f"column {i}" for i in range(5)]
    text = columns_text(head, [["a" * 15] * 5, ["b"] * 5])
    assert text.split("\n\n")[1].splitlines() == [f"column {i}  b" for i in range(5)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours__are_for_terminals_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert (shows_colours(Terminal()), shows_colours(io.StringIO()), shows_colours(None)) == (True, False, False)
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_colours(Terminal())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shows_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_colours(Terminal())


def test_colours__mark_failures_warnings_and_key_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    red, yellow, bold, off = "\x1b[1;31m", "\x1b[1;33m", "\x1b[1m", "\x1b[0m"
    assert coloured_failure("error: x: y [z]\n") == f"{red}error{off}: x: y [z]\n"
    assert coloured_failure("interrupted: x\n") == f"{yellow}interrupted{off}: x\n"
    report = "operator  ties\nbudget    1 GB\nnotice    error  x\nx.budget  1"
    assert coloured_report(report) == (
        f"operator  ties\n{bold}budget{off}    1 GB\n{yellow}notice{off}    error  x\nx.budget  1"
    )
