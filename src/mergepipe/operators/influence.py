"""How much of an expert's delta an operator lets through: what a planner may know of a rule without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import OperatorInput, Reduced
from mergepipe.operators.linear import fixed_coefficients, nonzero_sum
from mergepipe.operators.slerp import Slerp
from mergepipe.operators.sparse import densities_E


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """Weights that are divided by their sum: the experts' and the anchor's."""

    weights_E: NDArray[np.float64]
    anchor_weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Election:
    """How deltas are kept and who is heard: what an expectation of a consensus needs to know.

    Attributes:
        weight_E: the experts' weights.
        share_E: the share of elements that is kept of each.
        tail_E: the share of the largest from which those are; 1 where they are kept at random.
        normalize: the mean of those that agree, not the sum.
        scale: factor on the result.
    """

    weight_E: NDArray[np.float64]
    share_E: NDArray[np.float64]
    tail_E: NDArray[np.float64]
    normalize: bool
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Influence:
    """What one expert's delta becomes in the result of one tensor.

    Attributes:
        coefficients_E: signed factor on what is left of the delta (float64 values of the float32 in force).
        energy_factor_E: expected share of ||delta||^2 that random dropping and rescaling leaves; 1 without them.
        trims: only elements at or above the tensor's magnitude cut take part.
        is_additive: the result is `anchor_scale M_0 + sum_i coefficients_i delta_i` exactly, so that the norm of what
            is left out bounds the error.
        anchor_scale: see `is_additive`.
        average: set where the coefficients are normalised over the anchor too, and can be over what was read only.
        election: set where elements of the elected sign only are heard.
    """

    coefficients_E: NDArray[np.float64]
    energy_factor_E: NDArray[np.float64]
    trims: bool = False
    is_additive: bool = False
    anchor_scale: float = 1.0
    average: Average | None = None
    election: Election | None = None


Products = NDArray[np.float64]


def influence_of(operator: str, given: OperatorInput, products_E3: Products | None) -> Influence:
    """The influence of the operator of that name; `products_E3` as in `Reduced`, or None where they are not known."""
    return _slerp(given, products_E3) if operator == "slerp" else _INFLUENCES.get(operator, _as_they_are)(given)


def _linear(given: OperatorInput) -> Influence:
    weights_E = given.weights_E()
    anchor = float(given.anchor["weight"])
    total = anchor + float(weights_E.sum())
    ones_E = np.ones_like(weights_E)
    if not given.globals["normalize"]:
        return Influence(_in_force(weights_E), ones_E, is_additive=True, anchor_scale=total)
    coefficients_E = _in_force(weights_E / (total or 1.0))
    return Influence(coefficients_E, ones_E, is_additive=True, average=Average(weights_E, anchor))


def _task_arithmetic(given: OperatorInput) -> Influence:
    coefficients_E = fixed_coefficients(given).astype(np.float64)
    return Influence(coefficients_E, np.ones_like(coefficients_E), is_additive=True)


def _ties(given: OperatorInput) -> Influence:
    """Trimming is exact; of the consensus only the weights are kept: which elements agree is for `election`."""
    coefficients_E = _consensus_coefficients(given)
    return Influence(coefficients_E, np.ones_like(coefficients_E), trims=True, election=_election(given, trims=True))


def _dare_linear(given: OperatorInput) -> Influence:
    return Influence(fixed_coefficients(given).astype(np.float64), _dropped_energy(given))


def _dare_ties(given: OperatorInput) -> Influence:
    return Influence(_consensus_coefficients(given), _dropped_energy(given), election=_election(given, trims=False))


def _election(given: OperatorInput, *, trims: bool) -> Election:
    density_E = densities_E(given)
    return Election(
        weight_E=given.weights_E().astype(np.float64),
        share_E=density_E,
        tail_E=density_E if trims else np.ones_like(density_E),
        normalize=bool(given.globals["normalize"]),
        scale=float(given.globals["lambda"]),
    )


def _slerp(given: OperatorInput, products_E3: Products | None) -> Influence:
    """The other model's share on the great circle, or on the straight line where the angle is not known."""
    share_E = np.array([float(given.globals["t"])])
    if products_E3 is not None:
        rule = Slerp().block_function(given, Reduced(products_E3=products_E3))
        share_E = rule.coefficients_E.astype(np.float64)
    return Influence(share_E, np.ones(1))


def _passthrough(given: OperatorInput) -> Influence:
    return Influence(np.empty(0), np.empty(0), is_additive=True, anchor_scale=float(given.anchor.get("scale", 1.0)))


def _consensus_coefficients(given: OperatorInput) -> NDArray[np.float64]:
    weights_E = given.weights_E()
    divisor = nonzero_sum(np.abs(weights_E)) if given.globals["normalize"] else 1.0
    return weights_E * (float(given.globals["lambda"]) / divisor)


def _dropped_energy(given: OperatorInput) -> NDArray[np.float64]:
    """`E ||scale * kept||^2 / ||delta||^2`: `density * (1 / density)^2` when rescaled, else `density`."""
    density_E = densities_E(given)
    return 1.0 / density_E if given.globals["rescale"] else density_E


def _in_force(coefficients_E: NDArray[np.float64]) -> NDArray[np.float64]:
    return coefficients_E.astype(np.float32).astype(np.float64)


def _banded(given: OperatorInput) -> Influence:
    """What the band keeps of a block cannot be known from its octaves."""
    coefficients_E = fixed_coefficients(given).astype(np.float64)
    return Influence(coefficients_E, np.ones_like(coefficients_E))


def _dropped_consensus(given: OperatorInput) -> Influence:
    """As DARE's, but large elements are kept more often: who is elected is not worked out."""
    return Influence(_consensus_coefficients(given), _dropped_energy(given))


def _banded_consensus(given: OperatorInput) -> Influence:
    coefficients_E = _consensus_coefficients(given)
    return Influence(coefficients_E, np.ones_like(coefficients_E))


def _shares(given: OperatorInput) -> Influence:
    """Weights over their sum, as if all models lay along one line."""
    parts = ((given.anchor,) if given.anchor else ()) + given.experts
    weights_P = np.array([float(p.get("weight", 1.0)) for p in parts])
    share_E = weights_P[len(parts) - len(given.experts) :] / nonzero_sum(weights_P)
    return Influence(share_E, np.ones_like(share_E))


def _equal_shares(given: OperatorInput) -> Influence:
    share_E = np.full(len(given.experts), 1.0 / max(1, len(given.experts)))
    return Influence(share_E, np.ones_like(share_E))


def _as_they_are(given: OperatorInput) -> Influence:
    """Each delta for itself: what a rule of which nothing is known is taken for."""
    ones_E = np.ones(len(given.experts))
    return Influence(ones_E, ones_E.copy())


_INFLUENCES: dict[str, Callable[[OperatorInput], Influence]] = {
    "linear": _linear,
    "task_arithmetic": _task_arithmetic,
    "ties": _ties,
    "dare_linear": _dare_linear,
    "dare_ties": _dare_ties,
    "breadcrumbs": _banded,
    "breadcrumbs_ties": _banded_consensus,
    "della": _dropped_consensus,
    "della_linear": _dare_linear,
    "nuslerp": _shares,
    "multislerp": _shares,
    "karcher": _shares,
    "model_stock": _equal_shares,
    "sce": _equal_shares,
    "passthrough": _passthrough,
}
