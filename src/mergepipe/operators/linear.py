"""Rules with fixed coefficients: linear, task_arithmetic, passthrough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import OperatorInput, Plain, Reduced
from mergepipe.operators.catalogue import OPERATORS
from mergepipe.operators.elementwise import ElementwiseRule, Shares
from mergepipe.operators.spec import OperatorSpec

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

    spec: OperatorSpec = OPERATORS["linear"]

    def block_function(self, given: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        weights_E = given.weights_E()
        total = float(given.anchor["weight"]) + float(weights_E.sum())
        if given.globals["normalize"]:
            coefficients_E = (weights_E / (total or 1.0)).astype(np.float32)
            shares = Shares(weights_E, float(given.anchor["weight"])) if given.renormalize else None
            return ElementwiseRule(coefficients_E, share_of=shares)
        return ElementwiseRule(coefficients_E=weights_E.astype(np.float32), anchor_scale=total)


@dataclass(frozen=True, slots=True)
class TaskArithmetic(Plain):
    """`M_0 + lambda sum_i w_i delta_i`, divided by the sum of weights on request.

    Source: Ilharco et al. 2022 (arXiv 2212.04089).
    """

    spec: OperatorSpec = OPERATORS["task_arithmetic"]

    def block_function(self, given: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return ElementwiseRule(coefficients_E=fixed_coefficients(given))


@dataclass(frozen=True, slots=True)
class Passthrough(Plain):
    """The single model, times `scale`."""

    spec: OperatorSpec = OPERATORS["passthrough"]

    def block_function(self, given: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return ElementwiseRule(
            coefficients_E=np.empty(0, np.float32), anchor_scale=float(given.anchor.get("scale", 1.0))
        )


def fixed_coefficients(given: OperatorInput) -> NDArray[np.float32]:
    """`lambda w_i`, divided by `sum w` when `normalize` is set; worked out in float64, rounded once."""
    weights_E = given.weights_E()
    divisor = nonzero_sum(weights_E) if given.globals["normalize"] else 1.0
    return (weights_E * (float(given.globals["lambda"]) / divisor)).astype(np.float32)
