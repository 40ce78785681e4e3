"""Parameter values of a recipe: checked against the operator's specification, and looked up with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isfinite, nan

from mergepipe.errors import did_you_mean
from mergepipe.operators.spec import OperatorSpec, ParameterSpec, Scope
from mergepipe.recipe.model import Scalar
from mergepipe.recipe.reading import Reading, describe
from mergepipe.recipe.yaml_source import KeyPath, Value, shortened

FLOAT32_MAX = 3.4028234663852886e38

# Stands for a value that was refused, so that it does not also count as missing. It never leaves the loader: a
# refused value is a finding, and a recipe with findings is not built.
REFUSED = nan


def read_parameters(
    reading: Reading, value: Value, key_path: KeyPath, operator: OperatorSpec, scope: Scope
) -> dict[str, Scalar]:
    """Check one `parameters:` mapping, of a model or (`Scope.GLOBAL`) of the whole recipe."""
    checked: dict[str, Scalar] = {}
    for name, given in (reading.mapping(value, key_path) or {}).items():
        spec = operator.parameter(name)
        if spec is None:
            known = [p.name for p in operator.parameters]
            message = f"{operator.name} has no parameter '{shortened(name)}'"
            nearest = partial(did_you_mean, shortened(name), known)
            reading.refuse("recipe.unknown-parameter", (*key_path, name), message, nearest)
        elif scope is Scope.MODEL and spec.scope is Scope.GLOBAL:
            message, hint = f"{name} holds for the whole merge", "move it to the parameters at the top level"
            reading.refuse("recipe.parameter.scope", (*key_path, name), message, hint)
        else:
            checked[name] = _scalar(reading, given, (*key_path, name), operator, spec)
    return checked


def model_values(operator: OperatorSpec, own: Mapping[str, Scalar], shared: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Look up a model's parameters: its own value, else the recipe's global one, else the default; else left out."""
    found = {p.name: own.get(p.name, shared.get(p.name, p.default)) for p in _that_matter(operator, Scope.MODEL)}
    return {name: value for name, value in found.items() if value is not None}


def global_values(operator: OperatorSpec, shared: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Look up the parameters of the whole merge: the recipe's value, else the default; else left out."""
    found = {p.name: shared.get(p.name, p.default) for p in _that_matter(operator, Scope.GLOBAL)}
    return {name: value for name, value in found.items() if value is not None}


def _that_matter(operator: OperatorSpec, scope: Scope) -> list[ParameterSpec]:
    return [p for p in operator.parameters if p.scope is scope and not p.ignored]


def _scalar(reading: Reading, given: Value, key_path: KeyPath, operator: OperatorSpec, spec: ParameterSpec) -> Scalar:
    if isinstance(given, list):
        what = "a list of values (a gradient over layers, or filters) is"
        reading.unsupported(key_path, what, f"give one {'flag' if spec.is_flag else 'number'}")
        return REFUSED
    if isinstance(given, dict):
        reading.unsupported(key_path, "a value with filters is", "give the value itself")
        return REFUSED
    value = _flag(reading, given, key_path) if spec.is_flag else _number(reading, given, key_path, spec)
    if spec.only_default and value is not REFUSED and value != spec.default:
        reading.unsupported(
            key_path,
            f"{spec.name}: {_text(value)} is",
            f"{operator.name} knows only {spec.name}: {_text(spec.default)}",
        )
        return REFUSED
    return value


def _text(value: Scalar | None) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flag(reading: Reading, given: Value, key_path: KeyPath) -> Scalar:
    if isinstance(given, bool):
        return given
    hint = "drop the quotes" if isinstance(given, str) and given.strip().lower() in ("true", "false") else ""
    reading.refuse("recipe.parameter.type", key_path, f"needs true or false, found {describe(given)}", hint)
    return REFUSED


def _number(reading: Reading, given: Value, key_path: KeyPath, spec: ParameterSpec) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        hint = "drop the quotes" if isinstance(given, str) and _is_number(given) else ""
        reading.refuse("recipe.parameter.type", key_path, f"needs a number, found {describe(given)}", hint)
        return REFUSED
    if not isinstance(given, int) and not isfinite(given):
        reading.refuse("recipe.parameter.not-finite", key_path, f"needs a finite number, found {describe(given)}")
        return REFUSED
    if abs(given) > FLOAT32_MAX:
        reading.refuse("recipe.parameter.range", key_path, f"{spec.name} is {describe(given)}, beyond float32")
        return REFUSED
    too_low = given <= spec.low if spec.low_open else given < spec.low
    if too_low or given > spec.high:
        message = f"{spec.name} is {given:g}, must be in {spec.range_text()}"
        reading.refuse("recipe.parameter.range", key_path, message)
        return REFUSED
    return float(given)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
