"""Rules that are fixed coefficients once the inner products of the models are known: the linear algebra they share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import BlockFunction, OperatorInput, Reduced
from mergepipe.operators.rules.by_row import ColumnRule, RowRule
from mergepipe.operators.rules.elementwise import ElementwiseRule

Coefficients = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The vectors a rule combines, written in the base and the deltas.

    `vectors_PF`: one row per vector (P), its share of the base (0) and of each delta. `origin`: 1 where the result is
    relative to the base, which then has no part itself. `gram_GPP`: the vectors' inner products, by row or column (G).
    """

    vectors_PF: NDArray[np.float64]
    origin: float
    gram_GPP: NDArray[np.float64]

    @np.errstate(all="ignore")
    def scales(self, coefficients_GP: Coefficients) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Factors of the deltas (E, G), and of the base (G), for given coefficients of the vectors."""
        shares_GF = coefficients_GP @ self.vectors_PF
        anchor_G = (self.origin + shares_GF[:, 0]).astype(np.float32)
        return np.ascontiguousarray(shares_GF[:, 1:].T, np.float32), anchor_G

    @np.errstate(all="ignore")
    def whole(self, coefficients_P: Coefficients) -> ElementwiseRule:
        """The rule with one set of coefficients for the whole tensor; a block without any delta is the base."""
        coefficients_EG, _ = self.scales(coefficients_P[None])
        anchor = self.origin + float((coefficients_P @ self.vectors_PF)[0])
        return ElementwiseRule(coefficients_EG[:, 0], anchor_scale=anchor, unread_scale=1.0)

    def by_row(self, coefficients_GP: Coefficients, row_elements: int) -> BlockFunction:
        """The rule with coefficients by row."""
        return RowRule(row_elements, *self.scales(coefficients_GP))

    def by_column(self, coefficients_GP: Coefficients) -> BlockFunction:
        """The rule with coefficients by column."""
        return ColumnRule(*self.scales(coefficients_GP))


@np.errstate(all="ignore")
def frame_of(inputs: OperatorInput, reduced: Reduced, *, is_origin: bool) -> Frame:
    """The frame of the deltas alone (`is_origin`), or of the anchor and the experts."""
    n_experts = len(inputs.experts)
    gram_GFF = _gram(reduced, n_experts)
    vectors_PF = np.eye(n_experts + 1)
    if is_origin:
        vectors_PF = vectors_PF[1:]
    else:
        vectors_PF[:, 0] = 1.0
    gram_GPP = vectors_PF @ gram_GFF @ vectors_PF.T
    return Frame(vectors_PF, 1.0 if is_origin else 0.0, gram_GPP)


def _gram(reduced: Reduced, n_experts: int) -> NDArray[np.float64]:
    if reduced.gram_GFF is not None:
        return reduced.gram_GFF
    if reduced.products_E3 is None or n_experts != 1:
        raise ValueError("inner products are needed")
    base_base, delta_delta, base_delta = reduced.products_E3[0]
    return np.array([[[base_base, base_delta], [base_delta, delta_delta]]], np.float64)


def lengths(gram_GPP: NDArray[np.float64]) -> NDArray[np.float64]:
    """The vectors' lengths (G, P)."""
    return np.sqrt(np.maximum(0.0, np.diagonal(gram_GPP, axis1=1, axis2=2)))
