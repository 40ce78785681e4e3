"""Reads what a recipe merges: lists of models, slices of their layers, modules of either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe.operators.spec import OperatorSpec, Scope
from mergepipe.recipes.parse.fields import Reading, describe
from mergepipe.recipes.parse.parameters import read_parameters
from mergepipe.recipes.parse.recipe import LayerSource, ModelInput, ModelKey, OutputModule, OutputSlice, Setting
from mergepipe.recipes.parse.references import read_model
from mergepipe.recipes.parse.yaml_source import KeyPath, Value, shortened
from mergepipe.recipes.resolve.model_requirements import Group, check_group

MODEL_KEYS = ("model", "parameters")
SOURCE_KEYS = ("model", "layer_range", "parameters")
SLICE_KEYS = ("sources", "base_model", "parameters")
MODULE_KEYS = ("models", "slices", "parameters")
CONTENT_KEYS = ("models", "slices", "modules")  # a recipe has exactly one of them

_RANGE_LENGTH = 2


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What holds for the entries of a recipe: the operator, the base, and the parameters from the nearest outwards."""

    reading: Reading
    operator: OperatorSpec | None
    base: ModelInput | None
    shared: tuple[Mapping[str, Setting], ...]

    def parameters(self, entry: Mapping[str, Value], key_path: KeyPath, scope: Scope) -> dict[str, Setting]:
        """The parameters of one entry."""
        at = (*key_path, "parameters")
        if self.operator is None:
            self.reading.mapping(entry.get("parameters"), at)
            return {}
        return read_parameters(self.reading, entry.get("parameters"), at, self.operator, scope)

    def within(self, parameters: Mapping[str, Setting], base: ModelInput | None = None) -> Surroundings:
        """The same one level further in."""
        return Surroundings(self.reading, self.operator, base or self.base, (parameters, *self.shared))


def read_models(around: Surroundings, value: Value, key_path: KeyPath) -> tuple[ModelInput, ...] | None:
    """Return the models in order; None if there are none or one of them names no path."""
    entries = _list(around, value, key_path, "a list of models", "write '- model: PATH'")
    if entries is None:
        return None
    models = [_model(around, entry, (*key_path, index), MODEL_KEYS) for index, entry in enumerate(entries)]
    read = tuple(model for model in models if model is not None)
    if len(read) < len(models):
        return None
    _note_duplicates(around.reading, read, key_path)
    _check(around, read, key_path)
    return read


def read_slices(around: Surroundings, value: Value, key_path: KeyPath) -> tuple[OutputSlice, ...] | None:
    """Return the slices in order; None if one of them cannot be made sense of."""
    entries = _list(around, value, key_path, "a list of slices", "write '- sources: [...]'")
    if entries is None:
        return None
    slices = [_slice(around, entry, (*key_path, index)) for index, entry in enumerate(entries)]
    read = tuple(each for each in slices if each is not None)
    return read if len(read) == len(slices) else None


def read_modules(around: Surroundings, value: Value, key_path: KeyPath) -> tuple[OutputModule, ...] | None:
    """Return the modules by name; None if one of them cannot be made sense of."""
    if not isinstance(value, dict) or not value:
        hint = "write 'NAME: {slices: ...}' or 'NAME: {models: ...}'"
        around.reading.wrong_kind(value, key_path, "names of modules with what they are made of", hint)
        return None
    modules = [_module(around, name, entry, (*key_path, name)) for name, entry in value.items()]
    read = tuple(each for each in modules if each is not None)
    return read if len(read) == len(modules) else None


def _list(around: Surroundings, value: Value, key_path: KeyPath, needed: str, hint: str) -> list[Value] | None:
    if isinstance(value, list) and value:
        return value
    found = "an empty list" if value == [] else describe(value)
    around.reading.refuse("recipe.wrong-kind", key_path, f"needs {needed}, found {found}", hint)
    return None


def _model(around: Surroundings, value: Value, key_path: KeyPath, known: tuple[str, ...]) -> ModelInput | None:
    reading = around.reading
    if not isinstance(value, dict):
        reading.wrong_kind(value, key_path, "a mapping with the key 'model'", "write '- model: PATH'")
        return None
    _check_keys(around, value, key_path, known, "model")
    parameters = around.parameters(value, key_path, Scope.MODEL)
    if value.get("model") is None:
        reading.refuse("recipe.missing-key", (*key_path, "model"), "the entry names no model", "write '- model: PATH'")
        return None
    return read_model(reading, value["model"], (*key_path, "model"), parameters, key_path)


def _check_keys(
    around: Surroundings, entry: dict[str, Value], key_path: KeyPath, known: tuple[str, ...], what: str
) -> None:
    operator = around.operator
    misplaced = [key for key in entry if key not in known and operator and operator.parameter(key)]
    for key in misplaced:
        hint = f"write it under 'parameters:' of this {what}"
        around.reading.refuse("recipe.unknown-key", (*key_path, key), f"{key} is a parameter", hint)
    others = {key: value for key, value in entry.items() if key not in misplaced}
    around.reading.unknown_keys(others, known, key_path)


def _note_duplicates(reading: Reading, models: tuple[ModelInput, ...], key_path: KeyPath) -> None:
    """mergekit keeps models in a dict, so of two equal ones it silently forgets one."""
    first_at: dict[ModelKey, int] = {}
    for index, model in enumerate(models):
        if model.key in first_at:
            message = f"'{shortened(model.text)}' is listed already, as {key_path[-1]}[{first_at[model.key]}]"
            reading.refuse("recipe.duplicate-model", (*key_path, index, "model"), message, "list every model once")
        first_at.setdefault(model.key, index)


def _check(around: Surroundings, models: tuple[ModelInput, ...], key_path: KeyPath) -> None:
    if around.operator is not None:
        check_group(around.reading, around.operator, Group(key_path, models, around.base, around.shared))


def _slice(around: Surroundings, value: Value, key_path: KeyPath) -> OutputSlice | None:
    reading = around.reading
    if not isinstance(value, dict):
        reading.wrong_kind(value, key_path, "a mapping with the key 'sources'", "write '- sources: [...]'")
        return None
    if "residual_weight" in value:
        message = "residual_weight has no effect, in mergekit neither"
        reading.refuse("recipe.unknown-key", (*key_path, "residual_weight"), message, "remove it")
    rest = {key: item for key, item in value.items() if key != "residual_weight"}
    _check_keys(around, rest, key_path, SLICE_KEYS, "slice")
    base = None
    if value.get("base_model") is not None:
        at = (*key_path, "base_model")
        base = read_model(reading, value["base_model"], at, {}, at)
    parameters = around.parameters(value, key_path, Scope.GLOBAL)
    sources = _sources(around.within(parameters, base), value.get("sources"), (*key_path, "sources"))
    return OutputSlice(sources, base, parameters, reading.source.where(*key_path)) if sources else None


def _sources(around: Surroundings, value: Value, key_path: KeyPath) -> tuple[LayerSource, ...] | None:
    hint = "write '- {model: PATH, layer_range: [FIRST, END]}'"
    entries = _list(around, value, key_path, "a list of sources", hint)
    if entries is None:
        return None
    sources = [_source(around, entry, (*key_path, index)) for index, entry in enumerate(entries)]
    read = tuple(source for source in sources if source is not None)
    if len(read) < len(sources):
        return None
    models = tuple(source.model for source in read)
    _note_duplicates(around.reading, models, key_path)
    _check_lengths(around.reading, read, key_path)
    _check(around, models, key_path)
    return read


def _source(around: Surroundings, value: Value, key_path: KeyPath) -> LayerSource | None:
    model = _model(around, value, key_path, SOURCE_KEYS)
    layers = _layer_range(around.reading, value, key_path)
    return (
        LayerSource(model, *layers, around.reading.source.where(*key_path, "layer_range")) if model and layers else None
    )


def _layer_range(reading: Reading, entry: Value, key_path: KeyPath) -> tuple[int, int] | None:
    if not isinstance(entry, dict):
        return None
    at, hint = (*key_path, "layer_range"), "write 'layer_range: [FIRST, END]', END is not included"
    value = entry.get("layer_range")
    if value is None:
        reading.refuse("recipe.missing-key", at, "the source has no layer_range", hint)
        return None
    is_pair = isinstance(value, list) and len(value) == _RANGE_LENGTH
    numbers = [n for n in value if isinstance(n, int) and not isinstance(n, bool)] if isinstance(value, list) else []
    if not is_pair or len(numbers) < _RANGE_LENGTH:
        reading.refuse("recipe.slice.range", at, "needs two whole numbers", hint)
        return None
    start, stop = numbers
    if not 0 <= start < stop:
        reading.refuse("recipe.slice.range", at, f"[{start}, {stop}] holds no layer", hint)
        return None
    return start, stop


def _check_lengths(reading: Reading, sources: tuple[LayerSource, ...], key_path: KeyPath) -> None:
    first = sources[0]
    for index, source in enumerate(sources):
        if source.n_layers != first.n_layers:
            message = (
                f"{source.n_layers} layers of '{shortened(source.model.text)}' cannot be merged with "
                f"{first.n_layers} of '{shortened(first.model.text)}'"
            )
            hint = "give all sources of a slice equally many layers"
            reading.refuse("recipe.slice.lengths", (*key_path, index, "layer_range"), message, hint)
            return


def _module(around: Surroundings, name: str, value: Value, key_path: KeyPath) -> OutputModule | None:
    reading = around.reading
    if not isinstance(value, dict):
        reading.wrong_kind(value, key_path, "a mapping with the key 'slices' or 'models'")
        return None
    _check_keys(around, value, key_path, MODULE_KEYS, "module")
    parameters = around.parameters(value, key_path, Scope.GLOBAL)
    inner = around.within(parameters)
    given = [key for key in ("models", "slices") if value.get(key) is not None]
    if len(given) != 1:
        found = "both" if given else "neither"
        reading.refuse("recipe.content", key_path, f"a module needs either 'models' or 'slices', found {found}")
        return None
    where = reading.source.where(*key_path)
    if given == ["models"]:
        models = read_models(inner, value["models"], (*key_path, "models"))
        return OutputModule(name, models, (), parameters, where) if models else None
    slices = read_slices(inner, value["slices"], (*key_path, "slices"))
    return OutputModule(name, (), slices, parameters, where) if slices else None
