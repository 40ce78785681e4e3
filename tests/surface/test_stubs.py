"""Type checkers and editors see the public calls as they are: with every keyword, its type and its default."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from tools.stubs import PACKAGE, stubs

import mergepipe
from mergepipe import tailor

STUBS = {"__init__.pyi": mergepipe, "tailor/__init__.pyi": tailor}


@pytest.mark.parametrize("place", STUBS)
def test_stubs__are_as_the_tool_writes_them(place: str) -> None:
    written = (PACKAGE / place).read_text(encoding="utf-8")
    assert written == stubs()[place], "run `make reference`"


@pytest.mark.parametrize("place", STUBS)
def test_stubs__have_the_public_names_and_no_other(place: str) -> None:
    tree = ast.parse((PACKAGE / place).read_text(encoding="utf-8"))
    imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = {alias.asname for alias in imports if alias.asname is not None}
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert names == {*dir(STUBS[place]), "__all__"}


def test_stubs__are_in_the_wheel() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"*.pyi", "tailor/*.pyi"' in project


def test_stubs__declare_calls_as_python_shows_them() -> None:
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            shown = inspect.signature(getattr(mergepipe, node.name)).parameters
            assert [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)] == list(shown)
