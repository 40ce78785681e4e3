"""Check a recipe's parameters against the operator's specification, and look them up with defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, nan

from mergepipe.core.display import shortened
from mergepipe.operators.spec import BY_NORM, OperatorSpec, ParameterSpec, Scope
from mergepipe.recipes.fields import (
    DocumentReader,
    all_or_none,
    describe,
    key_elsewhere,
    near_miss,
    parameter_elsewhere,
    parameter_names,
    unquoted,
)
from mergepipe.recipes.recipe import EVERY_TENSOR, Case, Cases, Scalar, Setting, value_at
from mergepipe.recipes.yaml_source import KeyPath, Value

FLOAT32_MAX = 3.4028234663852886e38
SMALLEST_PERCENTAGE = 5  # that a share is taken to be written as: published recipes have shares of 1.3, 2 and 3
_WITHOUT_MEANING = (None, False, "false", "False")  # of a parameter that has no effect
CASE_KEYS = ("value", "filter")
TRUE_TEXTS = ("true", "yes", "on", "y", "t", "1")
FALSE_TEXTS = ("false", "no", "off", "n", "f", "0")
BY_NORM_TEXT = "nan"  # the word: a number that is none is refused
LINES_KEY = "lines"

# Stands for a value that was refused, so that it does not also count as missing. It never leaves the loader: a
# refused value is a finding, and a recipe with findings is not built.
REFUSED = nan


def read_parameters(
    reader: DocumentReader, section: Value, key_path: KeyPath, operator: OperatorSpec, scope: Scope
) -> dict[str, Setting]:
    """Check one `parameters:` mapping, of a model or (`Scope.GLOBAL`) of a slice, a module or the whole recipe."""
    entries = reader.mapping(section, key_path)
    if entries is None:
        return {parameter.name: REFUSED for parameter in operator.parameters}
    checked: dict[str, Setting] = {}
    for name, value in entries.items():
        spec, at = operator.parameter(name), (*key_path, name)
        if spec is None:
            _report_unknown(reader, name, at, operator)
        elif spec.ignored:
            if value not in _WITHOUT_MEANING:
                reader.notice("recipe.no-effect", at, f"{name} has no effect here", spec.help)
        elif scope is Scope.MODEL and spec.scope is Scope.GLOBAL:
            message = f"{name} applies to the whole merge: under a model it has no effect"
            place = "of the slice or at the top level" if "slices" in key_path else "at the top level"
            reader.warning("recipe.unclear", at, message, f"under the parameters {place} it is: {spec.help}")
        else:
            checked[name] = _setting(reader, value, at, spec)
    return checked


def _report_unknown(reader: DocumentReader, name: str, at: KeyPath, operator: OperatorSpec) -> None:
    """Report a parameter that the operator does not have: misspelt, of another operator, or of none."""
    message, meaning = f"{operator.name} has no parameter '{shortened(name)}'", ""
    meaning = parameter_elsewhere(name) or key_elsewhere(name)
    own_names = [parameter.name for parameter in operator.parameters]
    real_name = None if meaning else near_miss(name, *own_names) or near_miss(name, *parameter_names())
    if real_name is not None:
        reader.misspelt("recipe.unknown-name", at, message, f"did you mean '{real_name}'?")
    else:
        reader.notice("recipe.no-effect", at, f"{message}: it has no effect", meaning)


def model_values(
    operator: OperatorSpec, chain: Sequence[Mapping[str, Setting]], tensor: str = "", depth: float = 0.0
) -> dict[str, Scalar]:
    """Look up a model's parameters for one tensor: the first value in `chain`, else the default.

    What has neither is left out.
    """
    return _values(operator, Scope.MODEL, chain, tensor, depth)


def global_values(
    operator: OperatorSpec, chain: Sequence[Mapping[str, Setting]], tensor: str = "", depth: float = 0.0
) -> dict[str, Scalar]:
    """Look up the global parameters for one tensor; as `model_values`."""
    return _values(operator, Scope.GLOBAL, chain, tensor, depth)


def missing_values(operator: OperatorSpec, scope: Scope, values: Mapping[str, Scalar]) -> list[ParameterSpec]:
    """List the required parameters of a scope that were not found."""
    return [p for p in _that_matter(operator, scope) if p.required and p.name not in values]


def is_constant(chain: Sequence[Mapping[str, Setting]]) -> bool:
    """Whether no parameter depends on the tensor."""
    return not any(isinstance(setting, Cases) for settings in chain for setting in settings.values())


def _values(
    operator: OperatorSpec, scope: Scope, chain: Sequence[Mapping[str, Setting]], tensor: str, depth: float
) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {}
    for spec in _that_matter(operator, scope):
        settings = (parameters[spec.name] for parameters in chain if spec.name in parameters)
        candidates = (value_at(setting, tensor, depth) for setting in settings)
        value = next((value for value in candidates if value is not None), spec.default)
        if value is not None:
            values[spec.name] = spec.clamped(value)
    return values


def _that_matter(operator: OperatorSpec, scope: Scope) -> list[ParameterSpec]:
    return [p for p in operator.parameters if p.scope is scope and not p.ignored]


def _setting(reader: DocumentReader, value: Value, key_path: KeyPath, spec: ParameterSpec) -> Setting:
    where = reader.source.where(*key_path)
    if isinstance(value, dict) and LINES_KEY not in value:
        case = _case(reader, value, key_path, spec)
        return Cases((case,), where) if case else REFUSED
    kinds = {isinstance(item, dict) for item in value} if isinstance(value, list) else set()
    if isinstance(value, list) and kinds == {True}:
        return _cases(reader, value, key_path, spec)
    if True in kinds:
        message = "needs either values or entries with 'filter' and 'value', found both"
        reader.refuse("recipe.value", key_path, message, "write '- value: ...' for every entry")
        return REFUSED
    values = _over_layers(reader, value, key_path, spec)
    if len(values) == 1:
        return values[0]
    return Cases((Case("", values),), where) if values else REFUSED


def _cases(reader: DocumentReader, entries: Sequence[Value], key_path: KeyPath, spec: ParameterSpec) -> Setting:
    parsed = [
        _case(reader, item, (*key_path, index), spec) for index, item in enumerate(entries) if isinstance(item, dict)
    ]
    if (cases := all_or_none(parsed)) is None:
        return REFUSED
    final = next((index for index, case in enumerate(cases) if case.filter in EVERY_TENSOR), len(cases))
    for index in range(final + 1, len(cases)):
        message = f"is never reached: entry [{final}] before it applies to every tensor"
        reader.notice("recipe.no-effect", (*key_path, index), message, "the entry without filter goes last")
    return Cases(cases, reader.source.where(*key_path))


def _case(reader: DocumentReader, entry: dict[str, Value], key_path: KeyPath, spec: ParameterSpec) -> Case | None:
    reader.unknown_keys(entry, CASE_KEYS, key_path)
    if "value" not in entry:
        hint = "`mergepipe search` tries its values" if "search" in entry else "write 'value: ...'"
        reader.refuse("recipe.incomplete", (*key_path, "value"), "the entry has no value", hint)
        return None
    wanted = "" if entry.get("filter") in (None, "") else reader.text(entry["filter"], (*key_path, "filter"))
    values = _over_layers(reader, entry["value"], (*key_path, "value"), spec)
    return Case(wanted, values) if wanted is not None and values else None


def _over_layers(reader: DocumentReader, value: Value, key_path: KeyPath, spec: ParameterSpec) -> tuple[Scalar, ...]:
    """Parse one value, which holds for all layers, or values spread evenly over them; none if one was refused."""
    if isinstance(value, dict) and LINES_KEY in value:
        return _lines(reader, value, key_path, spec)
    if not isinstance(value, list):
        return (_scalar(reader, value, key_path, spec),)
    if not value:
        message = "a list of values over the layers needs at least 1, found 0"
        reader.refuse("recipe.value", key_path, message, "give values, or one number")
    return tuple(_scalar(reader, item, (*key_path, i), spec) for i, item in enumerate(value))


def _lines(
    reader: DocumentReader, entry: dict[str, Value], key_path: KeyPath, spec: ParameterSpec
) -> tuple[Scalar, ...]:
    """Parse `lines: [a, b]`: from `a` in the first layer to `a + b` in the last, as values over the layers.

    Source: Wang et al. 2024 (LiNeS, arXiv 2410.17146, Eq. 3): `a + b (l - 1) / (L - 1)` in layer `l` of `L`, `a`
    outside the layers.
    """
    reader.refuse_unknown_keys(entry, (LINES_KEY,), key_path)
    ends, at = entry[LINES_KEY], (*key_path, LINES_KEY)
    if spec.is_flag or not isinstance(ends, list) or len(ends) != 2:
        needed = "true or false" if spec.is_flag else "two numbers"
        reader.refuse("recipe.value", at, f"needs {needed}", "[a, b] goes from a in the first layer to a + b")
        return ()
    numbers = [_number(reader, end, (*at, index), replace(spec, low=-inf, high=inf)) for index, end in enumerate(ends)]
    first, rise = map(float, numbers)
    return tuple(_scalar(reader, end, at, spec) for end in (first, first + rise) if end == end)


def _scalar(reader: DocumentReader, entry: Value, key_path: KeyPath, spec: ParameterSpec) -> Scalar:
    return read_flag(reader, entry, key_path) if spec.is_flag else _number(reader, entry, key_path, spec)


def read_flag(reader: DocumentReader, value: Value, key_path: KeyPath) -> Scalar:
    """Return a flag, also as mergekit's examples write it: quoted, or a number; `REFUSED` if it is none."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in (*TRUE_TEXTS, *FALSE_TEXTS):
        return value.lower() in TRUE_TEXTS
    reader.refuse("recipe.value", key_path, f"needs true or false, found {describe(value)}")
    return REFUSED


def _number(reader: DocumentReader, value: Value, key_path: KeyPath, spec: ParameterSpec) -> Scalar:
    if spec.is_weight and value == BY_NORM_TEXT:
        return BY_NORM
    value = unquoted(value)
    if isinstance(value, bool):
        message = f"{describe(value)} is read as {int(value)}"
        reader.warning("recipe.unclear", key_path, message, "as in mergekit; write the number")
        value = int(value)
    if not isinstance(value, int | float):
        reader.refuse("recipe.value", key_path, f"needs a number, found {describe(value)}")
        return REFUSED
    if not isinstance(value, int) and not isfinite(value):
        reader.refuse("recipe.value", key_path, f"needs a finite number, found {describe(value)}")
        return REFUSED
    if spec.is_whole and value != int(value):
        reader.refuse("recipe.value", key_path, f"needs a whole number, found {describe(value)}")
        return REFUSED
    if abs(value) > FLOAT32_MAX:
        reader.refuse("recipe.value", key_path, f"{spec.name} is {describe(value)}, beyond float32")
        return REFUSED
    too_low = value <= spec.low if spec.low_open else value < spec.low
    if not too_low and value <= spec.high:
        return float(value)
    is_percentage = SMALLEST_PERCENTAGE <= value <= 100 and spec.low <= value / 100 <= spec.high <= 1
    if spec.clamps and (reader.findings.strictness.lenient or not is_percentage):
        message = f"{spec.name} is {value:g}, read as {spec.clamped(float(value)):g}"
        reader.warning("recipe.unclear", key_path, message, f"it is in {spec.range_text()}")
        return float(value)
    message = f"{spec.name} is {value:g}, must be in {spec.range_text()}"
    meant = f"did you mean {value / 100:g}?" if is_percentage else ""
    as_mergekit = f"--lenient reads it as {spec.clamped(value):g}, as mergekit does" if spec.clamps else ""
    reader.refuse("recipe.value", key_path, message, "; ".join(filter(None, (meant, as_mergekit))))
    return REFUSED
