"""From an operator's name to the operator itself."""

from __future__ import annotations

from mergepipe.operators.base import Operator
from mergepipe.operators.linear import Linear, Passthrough, TaskArithmetic
from mergepipe.operators.ranked import Della, DellaLinear
from mergepipe.operators.selecting import ArceeFusion, NearSwap, Ram, RamPlus, Sce
from mergepipe.operators.slerp import Slerp
from mergepipe.operators.sparse import Breadcrumbs, BreadcrumbsTies, DareLinear, DareTies, Ties
from mergepipe.operators.spherical import Karcher, ModelStock, MultiSlerp, NuSlerp

_BUILT_IN: tuple[Operator, ...] = (
    Linear(), TaskArithmetic(), Passthrough(), Ties(), DareLinear(), DareTies(), Breadcrumbs(), BreadcrumbsTies(),
    Della(), DellaLinear(), Slerp(), NuSlerp(), MultiSlerp(), Karcher(), ModelStock(), Sce(), Ram(), RamPlus(),
    NearSwap(), ArceeFusion(),
)  # fmt: skip
_OPERATORS: dict[str, Operator] = {operator.spec.name: operator for operator in _BUILT_IN}


def has_operator(name: str) -> bool:
    """Whether there is an operator of that name."""
    return name in _OPERATORS


def register(operator: Operator) -> None:
    """Add an operator, or put another one in the place of the one of that name."""
    _OPERATORS[operator.spec.name] = operator


def operator_named(name: str) -> Operator:
    """The operator of that name.

    Raises:
        KeyError: there is none; recipes are checked against the catalogue before.
    """
    return _OPERATORS[name]
