"""Imports only go downwards, heavy packages are imported lazily: read from the syntax trees of the package."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.source_code import PACKAGE, syntax_tree, trees_with

SRC = Path(__file__).resolve().parent.parent / "src"
LAYERS = (
    {"errors"}, {"core"}, {"storage"}, {"kernels", "operators"}, {"checkpoints"}, {"recipes", "catalog", "snapshots"},
    {"reports"}, {"planning", "engine"}, {"options"}, {"runs", "deltastore", "tailor"}, {"jobs"},
    {"cli", "__main__"},
)  # fmt: skip
LAYER_OF = {component: number for number, components in enumerate(LAYERS) for component in components}
FACADE = "__init__"  # lazy names for users; others may take the version from it
ANYTHING_GOES = "testing"
LEAVES = {"deltastore": {"jobs", "cli", ANYTHING_GOES}}
"""Components that register themselves where others need them, and the only ones that may import them."""
REGISTRY_OF_PACKS = "checkpoints/directory.py"
ONE_MODULE_EACH = ("torch", "transformers", "deepspeed", "obstore", "huggingface_hub", "ray", "optuna", "gguf")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module as `source` spells it, and whether it is imported only when a function runs."""

    source: Path
    module: str
    line: int
    is_lazy: bool

    @property
    def component(self) -> str:
        """The importing file's place directly under the package."""
        return component_of(self.source)

    def __str__(self) -> str:
        return f"{self.source.relative_to(SRC)}:{self.line} imports {self.module}"


def component_of(path: Path) -> str:
    return path.relative_to(SRC / "mergepipe").parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted((SRC / "mergepipe").rglob("*.py"))


def imports_of(source: Path, tree: ast.AST, *, is_lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(source, alias.name, node.lineno, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative imports are not read by this test"
            assert node.module is not None
            yield Import(source, node.module, node.lineno, is_lazy)
            yield from (Import(source, f"{node.module}.{alias.name}", node.lineno, is_lazy) for alias in node.names)
        elif not isinstance(node, ast.expr):  # statements stand in statements only
            inner = is_lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from imports_of(source, node, is_lazy=inner)


def called_imports_of(source: Path, tree: ast.AST) -> Iterator[Import]:
    """What `import_module("name")` imports; taken for lazy, as it is nowhere done at import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function, name = node.func, node.args[0].value
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in {"import_module", "__import__"} and isinstance(name, str):
                yield Import(source, name, node.lineno, is_lazy=True)


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(each for place, tree in trees_with() for each in imports_of(PACKAGE / place, tree))


def all_called_imports() -> Iterator[Import]:
    for place, tree in trees_with("import_module", "__import__"):
        yield from called_imports_of(PACKAGE / place, tree)


def imported_component(each: Import) -> str | None:
    """The component of the package that is imported, if it is one: `from mergepipe import session` counts."""
    parts = each.module.split(".")
    if parts[0] != "mergepipe" or len(parts) == 1:
        return None
    return parts[1] if parts[1] in LAYER_OF or parts[1] == ANYTHING_GOES else None


def test_layers__every_module_has_one() -> None:
    known = {*LAYER_OF, FACADE, ANYTHING_GOES}
    assert [str(path) for path in sources() if component_of(path) not in known] == []


def test_layers__imports_only_go_downwards() -> None:
    wrong = [
        str(each)
        for each in all_imports()
        if each.component in LAYER_OF
        and (target := imported_component(each)) is not None
        and (target == ANYTHING_GOES or LAYER_OF[target] > LAYER_OF[each.component])
    ]
    assert wrong == []


def test_layers__components_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for each in all_imports():
        target = imported_component(each)
        if each.component in LAYER_OF and target is not None and target != each.component:
            graph.setdefault(each.component, set()).add(target)
    order = list(TopologicalSorter(graph).static_order())  # raises on a circle, and names it
    assert order.index("errors") < order.index("cli")


@pytest.mark.parametrize("leaf", LEAVES)
def test_layers__leaves_are_imported_by_jobs_and_by_what_calls_them_only(leaf: str) -> None:
    wrong = [
        str(each)
        for each in all_imports()
        if imported_component(each) == leaf and each.component not in {leaf, *LEAVES[leaf]}
    ]
    assert wrong == []


def test_layers__packs_are_named_by_their_registry_alone() -> None:
    """Names of modules in strings count as well, wherever they are imported."""
    naming = {
        place
        for place, tree in trees_with("mergepipe.deltastore")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("mergepipe.deltastore")
    }
    assert naming == {REGISTRY_OF_PACKS}


def test_layers__modules_do_not_import_each_other_in_a_circle() -> None:
    """Whether at import, in a function, or for types; but for facades, which offer the functions of their room."""
    names = {_module_name(path) for path in sources() if path.stem != FACADE}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for each in all_imports():
        if each.module in names and _module_name(each.source) in names:
            graph[_module_name(each.source)].add(each.module)
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(names) > 200  # raises on a circle, and names it


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def test_layers__the_facade_imports_nothing_of_the_package_but_for_type_checking() -> None:
    tree = syntax_tree("__init__.py")
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    allowed = {"__future__", "sys", "types", "typing"}
    assert {node.module for node in at_import if isinstance(node, ast.ImportFrom)} <= allowed
    assert [node for node in at_import if isinstance(node, ast.Import)] == []


@pytest.mark.parametrize("package", ONE_MODULE_EACH)
def test_layers__frameworks_are_imported_lazily_and_in_one_module_at_most(package: str) -> None:
    importing = [each for each in all_imports() if each.module.split(".")[0] == package]
    assert [str(each) for each in importing if not each.is_lazy] == []
    assert len({each.source for each in importing}) <= 1


def test_layers__the_compiler_is_not_imported() -> None:
    """Kernels are compiled when the package is built."""
    assert [str(each) for each in all_imports() if each.module.split(".")[0] in {"numba", "llvmlite"}] == []


def test_layers__third_party_imports_are_declared() -> None:
    project = tomllib.loads((SRC.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {_import_name(each) for each in project["dependencies"]}
    optional = [
        project["optional-dependencies"][name] for name in ("torch", "train", "remote", "ray", "search", "gguf")
    ]
    extras = {_import_name(each) for requirements in optional for each in requirements}
    extras |= {"deepspeed", "IPython"}  # never installed by us: read where a training run or a notebook has them
    foreign = [each for each in (*all_imports(), *all_called_imports()) if _is_foreign(each)]
    assert {each.module.split(".")[0] for each in foreign} >= {"numpy", "torch"}
    assert [str(each) for each in foreign if each.module.split(".")[0] not in core | extras] == []
    assert [str(each) for each in foreign if each.module.split(".")[0] in extras - core and not each.is_lazy] == []


def _import_name(requirement: str) -> str:
    name = re.split("[<>=!~ ;[.]", requirement)[0]
    return {"PyYAML": "yaml"}.get(name, name)


def _is_foreign(each: Import) -> bool:
    """Whether it is another project's, and users meet it: what is in `testing` is for developers."""
    own = {*sys.stdlib_module_names, "mergepipe", "compression"}  # the last one is of Python's own from 3.14 on
    return each.component != ANYTHING_GOES and each.module.split(".")[0] not in own


def test_imports_of__sees_lazy_nested_and_from_imports() -> None:
    text = "import a.b\ndef f():\n    if True:\n        from c import d\nclass X:\n    import e\n"
    found = [(each.module, each.is_lazy) for each in imports_of(Path("x.py"), ast.parse(text))]
    assert found == [("a.b", False), ("c", True), ("c.d", True), ("e", False)]


def test_called_imports_of__sees_names_that_are_strings() -> None:
    text = "def f():\n    g = import_module('h.i')\n    i.import_module(name)\n    i.import_module('j')\n"
    assert [each.module for each in called_imports_of(Path("x.py"), ast.parse(text))] == ["h.i", "j"]


# What changes what is stored; `storage/owned.py` alone knows how nothing is written through a link.
BY_PATH = {"unlink", "rmdir", "rmtree", "truncate", "rename", "mkdir", "makedirs", "write_text", "write_bytes"}
BY_PATH |= {"fsync", "fdatasync", "posix_fallocate", "symlink_to", "hardlink_to", "touch", "O_CREAT", "O_TRUNC"}
OWN_PLACES = {"storage/owned.py"}


def test_only_one_module_changes_what_is_stored() -> None:
    users = {
        f"{place}: {node.attr}"
        for place, tree in trees_with(*BY_PATH)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in BY_PATH
        and not (isinstance(node.value, ast.Name) and node.value.id == "owned")
        and component_of(PACKAGE / place) != ANYTHING_GOES
        and place not in OWN_PLACES
    }
    assert users == set()


VAGUE_NAMES = {"asked", "each", "found", "given"}
"""Names that say nothing of what they hold: `tensor`, `entries`, `requested_bytes` do."""


def test_local_names__say_what_they_hold() -> None:
    vague = {
        f"{place}:{line} {name}"
        for place, tree in trees_with(*VAGUE_NAMES)
        for name, line in bound_names(tree)
        if name in VAGUE_NAMES
    }
    assert vague == set()


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """List the variables and parameters that a syntax tree binds, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield node.name, node.lineno


def test_bound_names__sees_parameters_loops_comprehensions_and_patterns() -> None:
    tree = ast.parse(
        "def f(a, *, b):\n    for c in a:\n        d = [e for e in c if (g := e)]\nmatch h:\n    case [i]:\n        j"
    )
    assert {name for name, _ in bound_names(tree)} == set("abcdegi")
