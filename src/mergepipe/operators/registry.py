"""From an operator's name to the operator itself."""

from __future__ import annotations

from mergepipe.operators.base import Operator
from mergepipe.operators.linear import Linear, Passthrough, TaskArithmetic
from mergepipe.operators.slerp import Slerp
from mergepipe.operators.sparse import DareLinear, DareTies, Ties

_OPERATORS: dict[str, Operator] = {
    operator.spec.name: operator
    for operator in (Linear(), TaskArithmetic(), Ties(), DareLinear(), DareTies(), Slerp(), Passthrough())
}


def operator_named(name: str) -> Operator:
    """The operator of that name.

    Raises:
        KeyError: there is none; recipes are checked against the catalogue before.
    """
    return _OPERATORS[name]
