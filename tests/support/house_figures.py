"""Figures of the source as its readers pay for it: tokens, packed statements, section rulers, names, circles, reach.

A token is a Python token of code, without comments, docstrings, imports and blank lines: it does not see line breaks.
Strings are one token each, f-strings too: Python 3.11 counts them so, later ones count what is inside.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache

from support.source_code import source_texts, trees_with

_RULER = re.compile(r"^# --- ", re.MULTILINE)
_TOKEN = re.compile(
    r"""
    \s+ | \\\n | \#[^\n]*
    | (
        (?:[rbuf]|rb|br|fr|rf)?  # a string, with its prefix
        (?: "{3} (?:[^\\]|\\.)*? "{3} | '{3} (?:[^\\]|\\.)*? '{3} | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' )
        | 0[xob][\da-f_]+
        | (?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*) (?:e[+-]?\d[\d_]*)? j?
        | \w+
        | \*\*= | //= | >>= | <<= | \.\.\. | != | -> | := | \*\* | // | >> | << | [-+*/%@&|^=<>]=
        | \S
    )
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


@dataclass(slots=True)
class Counts:
    """What one pass over syntax trees counts. `sizes` has the number of nodes of each function."""

    pair_assignments: int = 0
    conditionals: int = 0
    comprehensions: int = 0
    nested_comprehensions: int = 0
    names: set[str] = field(default_factory=set)
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    docstrings: list[ast.Expr] = field(default_factory=list)

    def add(self, node: ast.AST) -> tuple[int, int]:
        """Count a node and all below it; return how many nodes these are, and how many of them are comprehensions."""
        n_nodes = 1
        n_comprehensions = 0
        for child in ast.iter_child_nodes(node):
            n_inner_nodes, n_inner_comprehensions = self.add(child)
            n_nodes += n_inner_nodes
            n_comprehensions += n_inner_comprehensions

        match node:
            case ast.Name():
                self.names.add(node.id)
            case ast.Attribute():
                self.names.add(node.attr)
            case ast.keyword(arg=str(name)) | ast.arg(arg=name):
                self.names.add(name)
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                self.pair_assignments += 1
            case ast.IfExp():
                self.conditionals += 1
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self.comprehensions += 1
                self.nested_comprehensions += n_comprehensions > 0
                n_comprehensions += 1
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.names.add(node.name)
                self.functions.append(node)
                self.sizes.append(n_nodes)
            case ast.Import() | ast.ImportFrom():
                self.imports.append(node)
            case ast.Expr(value=ast.Constant(value=str())):
                self.docstrings.append(node)
            case ast.ClassDef(name=str(name)) | ast.alias(name=name) | ast.ExceptHandler(name=str(name)):
                self.names.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                self.names.add(name)
        return n_nodes, n_comprehensions


@cache
def counts() -> dict[str, Counts]:
    """Return what there is to count in each module, by its place in the package."""
    counts_of = {place: Counts() for place in source_texts()}
    for place, tree in trees_with():
        counts_of[place].add(tree)
    return counts_of


@cache
def n_tokens() -> int:
    return sum(tokens_of(text, counts()[place]) for place, text in source_texts().items())


def tokens_of(text: str, counted: Counts) -> int:
    """Count the tokens of a module on lines without a docstring or an import."""
    lines = text.split("\n")
    for node in (*counted.imports, *counted.docstrings):
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[number - 1] = ""
    return sum(token != "" for token in _TOKEN.findall("\n".join(lines)))


def n_pair_assignments() -> int:
    """Count statements that assign several values at once, each to a name of its own."""
    return sum(counted.pair_assignments for counted in counts().values())


def conditionals_per_10k_tokens() -> float:
    return 10_000 * sum(counted.conditionals for counted in counts().values()) / n_tokens()


def comprehensions_per_10k_tokens() -> float:
    return 10_000 * sum(counted.comprehensions for counted in counts().values()) / n_tokens()


def n_nested_comprehensions() -> int:
    return sum(counted.nested_comprehensions for counted in counts().values())


def n_rulers() -> int:
    return sum(len(_RULER.findall(text)) for text in source_texts().values())


def n_names() -> int:
    """Count the distinct names that are defined or used."""
    return len(set().union(*(counted.names for counted in counts().values())))


def nodes_of_a_function_p99() -> int:
    """Return how many nodes of a syntax tree the function has that 99 % of all functions do not exceed."""
    sizes = sorted(size for counted in counts().values() for size in counted.sizes)
    return sizes[int(len(sizes) * 0.99)]


@cache
def _imports() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, wherever in it. The facade counts for none."""
    module_at = {place: _module_name(place) for place in source_texts()}
    modules = set(module_at.values()) - {"mergepipe"}
    return {
        module_at[place]: (_imported(counted) & modules) - {module_at[place]} for place, counted in counts().items()
    }


def _module_name(place: str) -> str:
    return ".".join(("mergepipe", *place.removesuffix(".py").split("/"))).removesuffix(".__init__")


def _imported(counted: Counts) -> set[str]:
    imported: set[str] = set()
    for node in counted.imports:
        names = {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            imported |= names
        elif node.module:
            imported |= {node.module, *(f"{node.module}.{name}" for name in names)}
    return imported


@cache
def _reached_from(start: str) -> frozenset[str]:
    reached: set[str] = set()
    front = {start}
    while front:
        reached |= front
        front = set().union(*(_imports()[module] for module in front)) - reached
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
