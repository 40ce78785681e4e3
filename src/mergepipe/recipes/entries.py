"""Parse the models, slices and modules that a recipe merges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mergepipe.core.display import shortened
from mergepipe.operators.spec import BaseRole, OperatorSpec, Scope
from mergepipe.recipes.fields import (
    DocumentReader,
    all_or_none,
    describe,
    key_elsewhere,
    parameter_elsewhere,
    parameter_names,
    whole_number,
)
from mergepipe.recipes.parameters import BY_NORM_TEXT, global_values, is_constant, model_values, read_parameters
from mergepipe.recipes.recipe import LayerSource, ModelInput, ModelKey, OutputModule, OutputSlice, Setting
from mergepipe.recipes.references import read_model, read_reference
from mergepipe.recipes.yaml_source import KeyPath, Value

# --- check an operator's requirements on the models it merges: base, number, parameters, weights ---


SMALLEST_WEIGHT_SUM = 1e-8


@dataclass(frozen=True, slots=True)
class Group:
    """Models that are merged together: the entries of `models`, or the sources of one slice.

    `at` is the place of the list, `base` the base_model in force. `shared` are the parameters around it, from the
    nearest to the top level's.
    """

    at: KeyPath
    models: tuple[ModelInput, ...]
    base: ModelInput | None
    shared: tuple[Mapping[str, Setting], ...]

    @property
    def is_slice(self) -> bool:
        return self.at[-1] == "sources"

    def holds(self, model: ModelInput) -> bool:
        """Whether a model is listed."""
        return any(listed.key == model.key for listed in self.models)

    def is_origin(self, model: ModelInput, operator: OperatorSpec) -> bool:
        """Whether a model is the base that deltas are taken against, and has no part in the merge itself."""
        has_origin = operator.base_role in (BaseRole.REQUIRED, BaseRole.ORIGIN)
        return has_origin and self.base is not None and model.key == self.base.key


def check_base(reader: DocumentReader, operator: OperatorSpec, *, is_given: bool) -> None:
    """Report a missing base model."""
    if not is_given and operator.base_role is BaseRole.REQUIRED:
        message, hint = f"{operator.name} needs base_model", "name the model the others were fine-tuned from"
        reader.refuse("recipe.incomplete", ("base_model",), message, hint)


def check_group(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report problems of a group of models and of the parameters that apply to it."""
    if operator.base_role is BaseRole.NONE and group.base and not group.is_slice and not group.holds(group.base):
        message, hint = f"{operator.name} has no base model", "remove base_model"
        reader.refuse("recipe.conflict", ("base_model",), message, hint)
    if _has_its_base(reader, operator, group):
        _check_count(reader, operator, group)
        _note_base_parameters(reader, operator, group)
        _note_base_alone(reader, operator, group)
    for spec in operator.parameters:
        if spec.required and spec.scope is Scope.MODEL:
            _check_required_of_models(reader, operator, group, spec.name)
        elif spec.required and not any(spec.name in settings for settings in group.shared):
            hint = f"write '{spec.name}: ...' under the top-level parameters"
            message = f"{operator.name} needs the parameter {spec.name}"
            at = (*group.at[:-1], "parameters", spec.name)
            reader.refuse("recipe.incomplete", at, message, hint)
    if operator.base_role is BaseRole.OPTIONAL:
        _check_weight_sum(reader, operator, group)
    if operator.conflict is not None:
        _check_conflicts(reader, operator, group)


def _has_its_base(reader: DocumentReader, operator: OperatorSpec, group: Group) -> bool:
    """Report a slice that does not list the base of its deltas, whose layers are then unknown."""
    is_origin = operator.base_role in (BaseRole.REQUIRED, BaseRole.ORIGIN)
    if not group.is_slice or group.base is None or not is_origin or group.holds(group.base):
        return True
    message = f"base_model '{shortened(group.base.text)}' is not among the sources of this slice"
    hint = "list it with the layer_range that the others are compared with"
    reader.refuse("recipe.conflict", group.at, message, hint)
    return False


def _note_base_parameters(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report parameters of a base that deltas are taken against."""
    for index, model in enumerate(group.models):
        if group.is_origin(model, operator) and model.parameters:
            message = (
                f"{', '.join(model.parameters)} of the base: no effect, {operator.name} computes deltas against it"
            )
            at = (*group.at, index, "parameters")
            reader.notice("recipe.no-effect", at, message, "for any other model they have an effect")


def _note_base_alone(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report a base that nothing is merged into."""
    is_alone = all(group.is_origin(model, operator) for model in group.models)
    if is_alone and group.base is not None and group.base.adapter is None:
        message = f"'{shortened(group.base.text)}' is the base and the only model: the output is a copy of it"
        reader.warning("recipe.unclear", group.at, message, "list the models to merge into it")


def _mapping_at(root: Value, key_path: KeyPath) -> dict[str, Value] | None:
    """Return the mapping at a place of a recipe; None where there is another value, or none."""
    value = root
    for key in key_path:
        if isinstance(value, list) and isinstance(key, int):
            value = value[key]
        elif isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        else:
            return None
    return value if isinstance(value, dict) else None


def _check_required_of_models(reader: DocumentReader, operator: OperatorSpec, group: Group, name: str) -> None:
    for index, model in enumerate(group.models):
        is_set = name in model.parameters or any(name in settings for settings in group.shared)
        if is_set or group.is_origin(model, operator):
            continue
        context = "the ones of the slice" if group.is_slice else "the top-level ones"
        hint = f"write '{name}: ...' under its parameters, or under {context} for all models"
        entry = _mapping_at(reader.source.root, (*group.at, index)) or {}
        if name in entry and "parameters" in entry:
            hint = f"'{name}' is written next to 'parameters:', not below it: indent it by two more spaces"
        elif name in entry:
            hint = f"'{name}' is written in the entry itself: put it below 'parameters:'"
        message = f"{operator.name} needs the parameter {name}"
        reader.refuse("recipe.incomplete", (*group.at, index, "parameters", name), message, hint)


def _check_conflicts(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report contradicting parameters of a model; those that depend on the tensor are checked per tensor."""
    for index, model in enumerate(group.models):
        chain = (model.parameters, *group.shared)
        is_base = group.base is not None and model.key == group.base.key
        values = {} if is_base or not is_constant(chain) else model_values(operator, chain)
        is_refused = any(value != value for value in values.values())  # told already; see `REFUSED`
        conflict = operator.conflict_of(values) if values and not is_refused else ""
        if conflict:
            at = (*group.at, index, "parameters")
            reader.refuse("recipe.conflict", at, conflict, "change one of the two")


def _check_weight_sum(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    if not is_constant((*group.shared, *(model.parameters for model in group.models))):
        return
    values = [model_values(operator, (model.parameters, *group.shared)) for model in group.models]
    total = normalized_sum(global_values(operator, group.shared), values)
    if total is not None and abs(total) < SMALLEST_WEIGHT_SUM:
        message = f"the weights sum to {total:g} and cannot be normalized"
        reader.refuse("recipe.value", group.at, message, "change a weight, or set normalize: false")


def normalized_sum(shared: Mapping[str, float | bool], models: list[dict[str, float | bool]]) -> float | None:
    """Return the sum that weights are divided by; None if they are not normalized or not all known."""
    if not shared.get("normalize", False) or not all("weight" in values for values in models):
        return None
    return sum(float(values["weight"]) for values in models)


def _check_count(reader: DocumentReader, operator: OperatorSpec, group: Group) -> None:
    """Report too few or too many models beside the anchor, or in all where a base is optional."""
    role, base = operator.base_role, group.base
    is_besides_base = role is BaseRole.REQUIRED or (role is BaseRole.ORIGIN and base is not None)
    is_base_used = base is not None and role is not BaseRole.NONE and (not group.is_slice or group.holds(base))
    if role is BaseRole.ORIGIN and base is None:
        n_experts, n_anchor = len(group.models), 0
    else:
        anchor = base.key if base is not None and is_base_used else group.models[0].key
        n_experts = sum(model.key != anchor for model in group.models)
        n_anchor = 0 if is_besides_base else 1
    low, high = operator.min_experts + n_anchor, operator.max_experts
    if n_experts >= operator.min_experts and (high is None or n_experts <= high):
        return
    bound = f"exactly {low}" if high is not None and high + n_anchor == low else f"at least {low}"
    if high is not None and n_experts > high and high + n_anchor != low:
        low, bound = high + n_anchor, f"at most {high + n_anchor}"
    noun = ("model" if low == 1 else "models") + (" besides base_model" if is_besides_base else "")
    message = f"{operator.name} takes {bound} {noun}, found {n_experts + n_anchor}"
    reader.refuse("recipe.value", group.at, message)


# --- parse the models, slices and modules that a recipe merges ---


MODEL_KEYS = ("model", "parameters")
NUMBERS_KEYS = ("file", "value")  # of a weight that is a file
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
    if (sound := all_or_none(models)) is None:
        return None
    read = _numbered(context, sound, key_path)
    _check(context, read, key_path)
    return read


def read_slices(context: EntryContext, value: Value, key_path: KeyPath) -> tuple[OutputSlice, ...] | None:
    """Parse the slices in order; None if one is invalid."""
    entries = _list(context, value, key_path, "a list of slices", "write '- sources: [...]'")
    if entries is None:
        return None
    slices = [_slice(context, entry, (*key_path, index)) for index, entry in enumerate(entries)]
    read = all_or_none(slices)
    if read is not None and not any(output_slice.n_layers for output_slice in read):
        hint = "write 'layer_range: [FIRST, END]', END is not included"
        context.reader.refuse("recipe.value", key_path, "no slice contains a layer", hint)
        return None
    return read


def read_modules(context: EntryContext, value: Value, key_path: KeyPath) -> tuple[OutputModule, ...] | None:
    """Parse the modules by name; None if one is invalid."""
    if not isinstance(value, dict) or not value:
        hint = "write 'NAME: {slices: ...}' or 'NAME: {models: ...}'"
        context.reader.wrong_kind(value, key_path, "names of modules with their slices or models", hint)
        return None
    return all_or_none([_module(context, name, entry, (*key_path, name)) for name, entry in value.items()])


def _list(context: EntryContext, value: Value, key_path: KeyPath, needed: str, hint: str) -> list[Value] | None:
    if isinstance(value, list) and value:
        return value
    description = "an empty list" if value == [] else describe(value)
    context.reader.refuse("recipe.value", key_path, f"needs {needed}, found {description}", hint)
    return None


def _model(context: EntryContext, value: Value, key_path: KeyPath, real_keys: tuple[str, ...]) -> ModelInput | None:
    reader = context.reader
    if not isinstance(value, dict):
        reader.wrong_kind(value, key_path, "a mapping with the key 'model'", "write '- model: PATH'")
        return None
    check_keys(reader, value, key_path, real_keys)
    value, numbers = _take_numbers(context, value, key_path)
    parameters = context.parameters(value, key_path, Scope.MODEL)
    if value.get("model") is None:
        reader.refuse("recipe.incomplete", (*key_path, "model"), "the entry has no model", "write '- model: PATH'")
        return None
    model = read_model(reader, value["model"], (*key_path, "model"), parameters, key_path)
    return model if model is None or numbers is None else replace(model, numbers=numbers)


def _take_numbers(
    context: EntryContext, entry: dict[str, Value], key_path: KeyPath
) -> tuple[dict[str, Value], ModelInput | None]:
    """Return an entry whose weight is `{file: PATH, value: FACTOR}` with the factor as its weight, and the file."""
    reader, operator, parameters = context.reader, context.operator, entry.get("parameters")
    weight = parameters.get("weight") if isinstance(parameters, dict) else None
    if operator is None or not isinstance(parameters, dict) or not isinstance(weight, dict) or "file" not in weight:
        return entry, None
    at = (*key_path, "parameters", "weight")
    changed: dict[str, Value] = {**entry, "parameters": {**parameters, "weight": weight.get("value", 1.0)}}
    reader.refuse_unknown_keys(weight, NUMBERS_KEYS, at)
    if weight.get("value") == BY_NORM_TEXT or not operator.is_weighted:
        reader.refuse(
            "recipe.value", at, "the weight comes from norms, or there is none: it cannot be combined with a file"
        )
        return changed, None
    file = read_reference(reader, weight["file"], (*at, "file"))
    if file is not None and (file.adapter is not None or file.intermediate is not None):
        reader.refuse("recipe.value", (*at, "file"), "needs a checkpoint with the model's shapes")
        return changed, None
    return changed, None if file is None else replace(file, is_delta=True)


def check_keys(reader: DocumentReader, entry: dict[str, Value], key_path: KeyPath, real_keys: tuple[str, ...]) -> None:
    """Report keys of an entry without effect there, parameters beside 'parameters:' among them, and misspelt ones."""

    def elsewhere(key: str) -> str:
        is_parameter = bool(parameter_elsewhere(key))
        return "parameters belong under 'parameters:'" if is_parameter else key_elsewhere(key)

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
            message = f"'{shortened(model.text)}' is already listed, as {key_path[-1]}[{first}]: each entry counts"
            elsewhere = "mergekit uses a model that is listed twice only once, with the parameters of the first entry"
            context.reader.warning("recipe.unclear", (*key_path, index, "model"), message, elsewhere)
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
    read = all_or_none([_source(context, entry, (*key_path, index)) for index, entry in enumerate(entries)])
    if read is None:
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
        reader.refuse("recipe.incomplete", at, "the source has no layer_range", hint)
        return None
    items = value if isinstance(value, list) and len(value) == _RANGE_LENGTH else []
    numbers = [number for item in items if (number := whole_number(item)) is not None]
    if len(numbers) < _RANGE_LENGTH:
        reader.refuse("recipe.value", at, "needs two whole numbers", hint)
        return None
    start, stop = numbers
    if not 0 <= start <= stop:
        reader.refuse("recipe.value", at, f"[{start}, {stop}] contains no layer", hint)
        return None
    if start == stop:
        meaning = "a first or last slice still says which models the tensors around the layers are of"
        reader.notice("recipe.no-effect", at, f"[{start}, {stop}] contains no layer", meaning)
    return start, stop


def _check_lengths(reader: DocumentReader, sources: tuple[LayerSource, ...], key_path: KeyPath) -> None:
    first = sources[0]
    for index, source in enumerate(sources):
        if source.n_layers != first.n_layers:
            message = (
                f"{source.n_layers} layers of '{shortened(source.model.text)}' cannot be merged with "
                f"{first.n_layers} of '{shortened(first.model.text)}'"
            )
            hint = "give all sources of a slice the same number of layers"
            reader.refuse("recipe.conflict", (*key_path, index, "layer_range"), message, hint)
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
        reader.refuse("recipe.conflict", key_path, f"a module needs either 'models' or 'slices', found {present_keys}")
        return None
    where = reader.source.where(*key_path)
    if content == ["models"]:
        models = read_models(inner, value["models"], (*key_path, "models"))
        return OutputModule(name, models, (), parameters, where) if models else None
    slices = read_slices(inner, value["slices"], (*key_path, "slices"))
    return OutputModule(name, (), slices, parameters, where) if slices else None
