"""Values are short in Python and tables in notebooks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mergepipe.core.notebooks import Displayed
from mergepipe.errors import OutputError
from mergepipe.planning.plan import Plan
from mergepipe.reports import Explanation, MergeReport, SweepReport


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    read_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Report(Displayed):
    out: Path
    output_bytes: int
    items: tuple[Item, ...]
    names: tuple[str, ...] = ()
    error: float | None = None


REPORT = Report(Path("<out>"), 1_500_000, tuple(Item(f"<i{n}>", 2000) for n in range(30)))


def test_repr__counts_what_is_long_and_leaves_out_what_is_not_there() -> None:
    assert repr(REPORT) == f"Report(out={Path('<out>')!r}, output_bytes=1500000, items=<30>)"
    assert repr(replace(REPORT, items=(), names=("a", "b"))).endswith("output_bytes=1500000, names=('a', 'b'))")


def test_html__is_a_table_with_escaped_texts_and_sizes_in_units() -> None:
    text = REPORT._repr_html_()
    assert "<out>" not in text
    assert all(part in text for part in ("&lt;out&gt;", "1.50 MB", "&lt;i19&gt;", "2.00 kB", "10 more"))
    assert "&lt;i20&gt;" not in text


@pytest.mark.parametrize("kind", [Plan, Explanation, MergeReport, SweepReport])
def test_public_values__are_displayed(kind: type) -> None:
    assert issubclass(kind, Displayed)
    assert kind.__repr__ is Displayed.__repr__


def test_errors__name_keyword_arguments_in_python_and_options_on_the_command_line() -> None:
    error = OutputError.of("output.exists", "out", "already exists", "choose another name, or use --force")
    assert str(error) == "out: already exists; choose another name, or use force=True"
    assert str(error.problems[0]).endswith("--force")
    paired = OutputError.of("x", "--memory", "no size", "add --select norm, or --unknown, not /a/--force/b")
    assert str(paired) == 'memory_bytes: no size; add select="norm", or --unknown, not /a/--force/b'
