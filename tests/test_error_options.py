"""Errors name options on the command line and keyword arguments in Python, and both exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mergepipe import api, options
from mergepipe.cli.app import build_command
from mergepipe.core.flags import Options
from mergepipe.errors import KEYWORD_OF_OPTION, RecipeError, with_keywords
from mergepipe.tailor import api as tailor_api
from support.source_code import trees_with

OF_OTHER_PROGRAMS = {"--revision", "--local-dir", "--model", "--tasks"}
OPTION = re.compile(r"(?<![\w/.-])--[a-z]+(?:-[a-z]+)*(?![\w-])")


def _texts() -> Iterator[str]:
    """Yield the texts of the modules below the command line: docstrings and commands in backticks left out."""
    for place, tree in trees_with("--"):
        if place.startswith("cli/") or place.endswith("errors.py"):
            continue
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def _named_options() -> set[str]:
    texts = [re.sub(r"`(?:mergepipe|hf) [^`]*`?", "", text) for text in _texts()]
    return {option for text in texts for option in OPTION.findall(text)} - OF_OTHER_PROGRAMS


def test_errors__name_options_that_have_a_keyword_argument() -> None:
    named = _named_options()
    assert {"--budget", "--resume", "--rank"} <= named
    assert named - set(KEYWORD_OF_OPTION) == set()


def test_errors__name_options_that_a_command_has() -> None:
    commands: list[Any] = [build_command()]
    declared: set[str] = set()
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        declared |= {text for each in command.params for text in (*each.opts, *each.secondary_opts)}
    assert set(KEYWORD_OF_OPTION) - declared == set()


def test_errors__keyword_arguments_are_parameters_or_options() -> None:
    calls = [each for module in (api, tailor_api) for _, each in inspect.getmembers(module, inspect.isfunction)]
    kinds: list[Any] = [each for _, each in inspect.getmembers(options, inspect.isclass) if issubclass(each, Options)]
    names = {name for each in (*calls, *kinds) for name in inspect.signature(each).parameters}
    assert {keyword.partition("=")[0] for keyword in KEYWORD_OF_OPTION.values()} - names == set()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("give --rank 32 or --energy 0.9", "give rank 32 or energy 0.9"),
        ("run without --resume to start over", "run without resume=True to start over"),
        ("make it with `mergepipe analyze --export`", "make it with `mergepipe analyze --export`"),
        ("a path /a/--force/b", "a path /a/--force/b"),
    ],
)
def test_with_keywords__replaces_options_but_for_commands_and_paths(text: str, wanted: str) -> None:
    assert with_keywords(text) == wanted
    assert str(RecipeError.of("option.conflict", "", "is wrong", text)) == f"is wrong; {wanted}"
