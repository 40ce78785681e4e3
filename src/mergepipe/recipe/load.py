"""Loads a recipe: mergekit's YAML as it is, every problem told at once, nothing ignored in silence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mergepipe.blocks import DTYPES_BY_RECIPE_NAME, DType
from mergepipe.errors import NotFoundError, Problem, RecipeError, UnsupportedError, did_you_mean
from mergepipe.operators.catalogue import OPERATORS
from mergepipe.operators.spec import BaseRole, OperatorSpec, Scope
from mergepipe.recipe.model import ModelInput, Recipe, Scalar
from mergepipe.recipe.parameters import read_parameters
from mergepipe.recipe.problems import Findings
from mergepipe.recipe.reading import Reading, describe
from mergepipe.recipe.references import read_reference
from mergepipe.recipe.rules import check_base, check_count, check_recipe
from mergepipe.recipe.yaml_source import Value, YamlSource, parse_yaml, read_yaml, shortened

RECIPE_KEYS = ("merge_method", "base_model", "models", "parameters", "dtype", "out_dtype")
MODEL_KEYS = ("model", "parameters")

# What mergekit knows and this version does not: refused by name, so that no recipe means something else here.
UNSUPPORTED_KEYS = ("slices", "modules", "tokenizer_source", "tokenizer", "chat_template", "name")
UNSUPPORTED_METHODS = (
    "nuslerp", "multislerp", "karcher", "della", "della_linear", "breadcrumbs", "breadcrumbs_ties", "sce",
    "ram", "ramplus_tl", "model_stock", "nearswap", "arcee_fusion",
)  # fmt: skip

_KEYS_IN_PLACE_OF_MODELS = ("slices", "modules")


def load_recipe(path: Path) -> Recipe:
    """Read and validate the recipe in `path`. Model paths must exist; no model is opened.

    Raises:
        RecipeError: everything that is wrong with it, one problem each.
        UnsupportedError: nothing is wrong with it but what this version does not do.
        NotFoundError: there is no such recipe, or nothing is wrong but models that do not exist.
        StorageError: it cannot be read.
    """
    return _load(read_yaml(path.absolute()), {})


def reload_recipe(text: str, located: Mapping[str, Path]) -> Recipe:
    """Read a recipe that was stored as text, with the models it names where `located` says they are.

    Raises as `load_recipe` does.
    """
    return _load(parse_yaml(Path.cwd() / "recipe", text), located)


def _load(source: YamlSource, located: Mapping[str, Path]) -> Recipe:
    if not isinstance(source.root, dict):
        message = f"a recipe is a mapping of names to values, found {describe(source.root)}"
        raise RecipeError(Problem("recipe.wrong-kind", source.where(), message))
    reading = Reading(source, Findings(RecipeError, NotFoundError), located)
    recipe = _read(reading, source.root)
    try:
        reading.findings.raise_any()
    except RecipeError as error:
        if all(problem.code == "recipe.unsupported" for problem in error.problems):
            raise UnsupportedError(*error.problems) from None
        raise
    if recipe is None:
        raise AssertionError("no recipe, and nothing found wrong with it")
    return recipe


def _read(reading: Reading, root: dict[str, Value]) -> Recipe | None:
    _check_keys(reading, root)
    operator = _operator(reading, root)
    dtypes = _dtype(reading, root, "dtype"), _dtype(reading, root, "out_dtype")
    base = _base(reading, root)
    models = _models(reading, root, operator)
    shared = _shared_parameters(reading, root, operator)
    if operator is None:
        return None
    check_base(reading, operator, is_given=root.get("base_model") is not None)
    if models is None or (base is None and root.get("base_model") is not None):
        return None
    models = _with_one_path_a_place(reading, base, models)
    if base is not None or operator.base_role is not BaseRole.REQUIRED:
        check_count(reading, operator, base, models)
    recipe = Recipe(reading.source.path, reading.source.text, operator, base, models, shared, *dtypes)
    check_recipe(reading, recipe)
    return recipe


def _check_keys(reading: Reading, root: dict[str, Value]) -> None:
    for key in UNSUPPORTED_KEYS:
        if key in root:
            reading.unsupported((key,), f"'{key}' is")
    known_here = {key: value for key, value in root.items() if key not in UNSUPPORTED_KEYS}
    reading.unknown_keys(known_here, RECIPE_KEYS, ())


def _operator(reading: Reading, root: dict[str, Value]) -> OperatorSpec | None:
    given = root.get("merge_method")
    if given is None:
        message, hint = "the recipe has no merge_method", did_you_mean("", _known())
        reading.refuse("recipe.missing-key", ("merge_method",), message, hint)
        return None
    name = reading.text(given, ("merge_method",))
    if name is None or name in OPERATORS:
        return OPERATORS[name] if name else None
    if name in UNSUPPORTED_METHODS:
        reading.unsupported(("merge_method",), f"the merge method {name} is", did_you_mean("", _known()))
    else:
        message, hint = f"unknown merge method '{shortened(name)}'", did_you_mean(shortened(name), _known())
        reading.refuse("recipe.unknown-operator", ("merge_method",), message, hint)
    return None


def _known() -> list[str]:
    return list(OPERATORS)


def _dtype(reading: Reading, root: dict[str, Value], key: str) -> DType | None:
    if root.get(key) is None:
        return None
    name = reading.text(root[key], (key,))
    if name is None or name in DTYPES_BY_RECIPE_NAME:
        return DTYPES_BY_RECIPE_NAME[name] if name else None
    if name == "auto":
        hint = f"leave {key} out to keep each tensor's dtype as it is in the base, or name one"
        reading.unsupported((key,), f"{key}: auto is", hint)
    else:
        hint = did_you_mean(shortened(name), list(DTYPES_BY_RECIPE_NAME))
        reading.refuse("recipe.unknown-dtype", (key,), f"unknown dtype '{shortened(name)}'", hint)
    return None


def _base(reading: Reading, root: dict[str, Value]) -> ModelInput | None:
    if root.get("base_model") is None:
        return None
    reference = read_reference(reading, root["base_model"], ("base_model",))
    return reference and ModelInput(*reference, {}, reading.source.where("base_model"))


def _shared_parameters(reading: Reading, root: dict[str, Value], operator: OperatorSpec | None) -> dict[str, Scalar]:
    value = root.get("parameters")
    if operator is None:
        reading.mapping(value, ("parameters",))
        return {}
    return read_parameters(reading, value, ("parameters",), operator, Scope.GLOBAL)


def _models(reading: Reading, root: dict[str, Value], operator: OperatorSpec | None) -> tuple[ModelInput, ...] | None:
    """Return the models in order; None if there are none or one of them names no path."""
    value = root.get("models")
    if value is None:
        if not any(key in root for key in _KEYS_IN_PLACE_OF_MODELS):
            reading.refuse("recipe.missing-key", ("models",), "the recipe has no models")
        return None
    if not isinstance(value, list) or not value:
        needed = "a list of models"
        found = "an empty list" if value == [] else describe(value)
        reading.refuse("recipe.wrong-kind", ("models",), f"needs {needed}, found {found}", "write '- model: PATH'")
        return None
    models = [_model(reading, entry, index, operator) for index, entry in enumerate(value)]
    read = tuple(model for model in models if model is not None)
    return read if len(read) == len(models) else None


def _model(reading: Reading, value: Value, index: int, operator: OperatorSpec | None) -> ModelInput | None:
    key_path = ("models", index)
    if not isinstance(value, dict):
        reading.wrong_kind(value, key_path, "a mapping with the key 'model'", "write '- model: PATH'")
        return None
    _check_model_keys(reading, value, index, operator)
    parameters: dict[str, Scalar] = {}
    if operator is not None:
        at = (*key_path, "parameters")
        parameters = read_parameters(reading, value.get("parameters"), at, operator, Scope.MODEL)
    if value.get("model") is None:
        reading.refuse("recipe.missing-key", (*key_path, "model"), "the entry names no model", "write '- model: PATH'")
        return None
    reference = read_reference(reading, value["model"], (*key_path, "model"))
    return reference and ModelInput(*reference, parameters, reading.source.where(*key_path))


def _check_model_keys(reading: Reading, entry: dict[str, Value], index: int, operator: OperatorSpec | None) -> None:
    misplaced = [key for key in entry if key not in MODEL_KEYS and operator and operator.parameter(key)]
    for key in misplaced:
        hint = "write it under 'parameters:' of this model"
        reading.refuse("recipe.unknown-key", ("models", index, key), f"{key} is a parameter", hint)
    others = {key: value for key, value in entry.items() if key not in misplaced}
    reading.unknown_keys(others, MODEL_KEYS, ("models", index))


def _with_one_path_a_place(
    reading: Reading, base: ModelInput | None, models: tuple[ModelInput, ...]
) -> tuple[ModelInput, ...]:
    """Note models listed twice, and give a model that is the base (whatever it is called) the base's path.

    mergekit keeps models in a dict, so of two equal ones it silently forgets one.
    """
    base_place = os.path.realpath(base.path) if base is not None else None
    first_at: dict[str, int] = {}
    result = []
    for index, model in enumerate(models):
        place = os.path.realpath(model.path)
        if place in first_at:
            message = f"'{shortened(model.text)}' is listed already, as models[{first_at[place]}]"
            reading.refuse("recipe.duplicate-model", ("models", index, "model"), message, "list every model once")
        first_at.setdefault(place, index)
        result.append(replace(model, path=base.path) if base is not None and place == base_place else model)
    return tuple(result)
