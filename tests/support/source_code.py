"""The package's own source, for tests that look at all of it: each module that matters to any is parsed once."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import mergepipe

PACKAGE = Path(mergepipe.__file__).parent


@cache
def source_texts() -> dict[str, str]:
    """Return the text of every module, by its place in the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def syntax_tree(place: str) -> ast.Module:
    """Return the syntax tree of a module, which callers leave as it is."""
    return ast.parse(source_texts()[place])


def trees_with(*texts: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the place and the syntax tree of every module whose text holds one of `texts`; of all without any."""
    for place, code in source_texts().items():
        if not texts or any(text in code for text in texts):
            yield place, syntax_tree(place)


def import_file(path: Path) -> ModuleType:
    """Import a source file as a new module, whatever was imported of it before."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
