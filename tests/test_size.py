"""The density and the size of the house stay below limits that fall with the work.

Nothing is joined, packed or shortened for a figure. A limit is raised by a decision record alone; `goal` is where the
figure is going. Lines are not limited.
"""

from __future__ import annotations

import ast
import heapq
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import house_figures
from support.source_code import syntax_tree

ROOT = Path(__file__).resolve().parent.parent
MOST_PARAMETERS = 6
SLACK = 0.03  # a figure that has fallen by more than this has its limit lowered
_OPTION_TABLE = re.compile(r"\| option \| default \| meaning \|\n\|---\|---\|---\|\n((?:\|.*\n)*)")
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_ERROR_CODE = re.compile(r"^\| `([a-z0-9_.-]+)` \|", re.MULTILINE)


def n_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters that a caller can give."""
    parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return sum(parameter.arg not in ("self", "cls") for parameter in parameters)


def long_signatures() -> int:
    functions = [function for counted in house_figures.counts().values() for function in counted.functions]
    return sum(n_parameters(function) > MOST_PARAMETERS for function in functions)


def inner_imports_of_tests() -> int:
    """Count imports of tests from modules inside a room of the package."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "from mergepipe." in text]
    modules = [node.module or "" for tree in trees for node in statements(tree) if isinstance(node, ast.ImportFrom)]
    return sum(module.startswith("mergepipe.") and module.count(".") >= 2 for module in modules)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, and the clauses that hold some: imports are in nothing else."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


def error_codes() -> int:
    return len(set(_ERROR_CODE.findall((ROOT / "docs/reference/errors.md").read_text(encoding="utf-8"))))


def option_rows() -> int:
    """Count the rows of the tables of options in the reference, which is written from the code."""
    tables = _OPTION_TABLE.findall((ROOT / "docs/reference/cli.md").read_text(encoding="utf-8"))
    return sum(table.count("\n") for table in tables)


def commands_on_the_first_screen() -> int:
    """Count the commands that `cli.app` lists by group."""
    for node in ast.walk(syntax_tree("cli/app.py")):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_COMMANDS":
            return sum(len(names) for names in ast.literal_eval(node.value).values())
    raise AssertionError("cli/app.py lists no commands")


def words_of_the_readme() -> int:
    return len((ROOT / "README.md").read_text(encoding="utf-8").split())


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is counted, the most that it may be, and what it is to become."""

    name: str
    measure: Callable[[], float]
    limit: float
    goal: float


FIGURES = (
    Figure("tokens of src", house_figures.n_tokens, 507_000, 425_000),
    Figure("statements that assign several values at once", house_figures.n_pair_assignments, 640, 150),
    Figure("conditional expressions per 10,000 tokens", house_figures.conditionals_per_10k_tokens, 35.6, 22),
    Figure("comprehensions per 10,000 tokens", house_figures.comprehensions_per_10k_tokens, 57.3, 38),
    Figure("comprehensions with another inside", house_figures.n_nested_comprehensions, 48, 25),
    Figure("section rulers", house_figures.n_rulers, 244, 120),
    Figure("distinct names", house_figures.n_names, 10_220, 9_100),
    Figure("nodes of a function, 99th percentile", house_figures.nodes_of_a_function_p99, 488, 420),
    Figure("modules in import circles", lambda: len(house_figures.modules_in_circles()), 0, 0),
    Figure("percent of the lines that jobs.merge reaches", house_figures.reach_of_merge_percent, 77.2, 60),
    Figure("imports of inner modules in tests", inner_imports_of_tests, 785, 400),
    Figure("error codes", error_codes, 115, 115),
    Figure("options of all commands", option_rows, 175, 149),
    Figure("commands on the first help screen", commands_on_the_first_screen, 14, 14),
    Figure("words of the README", words_of_the_readme, 700, 700),
    Figure("functions with more than 6 parameters", long_signatures, 18, 18),
)


def problem_with(figure: Figure) -> str | None:
    """Return how a figure breaks its limit; None if it keeps it."""
    value = figure.measure()
    if value > figure.limit:
        over = f"{figure.name}: {value:.6g}, more than the limit of {figure.limit:.6g}"
        return f"{over}; write it apart, let something else go, or raise it by a decision record"
    if value < (1 - SLACK) * figure.limit:
        low = f"{figure.name}: {value:.6g} is more than {SLACK:.0%} below the limit of {figure.limit:.6g}"
        return f"{low}; lower the limit in tests/test_size.py"
    return None


def test_size__stays_below_limits_that_follow_it_down() -> None:
    """All figures in one test: the source is parsed once for them."""
    problems = [problem_with(figure) for figure in FIGURES]
    assert [problem for problem in problems if problem is not None] == []


ODD_TOKENS = r"""
def f(x: int = 0x_FF, *y, z=1e-9, **k) -> str: # "no token"
    '''text \''' of a "function"'''
    return rb'\'' + x[..., 1_0.5j:.5] // 2 ** ~ -y @ k != "a#b" f'{x!r:>{z}}' if (w := 0o17 >> 3) else "" \
        "'"
"""


@pytest.mark.parametrize("text", [ODD_TOKENS, inspect.getsource(heapq)], ids=["odd", "heapq"])
def test_tokens__are_those_of_python_with_strings_in_one(text: str) -> None:
    if sys.version_info >= (3, 12):  # the tokenizer looks into f-strings
        text = text.replace(" f'", " b'")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    n_tokens = sum(token.type not in NO_CODE for token in tokens)
    assert house_figures.tokens_of(text, house_figures.Counts()) == n_tokens
