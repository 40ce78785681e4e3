"""Loads recipes: mergekit's YAML as it is, every problem told at once, nothing ignored in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from mergepipe.core.blocks import DTYPES_BY_RECIPE_NAME, DType
from mergepipe.errors import NotFoundError, Problem, RecipeError, UnsupportedError, did_you_mean
from mergepipe.operators.custom import load_entry_points
from mergepipe.operators.registry import has_operator, operator_named, operator_specs
from mergepipe.operators.spec import OperatorSpec, Scope
from mergepipe.recipes.parse.documents import document_names, in_order
from mergepipe.recipes.parse.entries import CONTENT_KEYS, Surroundings, read_models, read_modules, read_slices
from mergepipe.recipes.parse.fields import Reading, describe
from mergepipe.recipes.parse.parameter_values import Setting
from mergepipe.recipes.parse.problems import Findings
from mergepipe.recipes.parse.recipe import ModelInput, OutputModule, OutputSlice, Recipe
from mergepipe.recipes.parse.references import read_model
from mergepipe.recipes.parse.tokenizer_source import read_tokenizer
from mergepipe.recipes.parse.yaml_source import Value, YamlSource, parse_documents, read_documents, shortened
from mergepipe.recipes.resolve.model_requirements import check_base

RECIPE_KEYS = (
    "merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype", "out_dtype",
    "tokenizer_source", "tokenizer", "chat_template", "name",
)  # fmt: skip
AUTO = "auto"
_MIXTURE_KEYS = ("gate_mode", "experts")
DTYPE_NAMES = (*DTYPES_BY_RECIPE_NAME, AUTO)


def load_recipes(path: Path) -> tuple[Recipe, ...]:
    """Read and validate the recipes in `path`, one a document, each after those it merges; the last is the output's.

    Model paths must exist; no model is opened.

    Raises:
        RecipeError: everything that is wrong with them, one problem each.
        UnsupportedError: nothing is wrong with them but what this version does not do.
        NotFoundError: there is no such file, or nothing is wrong but models that do not exist.
        StorageError: it cannot be read.
    """
    return _load(read_documents(path.absolute()), {})


def reload_recipes(text: str, located: Mapping[str, Path]) -> tuple[Recipe, ...]:
    """Read recipes that were stored as text, with the models they name where `located` says they are.

    Raises as `load_recipes` does.
    """
    return _load(parse_documents(Path.cwd() / "recipe", text), located)


def reload_recipe(text: str, located: Mapping[str, Path]) -> Recipe:
    """Read the only recipe that was stored as text, as `reload_recipes`; intermediate models are located by name."""
    recipes = reload_recipes(text, located)
    if len(recipes) > 1:
        where, message = recipes[-1].path.name, f"one recipe is expected here, found {len(recipes)} documents"
        raise RecipeError(Problem("recipe.yaml.documents", where, message, "keep one recipe a file"))
    return recipes[0]


def _load(sources: Sequence[YamlSource], located: Mapping[str, Path]) -> tuple[Recipe, ...]:
    findings = Findings(RecipeError, NotFoundError)
    places: dict[str, Path] = {}
    names = document_names(sources, findings)
    readings = [Reading(source, findings, located, names, places) for source in sources]
    recipes = [_read(reading, reading.source.root) for reading in readings]
    _raise_any(findings)
    sound = [recipe for recipe in recipes if recipe is not None]
    if len(sound) < len(recipes):
        raise AssertionError("no recipe, and nothing found wrong with it")
    ordered = in_order(readings, sound)
    _raise_any(findings)
    return ordered


def _raise_any(findings: Findings) -> None:
    try:
        findings.raise_any()
    except RecipeError as error:
        if all(problem.code == "recipe.unsupported" for problem in error.problems):
            raise UnsupportedError(*error.problems) from None
        raise


def _read(reading: Reading, root: Value) -> Recipe | None:
    if not isinstance(root, dict):
        message = f"a recipe is a mapping of names to values, found {describe(root)}"
        reading.refuse("recipe.wrong-kind", (), message)
        return None
    if "merge_method" not in root and any(key in root for key in _MIXTURE_KEYS):
        what = "a recipe that builds a mixture of experts (gate_mode, experts) is"
        reading.unsupported((), what, "mergekit-moe makes it, and MergePipe merges what comes out")
        return None
    _check_keys(reading, root)
    operator = _operator(reading, root)
    dtypes = _dtypes(reading, root)
    base = _base(reading, root)
    shared = _shared_parameters(reading, root, operator)
    if operator is not None:
        is_given = root.get("base_model") is not None
        check_base(reading, operator, is_given=is_given or _has_slice_bases(root), is_sliced="models" not in root)
    content = _content(Surroundings(reading, operator, base, (shared,)), root)
    template = None if root.get("chat_template") is None else reading.text(root["chat_template"], ("chat_template",))
    name = None if root.get("name") is None else reading.text(root["name"], ("name",))
    if operator is None or content is None or (base is None and root.get("base_model") is not None):
        read_tokenizer(reading, root, (), has_base=root.get("base_model") is not None)
        return None
    models, slices, modules = content
    source = reading.source
    recipe = Recipe(source.path, source.text, operator, base, models, shared, *dtypes, slices, modules)
    tokenizer = read_tokenizer(reading, root, recipe.inputs(), has_base=base is not None)
    return Recipe(
        source.path, source.text, operator, base, models, shared, *dtypes, slices, modules, tokenizer, template, name
    )


def _check_keys(reading: Reading, root: dict[str, Value]) -> None:
    reading.unknown_keys(root, RECIPE_KEYS, ())
    given = [key for key in CONTENT_KEYS if key in root]
    if len(given) > 1:
        message = f"stands beside '{given[0]}'"
        reading.refuse("recipe.content", (given[1],), message, "a recipe has one of models, slices and modules")


def _has_slice_bases(root: dict[str, Value]) -> bool:
    """Whether slices name their own bases, all of them: then the recipe needs none for all."""
    slices = root.get("slices")
    return isinstance(slices, list) and all(isinstance(each, dict) and each.get("base_model") for each in slices)


def _operator(reading: Reading, root: dict[str, Value]) -> OperatorSpec | None:
    given = root.get("merge_method")
    if given is None:
        message, hint = "the recipe has no merge_method", did_you_mean("", list(operator_specs()))
        reading.refuse("recipe.missing-key", ("merge_method",), message, hint)
        return None
    name = reading.text(given, ("merge_method",))
    if name is not None and not has_operator(name):
        load_entry_points()
    if name is None or has_operator(name):
        return operator_named(name).spec if name else None
    message = f"unknown merge method '{shortened(name)}'"
    nearest = partial(did_you_mean, shortened(name), list(operator_specs()))
    reading.refuse("recipe.unknown-operator", ("merge_method",), message, nearest)
    return None


def _dtypes(reading: Reading, root: dict[str, Value]) -> tuple[DType | None, DType | None]:
    """`dtype` and `out_dtype`. `auto` keeps each tensor's dtype as it is in the base, whatever `dtype` says."""
    dtype, out_dtype = _dtype(reading, root, "dtype"), _dtype(reading, root, "out_dtype")
    return (None, None) if root.get("out_dtype") == AUTO else (dtype, out_dtype)


def _dtype(reading: Reading, root: dict[str, Value], key: str) -> DType | None:
    if root.get(key) in (None, AUTO):
        return None
    name = reading.text(root[key], (key,))
    if name is None or name in DTYPES_BY_RECIPE_NAME:
        return DTYPES_BY_RECIPE_NAME[name] if name else None
    hint = did_you_mean(shortened(name), DTYPE_NAMES)
    reading.refuse("recipe.unknown-dtype", (key,), f"unknown dtype '{shortened(name)}'", hint)
    return None


def _base(reading: Reading, root: dict[str, Value]) -> ModelInput | None:
    if root.get("base_model") is None:
        return None
    return read_model(reading, root["base_model"], ("base_model",), {}, ("base_model",))


def _shared_parameters(reading: Reading, root: dict[str, Value], operator: OperatorSpec | None) -> dict[str, Setting]:
    return Surroundings(reading, operator, None, ()).parameters(root, (), Scope.GLOBAL)


def _content(
    around: Surroundings, root: dict[str, Value]
) -> tuple[tuple[ModelInput, ...], tuple[OutputSlice, ...], tuple[OutputModule, ...]] | None:
    """What is merged: models, slices or modules, the others empty; None if that cannot be made sense of."""
    given = next((key for key in CONTENT_KEYS if root.get(key) is not None), None)
    if given == "models":
        models = read_models(around, root["models"], ("models",))
        return (models, (), ()) if models else None
    if given == "slices":
        slices = read_slices(around, root["slices"], ("slices",))
        return ((), slices, ()) if slices else None
    if given == "modules":
        modules = read_modules(around, root["modules"], ("modules",))
        return ((), (), modules) if modules else None
    around.reading.refuse("recipe.missing-key", ("models",), "the recipe has no models")
    return None
