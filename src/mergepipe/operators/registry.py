"""The operators that recipes can name. A family of operators is registered here by one line; importing it loads no
compiled code."""

from __future__ import annotations

from collections.abc import Iterable

from mergepipe.errors import UnsupportedError
from mergepipe.operators import selective, sparse, spherical, weighted
from mergepipe.operators.base import Operator
from mergepipe.operators.recipe_rule import RecipeRule
from mergepipe.operators.spec import OperatorSpec

_FAMILIES: tuple[Iterable[Operator], ...] = (
    weighted.AVERAGES,
    sparse.OPERATORS,
    spherical.OPERATORS,
    selective.OPERATORS,
    weighted.OPERATORS,
    weighted.COPIES,
)
COPY: Operator = weighted.COPIES[0]
"""The operator that changes nothing: what else makes tensors, such as a mixture of experts, is run by it."""
_BUILT_IN: dict[str, Operator] = {operator.spec.name: operator for family in _FAMILIES for operator in family}
_OPERATORS: dict[str, Operator] = dict(_BUILT_IN)


def operator_specs() -> dict[str, OperatorSpec]:
    """The specs of all operators by name, in the order in which they are listed."""
    return {name: operator.spec for name, operator in _OPERATORS.items()}


def has_operator(name: str) -> bool:
    """Whether there is an operator of that name."""
    return name in _OPERATORS


def operator_named(name: str) -> Operator:
    """The operator of that name, as recipes use it."""
    return RecipeRule(_OPERATORS[name])


def add_operator(operator: Operator) -> None:
    """Let recipes name an operator."""
    name = operator.spec.name
    if has_operator(name):
        message = "there is a merge method of that name already"
        raise UnsupportedError.of("operator.unsupported", name, message, "choose another name")
    if not callable(getattr(operator, "influence", None)):
        message = "the operator has no method `influence`, which says what a planner may know"
        raise UnsupportedError.of("operator.unsupported", name, message, "return unknown_influence(n_experts) from it")
    _OPERATORS[name] = operator


def remove_operator(name: str) -> None:
    """Take out an operator that was added; those of MergePipe itself stay."""
    if name in _BUILT_IN:
        raise KeyError(name)
    del _OPERATORS[name]
