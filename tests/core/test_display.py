"""A report is shown by the marks of its fields: facts and tables, in a terminal's text, in Python and in notebooks."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergepipe import Plan
from mergepipe.catalog.snapshots import CatalogStats, RebuildReport
from mergepipe.core.display import (
    Displayed,
    Table,
    json_line,
    markdown_code,
    markdown_text,
    names_by_reason,
    printable,
    printable_lines,
    sections,
    shorten_names,
    shown,
    text_of,
    told,
    yaml_document,
)
from mergepipe.core.display import yaml_scalar as scalar
from mergepipe.errors import OutputError
from mergepipe.reports import Explanation, MergeReport, SweepReport
from support.source_code import trees_with


@dataclass(frozen=True, slots=True, kw_only=True)
class Item(Displayed):
    name: str = shown("name")
    kept_bytes: int = shown("size", optional=True)
    error: float | None = shown("error", default=None)


@dataclass(frozen=True, slots=True)
class Part:
    role: str
    share: float


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Report(Displayed):
    out: Path = shown("output")
    parts: tuple[Part, ...] = shown("{role}", "{share} of it", default=())
    files: tuple[str, ...] = shown("files", "{files:file}, {output_bytes}", once=True, default=())
    output_bytes: int
    lost_bytes: int = shown("lost", optional=True, default=0)
    items: tuple[Item, ...] = shown()
    error: float | None = shown("error", default=None)

    @property
    @told("speed")
    def bytes_per_second(self) -> float:
        return self.output_bytes / 2


ITEMS = tuple(Item(name=f"<i{n}>", kept_bytes=2000 * n) for n in range(30))
REPORT = Report(out=Path("<out>"), output_bytes=1_500_000, items=ITEMS)


def test_sections__are_facts_in_order_and_tables_without_empty_columns() -> None:
    facts, table, rest = sections(replace(REPORT, parts=(Part("base", 0.125), Part("expert", 1.0)), files=("a", "b")))
    assert facts == [
        ("output", "<out>"), ("base", "12.5 % of it"), ("expert", "100 % of it"), ("files", "2 files, 1.50 MB"),
    ]  # fmt: skip
    assert isinstance(table, Table)
    assert table.head == ("name", "size")
    assert table.rows[:2] == (("<i0>", "-"), ("<i1>", "2.00 kB"))
    assert rest == [("speed", "750 kB/s")]


def test_sections__leave_out_what_is_not_there() -> None:
    assert sections(replace(REPORT, items=())) == [[("output", "<out>"), ("speed", "750 kB/s")]]
    more = replace(REPORT, items=(), lost_bytes=3, error=0.5)
    assert sections(more) == [[("output", "<out>"), ("lost", "3 B"), ("error", "0.5"), ("speed", "750 kB/s")]]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("read_bytes", 1000, "1.00 kB"), ("seconds", 61.0, "1 min 01 s"), ("share", 0.5, "50 %"),
        ("loss", 2.34567891, "2.34568"),
        ("norm", 2.34567891, "2.35"), ("files", 3, "3"), ("is_new", True, "yes"), ("losses", (0.5, 1.0), "0.5, 1"),
        ("x", None, "-"),
    ],
)  # fmt: skip
def test_text_of__follows_the_end_of_the_name(name: str, value: object, text: str) -> None:
    assert text_of(name, value) == text


def test_names__are_grouped_by_layer_and_by_reason_and_a_few_are_listed() -> None:
    names = [f"model.layers.{i}.self_attn.inv_freq" for i in range(28)] + ["lm_head.weight"]
    assert shorten_names(names) == "model.layers.*.self_attn.inv_freq (28), lm_head.weight"
    assert shorten_names([f"tensor_{c}" for c in "abcdefg"]) == "tensor_a, tensor_b, tensor_c, tensor_d, and 3 more"
    assert shorten_names(["x" * 1000]) == "x" * 57 + "..."
    assert names_by_reason([("why", "a.1"), ("else", "b"), ("why", "a.2")]) == ["why: a.* (2)", "else: b"]


def test_repr__counts_what_is_long_and_leaves_out_what_is_not_there() -> None:
    assert repr(REPORT) == f"Report(out={Path('<out>')!r}, output_bytes=1500000, lost_bytes=0, items=<30>)"
    assert "files=('a', 'b')" in repr(replace(REPORT, files=("a", "b")))


def test_html__is_tables_with_escaped_texts_and_sizes_in_units() -> None:
    text = REPORT._repr_html_()
    assert "<out>" not in text
    assert all(part in text for part in ("&lt;out&gt;", "750 kB/s", "&lt;i19&gt;", "2.00 kB", "10 more"))
    assert "&lt;i20&gt;" not in text


@pytest.mark.parametrize("kind", [Plan, Explanation, MergeReport, SweepReport, CatalogStats, RebuildReport])
def test_public_values__are_displayed(kind: type[Displayed]) -> None:
    assert issubclass(kind, Displayed)
    assert kind.__repr__ is Displayed.__repr__
    assert kind.SHOWN


def test_errors__name_keyword_arguments_in_python_and_options_on_the_command_line() -> None:
    error = OutputError.of("output.exists", "out", "already exists", "choose another name, or use --force")
    assert str(error) == "out: already exists; choose another name, or use force=True"
    assert str(error.problems[0]).endswith("--force")
    paired = OutputError.of("x", "--memory", "no size", "add --select norm, or --unknown, not /a/--force/b")
    assert str(paired) == 'memory: no size; add select="norm", or --unknown, not /a/--force/b'


# --- text of inputs in each medium, and JSON as JSON has it


HOSTILE = 'a\u202eb\u2028c\x1b[31md\ne\x85f`g|h<i>&"j\\k\x00l\u2066m\x9bn\r\to*p[bold]q#r\U000e0001s'
PASSED_ON = {"checkpoints/added_tokens.py", "checkpoints/config_files.py", "core/strict_json.py"}  # documents of others

any_text = st.text(st.characters(exclude_categories=[]), max_size=40)  # surrogates too


def is_one_line(text: str) -> bool:
    return not any(unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for c in text)


@given(any_text)
def test_printable__is_one_line_without_commands(text: str) -> None:
    assert is_one_line(printable(text))
    assert is_one_line(markdown_code(text))
    assert is_one_line(markdown_text(text))
    assert is_one_line(scalar(text))
    assert printable_lines(text).count("\n") == text.count("\n")
    assert is_one_line(printable_lines(text).replace("\n", ""))


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=40))
def test_printable__leaves_what_can_be_shown(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


@given(any_text)
def test_yaml_scalar__reads_back(text: str) -> None:
    assert yaml.safe_load(f"- {scalar(text)}\n") == [text]


@given(st.text(max_size=40))
def test_yaml_document__reads_back_and_can_be_shown(text: str) -> None:
    document = yaml_document({"key": [text]}, width=80)
    assert yaml.safe_load(document) == {"key": [text]}
    assert printable_lines(document) == document


@given(st.text("`|a \\", max_size=12))
def test_markdown_code__ends_where_it_should(text: str) -> None:
    code = markdown_code(text)
    fence = re.match("`+", code)
    assert fence is not None
    inner = code[len(fence[0]) : -len(fence[0])]
    assert fence[0] not in re.findall("`+", inner)
    assert not re.search(r"(?<!\\)\|", code)
    assert inner.replace("\\|", "|").strip() == text.strip()


def test_markdown_text__has_no_formatting() -> None:
    assert markdown_text("task_arithmetic") == "task_arithmetic"
    assert markdown_text("a*b<script>[x](y)|`") == "a\\*b\\<script\\>\\[x\\](y)\\|\\`"


def refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def test_json_line__is_strict_json() -> None:
    value = {"a": float("nan"), "b": [float("inf"), {"c": -float("inf")}], "path": Path("x"), "text": HOSTILE, "d": 1.5}
    line = json_line(value)
    assert line.isascii()
    assert is_one_line(line)
    parsed = json.loads(line, parse_constant=refuse)
    assert parsed == {"a": None, "b": [None, {"c": None}], "path": "x", "text": HOSTILE, "d": 1.5}
    with pytest.raises(TypeError):
        json_line(object())


def test_sources__write_no_json_with_nan() -> None:
    lax, n_calls = [], 0
    for name, tree in trees_with("json"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"json.dumps", "json.dump"}:
                n_calls += 1
                strict = any(each.arg == "allow_nan" and ast.unparse(each.value) == "False" for each in node.keywords)
                if not strict and name not in PASSED_ON and not name.startswith("testing/"):
                    lax.append(f"{name}:{node.lineno}")
    assert n_calls > 10
    assert lax == []
