"""Rules with fixed coefficients: linear, task_arithmetic, passthrough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import Influence, Operator, OperatorInput, Plain, Products, Reduced
from mergepipe.operators.elementwise import ElementwiseRule, Shares
from mergepipe.operators.spec import WEIGHT, BaseRole, OperatorSpec, ParameterSpec, Scope, normalize_flag

SMALLEST_SUM = 1e-8


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
        coefficients_E = self.block_function(inputs, Reduced()).coefficients_E.astype(np.float64)
        return Influence(coefficients_E, np.ones_like(coefficients_E), renormalizes=bool(inputs.globals["normalize"]))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        weights_E = inputs.weights_E()
        total = float(inputs.anchor["weight"]) + float(weights_E.sum())
        if inputs.globals["normalize"]:
            coefficients_E = (weights_E / (total or 1.0)).astype(np.float32)
            shares = Shares(weights_E, float(inputs.anchor["weight"])) if inputs.renormalize else None
            return ElementwiseRule(coefficients_E, share_of=shares)
        return ElementwiseRule(coefficients_E=weights_E.astype(np.float32), anchor_scale=total)


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
        return ElementwiseRule(np.empty(0, np.float32), anchor_scale=float(inputs.anchor.get("scale", 1.0)))


OPERATORS: tuple[Operator, ...] = (Linear(),)
COPIES: tuple[Operator, ...] = (Passthrough(),)
