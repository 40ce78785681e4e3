"""Figures of the source as its readers pay for it: tokens, packed statements, section rulers, names, circles, reach.

A token is a Python token of code, without comments, docstrings, imports and blank lines: it does not see line breaks.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache

from support.source_code import source_texts, syntax_tree, trees_with

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_RULER = re.compile(r"^# --- ", re.MULTILINE)
_NAMING_FIELDS = ("name", "id", "attr", "arg")


@cache
def nodes() -> tuple[ast.AST, ...]:
    """Return the nodes of all syntax trees."""
    return tuple(node for _, tree in trees_with() for node in ast.walk(tree))


@cache
def n_tokens() -> int:
    return sum(_tokens_of(text, syntax_tree(place)) for place, text in source_texts().items())


def _tokens_of(text: str, tree: ast.Module) -> int:
    omitted: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and _is_text(node.value)):
            omitted |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _NO_CODE and token.start[0] not in omitted for token in tokens)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def n_pair_assignments() -> int:
    """Count statements that assign several values at once, each to a name of its own."""
    return sum(
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        for node in nodes()
    )


def conditionals_per_10k_tokens() -> float:
    return 10_000 * sum(isinstance(node, ast.IfExp) for node in nodes()) / n_tokens()


def comprehensions_per_10k_tokens() -> float:
    return 10_000 * sum(isinstance(node, COMPREHENSIONS) for node in nodes()) / n_tokens()


def n_nested_comprehensions() -> int:
    outer = (node for node in nodes() if isinstance(node, COMPREHENSIONS))
    return sum(
        any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node) for node in outer
    )


def n_rulers() -> int:
    return sum(len(_RULER.findall(text)) for text in source_texts().values())


def n_names() -> int:
    """Count the distinct names that are defined or used."""
    fields = (getattr(node, field, None) for node in nodes() for field in _NAMING_FIELDS)
    return len({name for name in fields if isinstance(name, str)})


def nodes_of_a_function_p99() -> int:
    """Return how many nodes of a syntax tree the function has that 99 % of all functions do not exceed."""
    functions = (node for node in nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    sizes = sorted(sum(1 for _ in ast.walk(function)) for function in functions)
    return sizes[int(len(sizes) * 0.99)]


@cache
def _imports() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, wherever in it. The facade counts for none."""
    module_at = {place: _module_name(place) for place in source_texts()}
    modules = set(module_at.values()) - {"mergepipe"}
    return {module_at[place]: (set(_imported(tree)) & modules) - {module_at[place]} for place, tree in trees_with()}


def _module_name(place: str) -> str:
    return ".".join(("mergepipe", *place.removesuffix(".py").split("/"))).removesuffix(".__init__")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def _reached_from(start: str) -> frozenset[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += _imports()[module]
    return frozenset(reached)


def modules_in_circles() -> list[str]:
    """Return the modules that reach themselves by imports, lazy ones included."""
    plain = [_module_name(place) for place in source_texts() if not place.endswith("__init__.py")]
    return [module for module in plain if any(module in _reached_from(used) for used in _imports()[module])]


def reach_of_merge_percent() -> float:
    """Return the share of the source's lines in modules that `jobs.merge` reaches by imports, lazy ones included."""
    lines = {_module_name(place): text.count("\n") for place, text in source_texts().items()}
    reached = _reached_from("mergepipe.jobs.merge")
    return 100 * sum(lines[module] for module in reached) / sum(lines.values())
