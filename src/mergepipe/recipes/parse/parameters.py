"""Check a recipe's parameters against the operator's specification, and look them up with defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite, nan

from mergepipe.errors import did_you_mean
from mergepipe.operators.registry import operator_specs
from mergepipe.operators.spec import OperatorSpec, ParameterSpec, Scope
from mergepipe.recipes.parse.fields import DocumentReader, describe
from mergepipe.recipes.parse.parameter_values import EVERY_TENSOR, Case, Cases, Scalar, Setting, value_at
from mergepipe.recipes.parse.yaml_source import KeyPath, Value, shortened

FLOAT32_MAX = 3.4028234663852886e38
CASE_KEYS = ("value", "filter")
_OF_MERGEKITS_PAST = ("embed_slerp",)  # recipes still have it

# Stands for a value that was refused, so that it does not also count as missing. It never leaves the loader: a
# refused value is a finding, and a recipe with findings is not built.
REFUSED = nan


def read_parameters(
    reader: DocumentReader, value: Value, key_path: KeyPath, operator: OperatorSpec, scope: Scope
) -> dict[str, Setting]:
    """Check one `parameters:` mapping, of a model or (`Scope.GLOBAL`) of a slice, a module or the whole recipe."""
    checked: dict[str, Setting] = {}
    for name, given in (reader.mapping(value, key_path) or {}).items():
        spec = operator.parameter(name)
        if spec is None:
            message = f"{operator.name} has no parameter '{shortened(name)}'"
            reader.refuse("recipe.unknown-parameter", (*key_path, name), message, _instead_of(name, operator))
        elif scope is Scope.MODEL and spec.scope is Scope.GLOBAL:
            message = f"{name} holds for the whole merge"
            hint = "move it to the parameters at the top level" + (" or of the slice" if "slices" in key_path else "")
            reader.refuse("recipe.parameter.scope", (*key_path, name), message, hint)
        else:
            checked[name] = _setting(reader, given, (*key_path, name), operator, spec)
    return checked


def _instead_of(name: str, operator: OperatorSpec) -> Callable[[], str]:
    """Suggest a fix for a parameter that the operator does not have; mergekit ignores those silently."""
    of_others = any(spec.parameter(name) for spec in operator_specs().values())
    if of_others or name in _OF_MERGEKITS_PAST:
        return lambda: "mergekit ignores it here: remove it"
    return partial(did_you_mean, shortened(name), [parameter.name for parameter in operator.parameters])


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


def missing_values(operator: OperatorSpec, scope: Scope, found: Mapping[str, Scalar]) -> list[ParameterSpec]:
    """List the required parameters of a scope that were not found."""
    return [p for p in _that_matter(operator, scope) if p.required and p.name not in found]


def is_constant(chain: Sequence[Mapping[str, Setting]]) -> bool:
    """Whether no parameter depends on the tensor."""
    return not any(isinstance(setting, Cases) for settings in chain for setting in settings.values())


def _values(
    operator: OperatorSpec, scope: Scope, chain: Sequence[Mapping[str, Setting]], tensor: str, depth: float
) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for spec in _that_matter(operator, scope):
        settings = (each[spec.name] for each in chain if spec.name in each)
        values = (value_at(setting, tensor, depth) for setting in settings)
        value = next((value for value in values if value is not None), spec.default)
        if value is not None:
            found[spec.name] = value
    return found


def _that_matter(operator: OperatorSpec, scope: Scope) -> list[ParameterSpec]:
    return [p for p in operator.parameters if p.scope is scope and not p.ignored]


def _setting(
    reader: DocumentReader, given: Value, key_path: KeyPath, operator: OperatorSpec, spec: ParameterSpec
) -> Setting:
    where = reader.source.where(*key_path)
    if isinstance(given, dict):
        case = _case(reader, given, key_path, operator, spec)
        return Cases((case,), where) if case else REFUSED
    if not isinstance(given, list):
        return _scalar(reader, given, key_path, operator, spec)
    if given and all(isinstance(item, dict) for item in given):
        return _cases(reader, given, key_path, operator, spec)
    if any(isinstance(item, dict) for item in given):
        message = "needs either values or entries with 'filter' and 'value', found both"
        reader.refuse("recipe.parameter.mixed", key_path, message, "write '- value: ...' for every entry")
        return REFUSED
    values = _gradient(reader, given, key_path, operator, spec)
    return Cases((Case("", values),), where) if values else REFUSED


def _cases(
    reader: DocumentReader, given: Sequence[Value], key_path: KeyPath, operator: OperatorSpec, spec: ParameterSpec
) -> Setting:
    read = [
        _case(reader, item, (*key_path, index), operator, spec)
        for index, item in enumerate(given)
        if isinstance(item, dict)
    ]
    cases = tuple(case for case in read if case is not None)
    if len(cases) < len(read):
        return REFUSED
    final = next((index for index, case in enumerate(cases) if case.filter in EVERY_TENSOR), len(cases))
    for index in range(final + 1, len(cases)):
        message = f"is never reached: entry [{final}] before it holds for every tensor"
        reader.refuse("recipe.filter.unreachable", (*key_path, index), message, "put the entry without filter last")
    return Cases(cases, reader.source.where(*key_path))


def _case(
    reader: DocumentReader, given: dict[str, Value], key_path: KeyPath, operator: OperatorSpec, spec: ParameterSpec
) -> Case | None:
    reader.unknown_keys(given, CASE_KEYS, key_path)
    if "value" not in given:
        reader.refuse("recipe.missing-key", (*key_path, "value"), "the entry has no value", "write 'value: ...'")
        return None
    wanted = "" if given.get("filter") is None else reader.text(given["filter"], (*key_path, "filter"))
    value, at = given["value"], (*key_path, "value")
    if isinstance(value, list):
        values = _gradient(reader, value, at, operator, spec)
    else:
        values = (_scalar(reader, value, at, operator, spec),)
    is_sound = wanted is not None and values and given.keys() <= set(CASE_KEYS)
    return Case(wanted, values) if is_sound and wanted is not None else None


def _gradient(
    reader: DocumentReader, given: Sequence[Value], key_path: KeyPath, operator: OperatorSpec, spec: ParameterSpec
) -> tuple[Scalar, ...]:
    """Parse values spread evenly over the layers; none if one was refused."""
    if len(given) < 2:
        hint = f"write the {'flag' if spec.is_flag else 'number'} itself" if given else "give values, or one number"
        message = f"a list of values over the layers needs at least 2, found {len(given)}"
        reader.refuse("recipe.gradient.length", key_path, message, hint)
        return ()
    return tuple(_scalar(reader, item, (*key_path, i), operator, spec) for i, item in enumerate(given))


def _scalar(
    reader: DocumentReader, given: Value, key_path: KeyPath, operator: OperatorSpec, spec: ParameterSpec
) -> Scalar:
    value = _flag(reader, given, key_path) if spec.is_flag else _number(reader, given, key_path, spec)
    if spec.only_default and value == value and value != spec.default:  # REFUSED is not itself
        reader.unsupported(
            key_path,
            f"{spec.name}: {_text(value)} is",
            f"{operator.name} knows only {spec.name}: {_text(spec.default)}",
        )
        return REFUSED
    return value


def _text(value: Scalar | None) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flag(reader: DocumentReader, given: Value, key_path: KeyPath) -> Scalar:
    if isinstance(given, bool):
        return given
    if isinstance(given, int | float) and given in (0, 1):  # as mergekit's own examples write it
        return bool(given)
    hint = "drop the quotes" if isinstance(given, str) and given.strip().lower() in ("true", "false") else ""
    reader.refuse("recipe.parameter.type", key_path, f"needs true or false, found {describe(given)}", hint)
    return REFUSED


def _number(reader: DocumentReader, given: Value, key_path: KeyPath, spec: ParameterSpec) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        hint = "drop the quotes" if isinstance(given, str) and _is_number(given) else ""
        reader.refuse("recipe.parameter.type", key_path, f"needs a number, found {describe(given)}", hint)
        return REFUSED
    if not isinstance(given, int) and not isfinite(given):
        reader.refuse("recipe.parameter.not-finite", key_path, f"needs a finite number, found {describe(given)}")
        return REFUSED
    if spec.is_whole and given != int(given):
        reader.refuse("recipe.parameter.type", key_path, f"needs a whole number, found {describe(given)}")
        return REFUSED
    if abs(given) > FLOAT32_MAX:
        reader.refuse("recipe.parameter.range", key_path, f"{spec.name} is {describe(given)}, beyond float32")
        return REFUSED
    too_low = given <= spec.low if spec.low_open else given < spec.low
    if too_low or given > spec.high:
        message = f"{spec.name} is {given:g}, must be in {spec.range_text()}"
        reader.refuse("recipe.parameter.range", key_path, message)
        return REFUSED
    return float(given)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
