"""Text of inputs in each medium, and JSON as JSON has it."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.core.display import json_line, markdown_code, markdown_text, printable, printable_lines, yaml_document
from mergepipe.core.display import yaml_scalar as scalar
from support.source_code import trees_with

HOSTILE = 'a\u202eb\u2028c\x1b[31md\ne\x85f`g|h<i>&"j\\k\x00l\u2066m\x9bn\r\to*p[bold]q#r\U000e0001s'
PASSED_ON = {"checkpoints/directory.py", "checkpoints/vocabulary.py", "core/strict_json.py"}  # documents of others

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
