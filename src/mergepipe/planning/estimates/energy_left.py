"""Estimate from scores the energy that a selection leaves out, for reports and for target errors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.candidates.items import Candidates
from mergepipe.planning.candidates.operator_rules import Rules
from mergepipe.planning.estimates.omission_bound import present_weight
from mergepipe.planning.selection.select import Selection


def energy_left(candidates: Candidates, selection: Selection, score_EB: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute what is left out of each block's score (a square): all, nothing, or the remainder of its level."""
    present_EB = selection.read_EB | selection.served_EB | candidates.free_EB
    left_EB = np.where(present_EB, 0.0, score_EB)
    for e, t in candidates.ladders:
        inside = candidates.columns.of_tensor(t)
        left_EB[e, inside] = _left_of_levels(candidates, selection.level_EB[e, inside], score_EB, e, t)
    return left_EB


def energy_left_of_tensor(
    candidates: Candidates, form_EB: NDArray[np.int8], score_EB: NDArray[np.float64], t: int
) -> NDArray[np.float64]:
    """Compute `energy_left` of the blocks of one tensor, had at a level above 0, not at all at 0, or else below."""
    left_EB = np.where(form_EB != 0, 0.0, score_EB[:, candidates.columns.of_tensor(t)])
    for e in range(candidates.n_experts):
        if (e, t) in candidates.ladders:
            left_EB[e] = _left_of_levels(candidates, np.maximum(form_EB[e], 0), score_EB, e, t)
    return left_EB


def _left_of_levels(
    candidates: Candidates, level_B: NDArray[np.int8], score_EB: NDArray[np.float64], e: int, t: int
) -> NDArray[np.float64]:
    ladder, inside = candidates.ladders[e, t], candidates.columns.of_tensor(t)
    share_B = np.divide(
        ladder.left_at(level_B), ladder.unread_B, out=np.zeros_like(ladder.unread_B), where=ladder.unread_B > 0
    )
    return np.where(candidates.free_EB[e, inside], 0.0, score_EB[e, inside] * share_B)


def energies_by_tensor(
    candidates: Candidates,
    selection: Selection,
    score_EB: NDArray[np.float64],
    renormalized: Rules | None = None,
) -> NDArray[np.float64]:
    """Compute `energy_ET2`: by expert and tensor the energy lost, and the total.

    With weights `renormalized` over the experts that are present, those lose what their larger weights add.
    """
    left_EB = energy_left(candidates, selection, score_EB)
    all_EB = np.where(candidates.free_EB, 0.0, score_EB)
    if renormalized is not None:
        left_EB += all_EB * np.square(_excess_weights(candidates, selection, renormalized))
    tensor_B, n_tensors = candidates.columns.tensor_B, len(candidates.columns.tasks)
    energy_ET2 = np.zeros((candidates.n_experts, n_tensors, 2))
    for e in range(candidates.n_experts):
        energy_ET2[e, :, 0] = np.bincount(tensor_B, left_EB[e], n_tensors)
        energy_ET2[e, :, 1] = np.bincount(tensor_B, all_EB[e], n_tensors)
    return energy_ET2


def _excess_weights(candidates: Candidates, selection: Selection, rules: Rules) -> NDArray[np.float64]:
    """Compute by how much the weight of a present delta grows, relative to its own: `W / W_present - 1`; else 0."""
    present_EB = selection.read_EB | selection.served_EB | candidates.free_EB
    all_B = present_weight(candidates.columns, rules, np.ones_like(present_EB))
    growth_B = all_B / present_weight(candidates.columns, rules, present_EB) - 1
    return np.where(present_EB, growth_B, 0.0)


def norms_left(candidates: Candidates, selection: Selection) -> NDArray[np.float64]:
    """Compute the norm of the unread part of each partly read block, else 0; for rules that keep every element."""
    left_EB = np.zeros(candidates.cost_EB.shape)
    for (e, t), ladder in candidates.ladders.items():
        inside = candidates.columns.of_tensor(t)
        level_B = selection.level_EB[e, inside]
        left_EB[e, inside] = np.where(level_B > 0, np.sqrt(ladder.left_at(level_B)), 0.0) * (1 + 2.0**-20)
    return left_EB
