"""The size of the house stays below limits that only fall: growth is a decision, and the price of it is paid elsewhere.

A limit is raised by a decision record alone. `goal` is where the figure is going.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from support.entered_files import met_by
from support.source_code import PACKAGE, source_texts, syntax_tree, trees_with

ROOT = Path(__file__).resolve().parent.parent
MOST_PARAMETERS = 6
SLACK = 0.03  # a figure that has fallen by more than this has its limit lowered
_OPTION_TABLE = re.compile(r"\| option \| default \| meaning \|\n\|---\|---\|---\|\n((?:\|.*\n)*)")
_ERROR_CODE = re.compile(r"^\| `([a-z0-9_.-]+)` \|", re.MULTILINE)


@cache
def nodes() -> tuple[ast.AST, ...]:
    return tuple(node for _, tree in trees_with() for node in ast.walk(tree))


def classes() -> list[ast.ClassDef]:
    return [node for node in nodes() if isinstance(node, ast.ClassDef)]


def is_dataclass(node: ast.ClassDef) -> bool:
    decorators = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return any(isinstance(each, ast.Name) and each.id == "dataclass" for each in decorators)


def n_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that a caller can give."""
    given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return sum(each.arg not in ("self", "cls") for each in given)


def long_signatures() -> int:
    functions = (node for node in nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(n_parameters(function) > MOST_PARAMETERS for function in functions)


def modules_with_one_importer() -> int:
    modules = {f"mergepipe.{place.removesuffix('.py').replace('/', '.')}" for place in source_texts()}
    importers: dict[str, set[str]] = {}
    for place, tree in trees_with():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names)):
                    importers.setdefault(name, set()).add(place)
            elif isinstance(node, ast.Import):
                for each in node.names:
                    importers.setdefault(each.name, set()).add(place)
    return sum(len(importers.get(module, ())) == 1 for module in modules)


def lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def folders() -> int:
    return len({path.parent for path in PACKAGE.rglob("*.py")})


def error_codes() -> int:
    return len(set(_ERROR_CODE.findall((ROOT / "docs/reference/errors.md").read_text(encoding="utf-8"))))


def option_rows() -> int:
    """The rows of the tables of options in the reference, which is written from the code."""
    tables = _OPTION_TABLE.findall((ROOT / "docs/reference/cli.md").read_text(encoding="utf-8"))
    return sum(table.count("\n") for table in tables)


def commands_on_the_first_screen() -> int:
    """The commands that `cli.app` lists by group."""
    for node in ast.walk(syntax_tree("cli/app.py")):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_COMMANDS":
            return sum(len(names) for names in ast.literal_eval(node.value).values())
    raise AssertionError("cli/app.py lists no commands")


def words(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def guide_pages() -> list[Path]:
    return [path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.relative_to(ROOT / "docs").parts]


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is counted, the most that it may be, and what it is to become."""

    name: str
    measure: Callable[[], int]
    limit: int
    goal: int


FIGURES = (
    Figure("lines of src", lambda: lines(PACKAGE), 60_550, 50_000),
    Figure("files of src", lambda: len(source_texts()), 199, 180),
    Figure("folders of src", folders, 20, 20),
    Figure("classes", lambda: len(classes()), 615, 450),
    Figure("dataclasses", lambda: sum(map(is_dataclass, classes())), 396, 300),
    Figure("modules with one importer", modules_with_one_importer, 29, 30),
    Figure("modules of jobs.merge", lambda: met_by()["modules of jobs.merge"], 96, 130),
    Figure("source files that a merge enters", lambda: met_by()["merge"], 75, 80),
    Figure("source files that a compose enters", lambda: met_by()["compose"], 51, 60),
    Figure("error codes", error_codes, 115, 180),
    Figure("functions with more than 6 parameters", long_signatures, 18, 50),
    Figure("options of all commands", option_rows, 149, 150),
    Figure("commands on the first help screen", commands_on_the_first_screen, 14, 14),
    Figure("lines of tests", lambda: lines(ROOT / "tests"), 52_840, 42_000),
    Figure("lines of benchmarks", lambda: lines(ROOT / "benchmarks"), 7_670, 8_000),
    Figure("words of docs without the reference", lambda: words(*guide_pages()), 39_900, 40_000),
    Figure("words of the README", lambda: words(ROOT / "README.md"), 700, 700),
)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name.replace(" ", "-"))
def test_size__stays_below_a_limit_that_follows_it_down(figure: Figure) -> None:
    value = figure.measure()
    over = f"{figure.name}: {value}, {value - figure.limit} more than the limit of {figure.limit}"
    assert value <= figure.limit, f"{over}; let something else go, or raise it by a decision record"
    low = f"{figure.name}: {value} is more than {SLACK:.0%} below the limit of {figure.limit}"
    assert value >= (1 - SLACK) * figure.limit, f"{low}; lower the limit to {value} in tests/test_size.py"
