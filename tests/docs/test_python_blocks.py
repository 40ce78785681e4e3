"""The Python blocks of the README and of the pages run, or, where they are parts of a program, name what there is."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import mergepipe
from support.families import TINY, write_family
from support.model_folders import recipe_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/guide").glob("*.md"))]
RUN = {"README.md", "budget.md", "first-merge.md", "own-operators.md", "packed-experts.md"}
"""The pages of which a block at least can run by itself."""
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A Python block of a page."""

    page: Path
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}-{self.number}"

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def blocks_of(page: Path) -> list[Block]:
    texts = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(page, number, text) for number, text in enumerate(texts, 1)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def imported_names(tree: ast.Module) -> dict[str, object]:
    """Return what a block imports from this package, by the name that it has in the block."""
    names: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name == "mergepipe" for alias in node.names):
            names["mergepipe"] = mergepipe
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mergepipe"):
            module = import_module(node.module or "")
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return names


def resolved(node: ast.expr, names: dict[str, object]) -> object:
    """Return the public object that an expression names: None for what is not of this package."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, names)
        if inspect.ismodule(owner):
            return getattr(owner, node.attr, None) or import_module(f"{owner.__name__}.{node.attr}")
    return None


def unknown_names(tree: ast.Module, known: set[str]) -> set[str]:
    """Return the names that a block reads and that nothing before has made."""
    made = set(known) | set(vars(builtins))
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
    return read - made


def has_gaps(tree: ast.Module) -> bool:
    """Whether a block leaves something out by `...` that a reader has to write."""
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value is ...)
    return any(id(constant) not in statements for constant in constants)


def runs_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that can run, in order: nothing in them is left out or comes from elsewhere."""
    known: set[str] = set()
    for block in blocks_of(page):
        tree = block.tree
        if not has_gaps(tree) and not unknown_names(tree, known):
            known |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            yield block


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block__names_calls_and_keywords_that_there_are(block: Block) -> None:
    tree = block.tree
    names = {**({"mergepipe": mergepipe} if "mergepipe." in block.text else {}), **imported_names(tree)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = resolved(call.func, names)
        if callable(function):
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
            positional = [None] * len(call.args)
            inspect.signature(function).bind_partial(*positional, **keywords)


def test_pages__have_a_block_that_runs() -> None:
    assert {page.name for page in PAGES if list(runs_of(page))} >= RUN


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that pages name, in the working directory: models, recipes and a packed expert."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    family = write_family(tmp_path / "models", TINY, 2)
    for place, name in zip(family.experts, ("math", "code"), strict=True):
        place.rename(place.with_name(name))
    for name, method in (("experts.yml", "ties"), ("recipe.yml", "ties"), ("other.yml", "dare_ties")):
        experts = {f"models/{expert}": {"weight": 0.5, "density": 0.5} for expert in ("math", "code")}
        Path(name).write_text(yaml.safe_dump(recipe_of(method, experts, "models/base")))


@pytest.mark.thorough
@pytest.mark.transformers
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("page", [page for page in PAGES if list(runs_of(page))], ids=lambda page: str(page.name))
def test_page__runs_from_top_to_bottom(page: Path) -> None:
    if "packed/" in page.read_text(encoding="utf-8"):
        mergepipe.pack("models/base", ["models/math"], "packed")
    program = "\n".join(block.text for block in runs_of(page))
    if "@mergepipe.operator" in program:  # it stays registered in its process
        subprocess.run([sys.executable, "-c", program], check=True)
    else:
        exec(compile(program, page.name, "exec"), {"__name__": "page"})
