"""Rules with fixed coefficients: linear, task_arithmetic, passthrough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import Influence, Operator, OperatorInput, Plain, Products, Reduced
from mergepipe.operators.elementwise import ElementwiseRule, Shares
from mergepipe.operators.spec import WEIGHT, BaseRole, OperatorSpec, ParameterSpec, Scope, delta_spec, normalize_flag

SMALLEST_SUM = 1e-8
_NO_RESCALE = ParameterSpec(
    "rescale",
    Scope.GLOBAL,
    "nothing is trimmed, so that nothing is rescaled",
    default=False,
    is_flag=True,
    ignored=True,
)


def nonzero_sum(weights_E: NDArray[np.float64]) -> float:
    """The sum of the weights, or 1 where it is next to zero: a divisor."""
    total = float(weights_E.sum())
    return total if abs(total) >= SMALLEST_SUM else 1.0


@dataclass(frozen=True, slots=True)
class Linear(Plain):
    """`sum_i w_i M_i`, weights normalised by default, written around the anchor: `(sum w) M_0 + sum_i w_i delta_i`.

    Source: Wortsman et al. 2022 (arXiv 2203.05482). The anchored form is what lets an omitted delta be a zero.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "linear",
        "weighted average",
        "Wortsman et al. 2022, arXiv 2203.05482",
        BaseRole.OPTIONAL,
        (WEIGHT, normalize_flag(True)),
        min_experts=0,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        weights_E = inputs.weights_E()
        anchor = float(inputs.anchor["weight"])
        ones_E, normalizes = np.ones_like(weights_E), bool(inputs.globals["normalize"])
        total = (anchor + float(weights_E.sum())) if normalizes else 1.0
        return Influence(_in_force(weights_E / (total or 1.0)), ones_E, renormalizes=normalizes)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        weights_E = inputs.weights_E()
        total = float(inputs.anchor["weight"]) + float(weights_E.sum())
        if inputs.globals["normalize"]:
            coefficients_E = (weights_E / (total or 1.0)).astype(np.float32)
            shares = Shares(weights_E, float(inputs.anchor["weight"])) if inputs.renormalize else None
            return ElementwiseRule(coefficients_E, share_of=shares)
        return ElementwiseRule(coefficients_E=weights_E.astype(np.float32), anchor_scale=total)


@dataclass(frozen=True, slots=True)
class TaskArithmetic(Plain):
    """`M_0 + lambda sum_i w_i delta_i`, divided by the sum of weights on request.

    Source: Ilharco et al. 2022 (arXiv 2212.04089).
    """

    spec: ClassVar[OperatorSpec] = delta_spec(
        "task_arithmetic",
        "sum of task vectors",
        "Ilharco et al. 2022, arXiv 2212.04089",
        normalize=False,
        rescale=_NO_RESCALE,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        coefficients_E = fixed_coefficients(inputs).astype(np.float64)
        return Influence(coefficients_E, np.ones_like(coefficients_E))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return ElementwiseRule(coefficients_E=fixed_coefficients(inputs))


def fixed_coefficients(inputs: OperatorInput) -> NDArray[np.float32]:
    """`lambda w_i`, divided by `sum w` when `normalize` is set; worked out in float64, rounded once."""
    weights_E = inputs.weights_E()
    divisor = nonzero_sum(weights_E) if inputs.globals["normalize"] else 1.0
    return (weights_E * (float(inputs.globals["lambda"]) / divisor)).astype(np.float32)


def _in_force(coefficients_E: NDArray[np.float64]) -> NDArray[np.float64]:
    return coefficients_E.astype(np.float32).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Passthrough(Plain):
    """The single model, times `scale`."""

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "passthrough",
        "copy of one model",
        "mergekit's documented parameters",
        BaseRole.NONE,
        (ParameterSpec("scale", Scope.MODEL, "factor on every tensor", default=1.0),),
        min_experts=0,
        max_experts=0,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        return Influence(np.empty(0), np.empty(0))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return ElementwiseRule(
            coefficients_E=np.empty(0, np.float32), anchor_scale=float(inputs.anchor.get("scale", 1.0))
        )


OPERATORS: tuple[Operator, ...] = (Linear(), TaskArithmetic())
COPIES: tuple[Operator, ...] = (Passthrough(),)
