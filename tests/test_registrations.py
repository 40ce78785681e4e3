"""Adding an operator, a training format or a store touches its own module and one registration, nothing else in src."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

import mergepipe
from mergepipe.errors import RecipeError
from mergepipe.operators.base import ReductionRequest
from mergepipe.operators.registry import operator_specs
from mergepipe.storage.location import Location
from mergepipe.tailor.formats import TRAINING_FORMATS
from mergepipe.tailor.formats.contract import TrainingFormat
from support.families import FamilyShape, write_family
from support.source_code import trees_with
from support.stores import InMemoryStore, memory_scheme

SHAPE = FamilyShape(hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocab=257, tied=True)
RECIPE = "merge_method: linear\nmodels:\n  - {{model: {root}/base, parameters: {{weight: 1.0}}}}\n"


@cache
def places_of_text(text: str) -> set[str]:
    """The modules that hold a string as a whole literal."""
    return {
        place
        for place, tree in trees_with(text)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value == text
    }


@cache
def imports_from(package: str) -> list[tuple[str, ast.ImportFrom]]:
    """Every `from ... import ...` in modules that name `package`, with the module that holds it."""
    return [
        (place, node)
        for place, tree in trees_with(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    ]


def importers_of(package: str, module: str) -> set[str]:
    """The modules that import `module` from `package`, or a name from it."""
    importers = set()
    for place, node in imports_from(package):
        is_module = node.module == package and module in {alias.name for alias in node.names}
        if is_module or node.module == f"{package}.{module}":
            importers.add(place)
    return importers


@pytest.mark.parametrize("name", sorted(operator_specs()))
def test_operator__is_named_in_its_family_alone(name: str) -> None:
    places = {
        place for place in places_of_text(name) if not place.startswith(("tailor/", "runs/adapters.py"))
    }  # recipes
    assert len(places) == 1
    assert places.pop().startswith("operators/")


def test_operator_families__are_imported_by_the_registry_alone() -> None:
    families = {place for name in operator_specs() for place in places_of_text(name) if place.startswith("operators")}
    for family in families:
        importers = importers_of("mergepipe.operators", Path(family).stem)
        assert importers - families == {"operators/registry.py"}, family


ON_RECORD = {"MagnitudeCut", "InnerProducts"}
"""The tensor-wide quantities that statistics hold, so that plans and merges of analysed experts name them too."""


@pytest.mark.parametrize("request_kind", get_args(ReductionRequest), ids=lambda kind: kind.__name__)
def test_tensor_wide_quantity__is_known_to_operators_and_to_what_reduces_it(request_kind: type) -> None:
    name = request_kind.__name__
    users = {place for place, tree in trees_with(name) if any(is_name(node, name) for node in ast.walk(tree))}
    others = {place for place in users if not place.startswith("operators/")}
    assert others == {"engine/block_reductions.py"} or (name in ON_RECORD and "engine/block_reductions.py" in others)


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@pytest.mark.parametrize("name", [training_format.name for training_format in TRAINING_FORMATS])
def test_training_format__is_named_in_its_module_alone(name: str) -> None:
    assert len(places_of_text(name)) == 1


@pytest.mark.parametrize("training_format", TRAINING_FORMATS, ids=lambda training_format: training_format.name)
def test_training_format__is_registered_by_one_line(training_format: TrainingFormat) -> None:
    (home,) = places_of_text(training_format.name)
    module = import_module(f"mergepipe.{home.removesuffix('.py').replace('/', '.')}")
    (name,) = (name for name, value in vars(module).items() if value is training_format)
    users = {
        place
        for place, node in imports_from("mergepipe.tailor.formats")
        if node.module == module.__name__ and name in {alias.name for alias in node.names}
    }
    assert users == {"tailor/formats/__init__.py"}


def test_store__of_a_new_scheme_is_read_after_one_registration(tmp_path: Path) -> None:
    write_family(tmp_path, SHAPE, experts=0)
    root = Location.parse("memory://bucket")
    objects = {root / f"base/{path.name}": path.read_bytes() for path in (tmp_path / "base").iterdir()}
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(RECIPE.format(root=root))
    with pytest.raises(RecipeError, match="no store is known for 'memory://'"):
        mergepipe.check(recipe)
    with memory_scheme(InMemoryStore(objects)):
        assert mergepipe.check(recipe).models[0].tensors > 0
