"""Bound how far a plan is from the full merge, for operators whose result is the base plus a sum of scaled deltas."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.budget import OnOmit
from mergepipe.planning.candidates import LARGEST_NORM, Candidates, coefficients
from mergepipe.planning.selection import Selection
from mergepipe.reports import OmissionBound

_SAFETY = 1 + 1e-6  # coefficients and recorded squares are rounded; recorded norms are rounded up


def omission_bound(candidates: Candidates, selection: Selection, on_omit: OnOmit) -> OmissionBound | None:
    """Bound `||M_full - M_A||` before rounding by `[sum_b (sum_i |a_i - a'_i| ||delta_i,b||)^2]^(1/2)`.

    `a` are the coefficients of the full merge, `a'` those under the plan: 0 where a delta is omitted, else `a`, or with
    `OnOmit.RENORMALIZE` the weight over the sum of those weights that are read. Since both merges are the base plus a
    sum of scaled deltas, the triangle inequality gives the bound of each block. What a level leaves of a delta counts
    by `a`, or what has become of it. None where the operator is no such sum, where a sample is drawn, and where the
    norm of an omitted delta is not known.

    Source: arXiv 2605.29489, Proposition 2, and equations 16 to 18 for coefficients that drift.
    """
    is_additive = all(rule.influence.is_additive for rule in candidates.rules)
    if not is_additive or selection.drawn_B is not None:
        return None
    columns = candidates.columns
    coefficient_EB = coefficients(columns, candidates.rules)[:, columns.tensor_B]
    norm_EB = np.sqrt(candidates.square_EB)
    present_EB = selection.read_EB | candidates.free_EB
    planned_EB = np.where(present_EB, coefficient_EB, 0.0)
    if on_omit is OnOmit.RENORMALIZE:
        planned_EB = _divided(candidates, present_EB)
    drift_EB = np.abs(coefficient_EB - planned_EB)
    known_EB = (candidates.informed_ET & ~_spread(candidates))[:, columns.tensor_B] & (norm_EB < LARGEST_NORM)
    if ((coefficient_EB != 0) & ~known_EB & ~candidates.free_EB).any():
        return None
    left_EB = np.abs(planned_EB) * _left_by_levels(candidates, selection)
    distance = _length(_product(drift_EB, norm_EB) + left_EB)
    nothing_read = _length(_product(np.abs(coefficient_EB), norm_EB))
    return OmissionBound(distance, nothing_read, drifts=on_omit is OnOmit.RENORMALIZE)


def _product(factor_EB: NDArray[np.float64], norm_EB: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `factor * norm`, 0 where the factor is."""
    return np.multiply(factor_EB, norm_EB, out=np.zeros_like(norm_EB), where=factor_EB != 0)


def _length(norm_EB: NDArray[np.float64]) -> float:
    """Return the length of the vector of blocks, of which each is at most the sum of its experts' parts."""
    return math.sqrt(math.fsum(np.square(norm_EB.sum(axis=0)).tolist())) * _SAFETY


def _divided(candidates: Candidates, present_EB: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the weights that are present over their sum and the anchor's weight, a sum of 0 counting as 1."""
    columns = candidates.columns
    divided_T = [rule.influence.divided for rule in candidates.rules]
    anchor_T = np.array([0.0 if divided is None else divided.anchor_weight for divided in divided_T])
    weight_ET = np.zeros((candidates.n_experts, len(divided_T)))
    for t, divided in enumerate(divided_T):
        if divided is not None:
            weight_ET[:, t] = columns.by_expert(t, divided.weights_E, 0.0)
    weight_EB = np.where(present_EB, weight_ET[:, columns.tensor_B], 0.0)
    sum_B = anchor_T[columns.tensor_B] + weight_EB.sum(axis=0)
    return weight_EB / np.where(sum_B == 0, 1.0, sum_B)


def _spread(candidates: Candidates) -> NDArray[np.bool_]:
    """Mark the tensors whose norms are shared out from larger blocks (E, T): these bound nothing."""
    spread_ET = np.zeros_like(candidates.informed_ET)
    for e, t in candidates.spread - candidates.ladders.keys():
        spread_ET[e, t] = True
    return spread_ET


def _left_by_levels(candidates: Candidates, selection: Selection) -> NDArray[np.float64]:
    """Return the norm of what the levels of a selection leave of the deltas that are read in part."""
    left_EB = np.zeros(candidates.free_EB.shape)
    for (e, t), ladder in candidates.ladders.items():
        inside = candidates.columns.of_tensor(t)
        level_B = selection.level_EB[e, inside]
        for level, left_B in zip(ladder.levels_K, ladder.left_KB, strict=True):
            left_EB[e, inside] += np.where(level_B == level, np.sqrt(np.maximum(left_B, 0.0)), 0.0)
    return left_EB
