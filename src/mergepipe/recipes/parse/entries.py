"""Parse the models, slices and modules that a recipe merges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from mergepipe.operators.spec import OperatorSpec, Scope
from mergepipe.recipes.parse.fields import DocumentReader, describe
from mergepipe.recipes.parse.names_elsewhere import key_elsewhere, parameter_elsewhere, parameter_names
from mergepipe.recipes.parse.parameters import quoted_number, read_parameters
from mergepipe.recipes.parse.recipe import LayerSource, ModelInput, ModelKey, OutputModule, OutputSlice, Setting
from mergepipe.recipes.parse.references import read_model
from mergepipe.recipes.parse.yaml_source import KeyPath, Value, shortened
from mergepipe.recipes.resolve.model_requirements import Group, check_group

MODEL_KEYS = ("model", "parameters")
SOURCE_KEYS = ("model", "layer_range", "parameters")
SLICE_KEYS = ("sources", "base_model", "parameters")
MODULE_KEYS = ("models", "slices", "parameters")
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
    read = _numbered(context, read, key_path)
    _check(context, read, key_path)
    return read


def read_slices(context: EntryContext, value: Value, key_path: KeyPath) -> tuple[OutputSlice, ...] | None:
    """Parse the slices in order; None if one is invalid."""
    entries = _list(context, value, key_path, "a list of slices", "write '- sources: [...]'")
    if entries is None:
        return None
    slices = [_slice(context, entry, (*key_path, index)) for index, entry in enumerate(entries)]
    read = tuple(output_slice for output_slice in slices if output_slice is not None)
    if len(read) < len(slices):
        return None
    if not any(output_slice.n_layers for output_slice in read):
        hint = "write 'layer_range: [FIRST, END]', END is not included"
        context.reader.refuse("recipe.slice.range", key_path, "no slice holds a layer", hint)
        return None
    return read


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
    description = "an empty list" if value == [] else describe(value)
    context.reader.refuse("recipe.wrong-kind", key_path, f"needs {needed}, found {description}", hint)
    return None


def _model(context: EntryContext, value: Value, key_path: KeyPath, real_keys: tuple[str, ...]) -> ModelInput | None:
    reader = context.reader
    if not isinstance(value, dict):
        reader.wrong_kind(value, key_path, "a mapping with the key 'model'", "write '- model: PATH'")
        return None
    check_keys(reader, value, key_path, real_keys)
    parameters = context.parameters(value, key_path, Scope.MODEL)
    if value.get("model") is None:
        reader.refuse("recipe.missing-key", (*key_path, "model"), "the entry names no model", "write '- model: PATH'")
        return None
    return read_model(reader, value["model"], (*key_path, "model"), parameters, key_path)


def check_keys(reader: DocumentReader, entry: dict[str, Value], key_path: KeyPath, real_keys: tuple[str, ...]) -> None:
    """Report keys of an entry without effect there, parameters beside 'parameters:' among them, and misspelt ones."""

    def elsewhere(key: str) -> str:
        is_parameter = bool(parameter_elsewhere(key))
        return "parameters count under 'parameters:'" if is_parameter else key_elsewhere(key)

    reader.unknown_keys(entry, real_keys, key_path, elsewhere, further_names=parameter_names())


def _numbered(context: EntryContext, models: Sequence[ModelInput], key_path: KeyPath) -> tuple[ModelInput, ...]:
    """Number the models that are listed again, so that each entry counts, and report them.

    A base that deltas are taken against has no part in the merge, however often it is listed.
    """
    first_at: dict[ModelKey, int] = {}
    repeats: Counter[ModelKey] = Counter()
    numbered: list[ModelInput] = []
    group = Group(key_path, tuple(models), context.base, context.shared)
    for index, model in enumerate(models):
        is_counted = context.operator is None or not group.is_origin(model, context.operator)
        first = first_at.setdefault(model.key, index)
        numbered.append(replace(model, repeat=repeats[model.key]) if is_counted else model)
        repeats[model.key] += 1
        if first < index and is_counted:
            message = f"'{shortened(model.text)}' is listed already, as {key_path[-1]}[{first}]: each entry counts"
            elsewhere = "mergekit takes a name that stands twice once, with the parameters of the first"
            context.reader.warning("recipe.duplicate-model", (*key_path, index, "model"), message, elsewhere)
    return tuple(numbered)


def _check(context: EntryContext, models: tuple[ModelInput, ...], key_path: KeyPath) -> None:
    if context.operator is not None:
        check_group(context.reader, context.operator, Group(key_path, models, context.base, context.shared))


def _slice(context: EntryContext, value: Value, key_path: KeyPath) -> OutputSlice | None:
    reader = context.reader
    if not isinstance(value, dict):
        reader.wrong_kind(value, key_path, "a mapping with the key 'sources'", "write '- sources: [...]'")
        return None
    check_keys(reader, value, key_path, SLICE_KEYS)
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
    models = _numbered(context, [source.model for source in read], key_path)
    read = tuple(replace(source, model=model) for source, model in zip(read, models, strict=True))
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
    numbers = [number for item in value if (number := _whole_number(item)) is not None] if _is_pair(value) else []
    if len(numbers) < _RANGE_LENGTH:
        reader.refuse("recipe.slice.range", at, "needs two whole numbers", hint)
        return None
    start, stop = numbers
    if not 0 <= start <= stop:
        reader.refuse("recipe.slice.range", at, f"[{start}, {stop}] holds no layer", hint)
        return None
    if start == stop:
        meaning = "a first or last slice still says which models the tensors around the layers are of"
        reader.notice("recipe.slice.empty", at, f"[{start}, {stop}] holds no layer", meaning)
    return start, stop


def _is_pair(value: Value) -> TypeGuard[list[Value]]:
    return isinstance(value, list) and len(value) == _RANGE_LENGTH


def _whole_number(value: Value) -> int | None:
    """Return a whole number, also if it is quoted or written as `8.0`."""
    number = quoted_number(value) if isinstance(value, str) else value
    is_whole = isinstance(number, int | float) and not isinstance(number, bool) and number % 1 == 0
    return int(number) if is_whole and isinstance(number, int | float) else None


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
    check_keys(reader, value, key_path, MODULE_KEYS)
    parameters = context.parameters(value, key_path, Scope.GLOBAL)
    inner = context.within(parameters)
    content = [key for key in ("models", "slices") if value.get(key)]
    if len(content) != 1:
        present_keys = "both" if content else "neither"
        reader.refuse("recipe.content", key_path, f"a module needs either 'models' or 'slices', found {present_keys}")
        return None
    where = reader.source.where(*key_path)
    if content == ["models"]:
        models = read_models(inner, value["models"], (*key_path, "models"))
        return OutputModule(name, models, (), parameters, where) if models else None
    slices = read_slices(inner, value["slices"], (*key_path, "slices"))
    return OutputModule(name, (), slices, parameters, where) if slices else None
