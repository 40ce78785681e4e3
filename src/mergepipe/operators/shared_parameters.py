"""Parameters that several families of operators have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec, Scope

WEIGHT = ParameterSpec("weight", Scope.MODEL, "coefficient of this model", required=True)
DENSITY = ParameterSpec(
    "density", Scope.MODEL, "share of the delta's elements that is kept", default=1.0, low=0.0, high=1.0, clamps=True
)
INT8_MASK = ParameterSpec(
    "int8_mask",
    Scope.GLOBAL,
    "in mergekit masks are stored in 8 bits, to save memory",
    default=False,
    is_flag=True,
    ignored=True,
)
_LAMBDA = ParameterSpec("lambda", Scope.GLOBAL, "scale of the merged delta", default=1.0)


def normalize_flag(default: bool) -> ParameterSpec:
    """The flag that divides by the sum of weights."""
    return ParameterSpec("normalize", Scope.GLOBAL, "divide by the sum of weights", default=default, is_flag=True)


def rescale_to_magnitudes(default: bool) -> ParameterSpec:
    """The flag that keeps the sum of magnitudes when elements are dropped."""
    text = "multiply what is kept so that the sum of magnitudes stays"
    return ParameterSpec("rescale", Scope.GLOBAL, text, default=default, is_flag=True)


def delta_spec(
    name: str,
    title: str,
    source: str,
    *special: ParameterSpec,
    normalize: bool,
    rescale: ParameterSpec,
    conflict: Callable[[Mapping[str, float | bool]], str] | None = None,
) -> OperatorSpec:
    """The spec of a rule that weighs and adds deltas: `special` parameters, and those that all such rules share."""
    shared = (normalize_flag(normalize), rescale, _LAMBDA, INT8_MASK)
    return OperatorSpec(
        name, title, source, BaseRole.REQUIRED, (WEIGHT, *special, *shared), min_experts=0, conflict=conflict
    )
