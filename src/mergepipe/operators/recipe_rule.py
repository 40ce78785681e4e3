"""What recipes may ask of any rule: weights that follow from norms, and a spectral step after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mergepipe.operators.base import (
    NOTHING_REDUCED,
    BlockFunction,
    CalibratedDelta,
    Influence,
    InnerProducts,
    Operator,
    OperatorInput,
    Products,
    Reduced,
    ReductionRequest,
)
from mergepipe.operators.spec import BY_NORM, ISOTROPIC, SVC, OperatorSpec
from mergepipe.operators.spectral import add_delta


@dataclass(frozen=True, slots=True)
class RecipeRule:
    """Any rule as recipes use it: weights may be `nan`, which is `1 / ||delta_i||` over the sum of these, by tensor.

    A spectral step may follow, see `operators.spectral.calibrate`.
    Source: Si et al. 2025 (NAN, arXiv 2505.16148): coefficients by the inverse of the norm. A delta that is zero has
    weight 0; where all are, the weights are equal. Weights that are numbers stay as they are.
    """

    operator: Operator

    @property
    def spec(self) -> OperatorSpec:
        return self.operator.spec

    @property
    def is_random(self) -> bool:
        return self.operator.is_random

    def granularity(self, inputs: OperatorInput) -> int:
        return self.operator.granularity(inputs)

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        if reduced.products_E3 is None and any(p.get("weight") is BY_NORM for p in inputs.experts):
            return InnerProducts()
        weighed = _weighed(inputs, reduced.products_E3)
        request = self.operator.reduction(weighed, reduced)
        if request is None and reduced.delta_N is None and is_calibrated(inputs):
            return CalibratedDelta(self.operator, weighed, reduced)
        return request

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        influence = self.operator.influence(_weighed(inputs, products_E3), products_E3)
        norms_are_open = products_E3 is None and any(p.get("weight") is BY_NORM for p in inputs.experts)
        if is_calibrated(inputs) or norms_are_open:
            return replace(influence, is_additive=False)
        return influence

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> BlockFunction:
        if reduced.delta_N is not None:
            return add_delta(reduced.delta_N)
        return self.operator.block_function(_weighed(inputs, reduced.products_E3), reduced)


def is_calibrated(inputs: OperatorInput) -> bool:
    """Whether a spectral step follows: the tensor is a matrix, and the recipe asks for it."""
    wants = inputs.globals.get(SVC) or inputs.globals.get(ISOTROPIC)
    return bool(wants) and len(inputs.shape) == 2 and min(inputs.shape) > 1


def _weighed(inputs: OperatorInput, products_E3: Products | None) -> OperatorInput:
    """Put numbers in the place of weights by norm: equal ones where no norms are known."""
    by_norm_E = np.array([p.get("weight") is BY_NORM for p in inputs.experts], np.bool_)
    if not by_norm_E.any():
        return inputs
    inverse_E = by_norm_E.astype(np.float64)
    if products_E3 is not None and len(products_E3) == len(by_norm_E):
        norms_E = np.sqrt(products_E3[:, 1])
        with np.errstate(divide="ignore"):
            inverse_E = np.where(by_norm_E & (norms_E > 0.0), 1.0 / norms_E, 0.0)
        inverse_E = inverse_E if inverse_E.any() else by_norm_E.astype(np.float64)
    weights_E = (inverse_E / inverse_E.sum()).tolist()
    pairs = zip(inputs.experts, by_norm_E, weights_E, strict=True)
    return replace(inputs, experts=tuple({**p, "weight": w} if by_norm else p for p, by_norm, w in pairs))
