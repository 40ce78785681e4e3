"""The rule that copies a single model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mergepipe.operators.base import Operator, OperatorInput, Plain, Reduced
from mergepipe.operators.elementwise import ElementwiseRule
from mergepipe.operators.influence import Influence, Products
from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec, Scope


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


OPERATORS: tuple[Operator, ...] = (Passthrough(),)
