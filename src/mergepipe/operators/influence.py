"""Describe the share of an expert's delta that an operator passes on, for planning without running it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Products = NDArray[np.float64]
"""Per expert <base, base>, <delta, delta>, <base, delta> of one tensor; see `base.Reduced.products_E3`."""


@dataclass(frozen=True, slots=True, eq=False)
class Influence:
    """The effect of one expert's delta on the result of one tensor.

    Attributes:
        coefficients_E: signed factor on what is left of the delta (float64 values of the float32 in force).
        energy_factor_E: expected share of ||delta||^2 that random dropping and rescaling leaves; 1 without them.
        trims: only elements at or above the tensor's magnitude cut take part.
        renormalizes: the coefficients are divided by a sum of weights, which can be that of what was read only.
        is_known: False where the operator says nothing: an expert's tensor is then read whole or not at all.
    """

    coefficients_E: NDArray[np.float64]
    energy_factor_E: NDArray[np.float64]
    trims: bool = False
    renormalizes: bool = False
    is_known: bool = True


def equal_influence(n_experts: int) -> Influence:
    """Every delta counts as much as its norm: for operators that omit blocks soundly but have no fixed coefficients."""
    ones_E = np.ones(n_experts)
    return Influence(ones_E, ones_E.copy())


def equal_shares(n_experts: int) -> Influence:
    """Every expert has the same share of the result."""
    share_E = np.full(n_experts, 1.0 / max(1, n_experts))
    return Influence(share_E, np.ones_like(share_E))


def unknown_influence(n_experts: int) -> Influence:
    """Return the influence of an operator that does not state the effect of a part of a delta: plan whole tensors."""
    ones_E = np.ones(n_experts)
    return Influence(ones_E, ones_E.copy(), is_known=False)
