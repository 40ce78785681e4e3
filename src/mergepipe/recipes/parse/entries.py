"""Parse the models, slices and modules that a recipe merges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe.operators.spec import OperatorSpec, Scope
from mergepipe.recipes.parse.fields import DocumentReader, describe
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
class EntryContext:
    """Context of a recipe's entries: operator, base, and enclosing parameters, innermost first."""

    reader: DocumentReader
    operator: OperatorSpec | None
    base: ModelInput | None
    shared: tuple[Mapping[str, Setting], ...]

    def parameters(self, entry: Mapping[str, Value], key_path: KeyPath, scope: Scope) -> dict[str, Setting]:
        """Parse the parameters of one entry."""
        at = (*key_path, "parameters")
        if self.operator is None:
            self.reader.mapping(entry.get("parameters"), at)
            return {}
        return read_parameters(self.reader, entry.get("parameters"), at, self.operator, scope)

    def within(self, parameters: Mapping[str, Setting], base: ModelInput | None = None) -> EntryContext:
        """Return the context of entries nested one level deeper."""
        return EntryContext(self.reader, self.operator, base or self.base, (parameters, *self.shared))


def read_models(context: EntryContext, value: Value, key_path: KeyPath) -> tuple[ModelInput, ...] | None:
    """Parse the models in order; None if there are none or one names no path."""
    entries = _list(context, value, key_path, "a list of models", "write '- model: PATH'")
    if entries is None:
        return None
    models = [_model(context, entry, (*key_path, index), MODEL_KEYS) for index, entry in enumerate(entries)]
    read = tuple(model for model in models if model is not None)
    if len(read) < len(models):
        return None
    _note_duplicates(context.reader, read, key_path)
    _check(context, read, key_path)
    return read


def read_slices(context: EntryContext, value: Value, key_path: KeyPath) -> tuple[OutputSlice, ...] | None:
    """Parse the slices in order; None if one is invalid."""
    entries = _list(context, value, key_path, "a list of slices", "write '- sources: [...]'")
    if entries is None:
        return None
    slices = [_slice(context, entry, (*key_path, index)) for index, entry in enumerate(entries)]
    read = tuple(output_slice for output_slice in slices if output_slice is not None)
    return read if len(read) == len(slices) else None


def read_modules(context: EntryContext, value: Value, key_path: KeyPath) -> tuple[OutputModule, ...] | None:
    """Parse the modules by name; None if one is invalid."""
    if not isinstance(value, dict) or not value:
        hint = "write 'NAME: {slices: ...}' or 'NAME: {models: ...}'"
        context.reader.wrong_kind(value, key_path, "names of modules with what they are made of", hint)
        return None
    modules = [_module(context, name, entry, (*key_path, name)) for name, entry in value.items()]
    read = tuple(module for module in modules if module is not None)
    return read if len(read) == len(modules) else None


def _list(context: EntryContext, value: Value, key_path: KeyPath, needed: str, hint: str) -> list[Value] | None:
    if isinstance(value, list) and value:
        return value
    found = "an empty list" if value == [] else describe(value)
    context.reader.refuse("recipe.wrong-kind", key_path, f"needs {needed}, found {found}", hint)
    return None


def _model(context: EntryContext, value: Value, key_path: KeyPath, known: tuple[str, ...]) -> ModelInput | None:
    reader = context.reader
    if not isinstance(value, dict):
        reader.wrong_kind(value, key_path, "a mapping with the key 'model'", "write '- model: PATH'")
        return None
    _check_keys(context, value, key_path, known, "model")
    parameters = context.parameters(value, key_path, Scope.MODEL)
    if value.get("model") is None:
        reader.refuse("recipe.missing-key", (*key_path, "model"), "the entry names no model", "write '- model: PATH'")
        return None
    return read_model(reader, value["model"], (*key_path, "model"), parameters, key_path)


def _check_keys(
    context: EntryContext, entry: dict[str, Value], key_path: KeyPath, known: tuple[str, ...], what: str
) -> None:
    operator = context.operator
    misplaced = [key for key in entry if key not in known and operator and operator.parameter(key)]
    for key in misplaced:
        hint = f"write it under 'parameters:' of this {what}"
        context.reader.refuse("recipe.unknown-key", (*key_path, key), f"{key} is a parameter", hint)
    others = {key: value for key, value in entry.items() if key not in misplaced}
    context.reader.unknown_keys(others, known, key_path)


def _note_duplicates(reader: DocumentReader, models: tuple[ModelInput, ...], key_path: KeyPath) -> None:
    """Report models listed twice; mergekit keeps models in a dict and silently drops one of them."""
    first_at: dict[ModelKey, int] = {}
    for index, model in enumerate(models):
        if model.key in first_at:
            message = f"'{shortened(model.text)}' is listed already, as {key_path[-1]}[{first_at[model.key]}]"
            reader.refuse("recipe.duplicate-model", (*key_path, index, "model"), message, "list every model once")
        first_at.setdefault(model.key, index)


def _check(context: EntryContext, models: tuple[ModelInput, ...], key_path: KeyPath) -> None:
    if context.operator is not None:
        check_group(context.reader, context.operator, Group(key_path, models, context.base, context.shared))


def _slice(context: EntryContext, value: Value, key_path: KeyPath) -> OutputSlice | None:
    reader = context.reader
    if not isinstance(value, dict):
        reader.wrong_kind(value, key_path, "a mapping with the key 'sources'", "write '- sources: [...]'")
        return None
    if "residual_weight" in value:
        message = "residual_weight has no effect, in mergekit neither"
        reader.refuse("recipe.unknown-key", (*key_path, "residual_weight"), message, "remove it")
    rest = {key: item for key, item in value.items() if key != "residual_weight"}
    _check_keys(context, rest, key_path, SLICE_KEYS, "slice")
    base = None
    if value.get("base_model") is not None:
        at = (*key_path, "base_model")
        base = read_model(reader, value["base_model"], at, {}, at)
    parameters = context.parameters(value, key_path, Scope.GLOBAL)
    sources = _sources(context.within(parameters, base), value.get("sources"), (*key_path, "sources"))
    return OutputSlice(sources, base, parameters, reader.source.where(*key_path)) if sources else None


def _sources(context: EntryContext, value: Value, key_path: KeyPath) -> tuple[LayerSource, ...] | None:
    hint = "write '- {model: PATH, layer_range: [FIRST, END]}'"
    entries = _list(context, value, key_path, "a list of sources", hint)
    if entries is None:
        return None
    sources = [_source(context, entry, (*key_path, index)) for index, entry in enumerate(entries)]
    read = tuple(source for source in sources if source is not None)
    if len(read) < len(sources):
        return None
    models = tuple(source.model for source in read)
    _note_duplicates(context.reader, models, key_path)
    _check_lengths(context.reader, read, key_path)
    _check(context, models, key_path)
    return read


def _source(context: EntryContext, value: Value, key_path: KeyPath) -> LayerSource | None:
    model = _model(context, value, key_path, SOURCE_KEYS)
    layers = _layer_range(context.reader, value, key_path)
    return (
        LayerSource(model, *layers, context.reader.source.where(*key_path, "layer_range")) if model and layers else None
    )


def _layer_range(reader: DocumentReader, entry: Value, key_path: KeyPath) -> tuple[int, int] | None:
    if not isinstance(entry, dict):
        return None
    at, hint = (*key_path, "layer_range"), "write 'layer_range: [FIRST, END]', END is not included"
    value = entry.get("layer_range")
    if value is None:
        reader.refuse("recipe.missing-key", at, "the source has no layer_range", hint)
        return None
    is_pair = isinstance(value, list) and len(value) == _RANGE_LENGTH
    numbers = [n for n in value if isinstance(n, int) and not isinstance(n, bool)] if isinstance(value, list) else []
    if not is_pair or len(numbers) < _RANGE_LENGTH:
        reader.refuse("recipe.slice.range", at, "needs two whole numbers", hint)
        return None
    start, stop = numbers
    if not 0 <= start < stop:
        reader.refuse("recipe.slice.range", at, f"[{start}, {stop}] holds no layer", hint)
        return None
    return start, stop


def _check_lengths(reader: DocumentReader, sources: tuple[LayerSource, ...], key_path: KeyPath) -> None:
    first = sources[0]
    for index, source in enumerate(sources):
        if source.n_layers != first.n_layers:
            message = (
                f"{source.n_layers} layers of '{shortened(source.model.text)}' cannot be merged with "
                f"{first.n_layers} of '{shortened(first.model.text)}'"
            )
            hint = "give all sources of a slice equally many layers"
            reader.refuse("recipe.slice.lengths", (*key_path, index, "layer_range"), message, hint)
            return


def _module(context: EntryContext, name: str, value: Value, key_path: KeyPath) -> OutputModule | None:
    reader = context.reader
    if not isinstance(value, dict):
        reader.wrong_kind(value, key_path, "a mapping with the key 'slices' or 'models'")
        return None
    _check_keys(context, value, key_path, MODULE_KEYS, "module")
    parameters = context.parameters(value, key_path, Scope.GLOBAL)
    inner = context.within(parameters)
    given = [key for key in ("models", "slices") if value.get(key) is not None]
    if len(given) != 1:
        found = "both" if given else "neither"
        reader.refuse("recipe.content", key_path, f"a module needs either 'models' or 'slices', found {found}")
        return None
    where = reader.source.where(*key_path)
    if given == ["models"]:
        models = read_models(inner, value["models"], (*key_path, "models"))
        return OutputModule(name, models, (), parameters, where) if models else None
    slices = read_slices(inner, value["slices"], (*key_path, "slices"))
    return OutputModule(name, (), slices, parameters, where) if slices else None
