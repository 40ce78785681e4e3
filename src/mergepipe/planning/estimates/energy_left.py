"""Estimate from scores the energy that a selection leaves out, for reports and for target errors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.candidates.items import Candidates
from mergepipe.planning.selection.select import Selection


def energy_left(candidates: Candidates, selection: Selection, score_EB: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute what is left out of each block's score (a square): all, nothing, or the remainder of its level."""
    present_EB = selection.read_EB | selection.served_EB | candidates.free_EB
    left_EB = np.where(present_EB, 0.0, score_EB)
    for e, t in candidates.ladders:
        inside = candidates.columns.of_tensor(t)
        left_EB[e, inside] = _left_of_levels(candidates, selection, score_EB, e, t)
    return left_EB


def energy_left_of_tensor(
    candidates: Candidates, selection: Selection, score_EB: NDArray[np.float64], t: int
) -> NDArray[np.float64]:
    """Compute `energy_left` of the blocks of one tensor."""
    inside = candidates.columns.of_tensor(t)
    present_EB = (selection.level_EB[:, inside] > 0) | selection.served_EB[:, inside] | candidates.free_EB[:, inside]
    left_EB = np.where(present_EB, 0.0, score_EB[:, inside])
    for e in range(candidates.n_experts):
        if (e, t) in candidates.ladders:
            left_EB[e] = _left_of_levels(candidates, selection, score_EB, e, t)
    return left_EB


def _left_of_levels(
    candidates: Candidates, selection: Selection, score_EB: NDArray[np.float64], e: int, t: int
) -> NDArray[np.float64]:
    ladder, inside = candidates.ladders[e, t], candidates.columns.of_tensor(t)
    share_B = np.divide(
        ladder.left_at(selection.level_EB[e, inside]), ladder.unread_B,
        out=np.zeros_like(ladder.unread_B), where=ladder.unread_B > 0,
    )  # fmt: skip
    return np.where(candidates.free_EB[e, inside], 0.0, score_EB[e, inside] * share_B)


def energies_by_tensor(
    candidates: Candidates, selection: Selection, score_EB: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute `energy_ET2`: by expert and tensor the energy left out, and the total."""
    left_EB = energy_left(candidates, selection, score_EB)
    all_EB = np.where(candidates.free_EB, 0.0, score_EB)
    tensor_B, n_tensors = candidates.columns.tensor_B, len(candidates.columns.tasks)
    energy_ET2 = np.zeros((candidates.n_experts, n_tensors, 2))
    for e in range(candidates.n_experts):
        energy_ET2[e, :, 0] = np.bincount(tensor_B, left_EB[e], n_tensors)
        energy_ET2[e, :, 1] = np.bincount(tensor_B, all_EB[e], n_tensors)
    return energy_ET2


def norms_left(candidates: Candidates, selection: Selection) -> NDArray[np.float64]:
    """Compute the norm of the unread part of each partly read block, else 0; for rules that keep every element."""
    left_EB = np.zeros(candidates.cost_EB.shape)
    for (e, t), ladder in candidates.ladders.items():
        inside = candidates.columns.of_tensor(t)
        level_B = selection.level_EB[e, inside]
        left_EB[e, inside] = np.where(level_B > 0, np.sqrt(ladder.left_at(level_B)), 0.0) * (1 + 2.0**-20)
    return left_EB
