"""Tests go through the public surface or the contract of their room: those that import more are counted, and get fewer.

A test may import `mergepipe`, what that package offers by name (`mergepipe.errors`, `mergepipe.options`,
`mergepipe.tailor`, `mergepipe.cli`), `mergepipe.testing`, and the one module that is the contract of its room.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PUBLIC = {
    "mergepipe", "mergepipe.cli", "mergepipe.errors", "mergepipe.options", "mergepipe.reports",
    "mergepipe.tailor", "mergepipe.tailor.api", "mergepipe.testing",
}  # fmt: skip
CONTRACTS = {
    "catalog": "mergepipe.catalog.catalog", "checkpoints": "mergepipe.checkpoints.contract",
    "deltastore": "mergepipe.deltastore.index", "engine": "mergepipe.engine.work",
    "operators": "mergepipe.operators.base", "planning": "mergepipe.planning.plan",
    "recipes": "mergepipe.recipes.tasks", "snapshots": "mergepipe.snapshots.manifest",
    "storage": "mergepipe.storage.contract", "tailor": "mergepipe.tailor.formats",
}  # fmt: skip
"""The contract of a room, by the folder of its tests."""
LIMITS = {"test files with inner imports": 165, "inner imports": 765}
"""The most that there may be: lowered whenever they fall, never raised without a decision record."""
SLACK = 0.1  # a figure that has fallen by more than this has its limit lowered


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """The modules of the package that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mergepipe":
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] == "mergepipe")


def inner_imports() -> dict[str, set[str]]:
    """Modules behind the surface that test files import, by test file."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        place = path.relative_to(TESTS)
        if not path.name.startswith("test_"):
            continue
        allowed = PUBLIC | {CONTRACTS.get(place.parts[0], "")}
        modules = set(imported_modules(ast.parse(path.read_text(encoding="utf-8"))))
        inner = {each for each in modules - allowed if not each.startswith("mergepipe.testing.")}
        if inner:
            found[place.as_posix()] = inner
    return found


def test_imports__behind_the_surface_stay_below_limits_that_follow_them_down() -> None:
    inner = inner_imports()
    figures = {"test files with inner imports": len(inner), "inner imports": sum(map(len, inner.values()))}
    over = {name: figure for name, figure in figures.items() if figure > LIMITS[name]}
    assert not over, f"{over}: more than {LIMITS}; test through the surface, or the contract of the room"
    low = {name: figure for name, figure in figures.items() if figure < (1 - SLACK) * LIMITS[name]}
    assert not low, f"{low}: lower LIMITS to it"
