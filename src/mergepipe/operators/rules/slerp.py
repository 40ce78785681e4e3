"""Spherical interpolation of two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mergepipe.operators.base import (
    NOTHING_REDUCED,
    InnerProducts,
    Operator,
    OperatorInput,
    Plain,
    Reduced,
    ReductionRequest,
)
from mergepipe.operators.influence import Influence, Products
from mergepipe.operators.rules.elementwise import ElementwiseRule
from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec, Scope

COLLINEAR_COSINE = 0.9995
SMALLEST_NORM = 1e-8


@dataclass(frozen=True, slots=True)
class Slerp(Plain):
    """`s_0 M_0 + s_1 M_1` on the great circle through the two flattened tensors; linear where they are collinear.

    Source: Shoemake 1985, "Animating rotation with quaternion curves"; thresholds as mergekit documents them.
    """

    spec: ClassVar[OperatorSpec] = OperatorSpec(
        "slerp",
        "spherical interpolation of two models",
        "Shoemake 1985; mergekit's documented parameters",
        BaseRole.REQUIRED,
        (ParameterSpec("t", Scope.GLOBAL, "0 is the base, 1 the other model", required=True),),
        max_experts=1,
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """The other model's share on the great circle, or on the straight line where the angle is not known."""
        share_E = np.array([float(inputs.globals["t"])])
        if products_E3 is not None:
            rule = self.block_function(inputs, Reduced(products_E3=products_E3))
            share_E = rule.coefficients_E.astype(np.float64)
        return Influence(share_E, np.ones(1))

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        return InnerProducts() if reduced.products_E3 is None else None

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        if reduced.products_E3 is None:
            raise ValueError("slerp needs inner products")
        base_base, delta_delta, base_delta = (float(x) for x in reduced.products_E3[0])
        other_other = max(0.0, base_base + 2.0 * base_delta + delta_delta)
        base_share, other_share = slerp_shares(
            float(inputs.globals["t"]), base_base, other_other, base_base + base_delta
        )
        return ElementwiseRule(
            coefficients_E=np.array([other_share], np.float32),
            anchor_scale=base_share + other_share,
            unread_scale=1.0,
        )


def slerp_shares(t: float, base_base: float, other_other: float, base_other: float) -> tuple[float, float]:
    """Factors of the two models at `t`, from their inner products; sums to one in the collinear case.

    A norm up to 1e-8 is not divided by, as in mergekit, so that two zero tensors interpolate linearly or vanish
    without a division by zero.
    """
    base_norm, other_norm = math.sqrt(base_base), math.sqrt(other_other)
    cosine = base_other
    cosine /= base_norm if base_norm > SMALLEST_NORM else 1.0
    cosine /= other_norm if other_norm > SMALLEST_NORM else 1.0
    if not abs(cosine) <= COLLINEAR_COSINE:
        return 1.0 - t, t
    angle = math.acos(cosine)
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


OPERATORS: tuple[Operator, ...] = (Slerp(),)
