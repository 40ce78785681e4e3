"""Every dotted name in backticks in a docstring of src is one of src, of an error code, of a file or of a library."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from support.places import DOCS
from support.source_code import source_texts

_DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
_FILES = ("bin", "blocks", "json", "md", "pt", "safetensors", "stats", "yml")
_TENSORS = ("lm_head", "model", "output")  # names in checkpoints begin with these
_LIBRARIES = ("dataclasses", "torch")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    """The names that a module or a class binds, those of its methods' `self` too."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Assign(targets=targets):
                yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


@cache
def known_names() -> frozenset[str]:
    """The dotted ends of every module, and of what modules and classes hold: `work.Task.name` and `Task.name`."""
    known: set[str] = set()
    for place, code in source_texts().items():
        path = ("mergepipe", *place.removesuffix(".py").removesuffix("/__init__").split("/"))
        tree = ast.parse(code)
        owners = [(path, tree.body)]
        owners += [((*path, node.name), node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner, body in owners:
            for whole in (owner, *((*owner, name) for name in names_of(body))):
                known |= {".".join(whole[start:]) for start in range(len(whole) - 1)}
    return frozenset(known)


@cache
def error_codes() -> frozenset[str]:
    return frozenset(re.findall(r"^\| `([a-z0-9_.-]+)` \|", (DOCS / "reference/errors.md").read_text(), re.MULTILINE))


def is_known(name: str, tree: _Documented) -> bool:
    first, last = name.split(".", 1)[0], name.rsplit(".", 1)[1]
    if name in known_names() or name in error_codes() or last in _FILES or first in _TENSORS:
        return True
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    fields = set(names_of(tree.body)) if isinstance(tree, ast.ClassDef) else set()
    return first in {*arguments, *fields, *_LIBRARIES}


def dotted_names() -> Iterator[tuple[str, str, _Documented]]:
    for place, code in source_texts().items():
        for node in ast.walk(ast.parse(code)) if _DOTTED.search(code) else ():
            if isinstance(node, _Documented):
                for name in _DOTTED.findall(ast.get_docstring(node) or ""):
                    yield place, name, node


def test_docstrings__name_what_exists() -> None:
    unknown = sorted({f"{place}: {name}" for place, name, tree in dotted_names() if not is_known(name, tree)})
    assert unknown == []


@pytest.mark.parametrize("name", ["gaps.Gaps", "storage.local.no_such", "Plan.no_such", "mergepipe.no_such"])
def test_docstrings__that_name_what_is_gone_are_found(name: str) -> None:
    assert not is_known(name, ast.parse("def plan(options): ..."))
