"""Order items by the policy `conflict`: prefer deltas that other experts' deltas do not already cover, by cosines.

The estimated error of a block while the experts outside S are omitted is `sum_(i, j not in S) g_i g_j c_ij`, with `g`
the signed square roots of the scores and `c` the cosines. Taking expert e next lowers it by `g_e^2 + 2 g_e sum_j g_j
c_ej` over the other experts still omitted: of two experts that say the same, the first counts for both and the second
for the rest. Experts of a block are put in order by this gain per byte, greedily; the blocks then compete by it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.statistics import N_SKETCH
from mergepipe.planning.candidates.block_columns import Columns
from mergepipe.planning.candidates.items import Candidates, Items
from mergepipe.planning.problem import PlanningProblem
from mergepipe.planning.selection.policy_order import Order, descending_order

SKETCH_STEP = 2.0**-8
MOST_POOLED_BLOCKS = 64
_NOISE_DEVIATIONS = 2.0


def tensor_cosines(problem: PlanningProblem, columns: Columns, known_ET: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Compute `cosine_TEE`: cosines between experts' deltas, pooled over up to 64 equally weighted blocks per tensor.

    Zero where nothing is known. Sketches are rounded to whole steps, so that sums of products are exact in float64 and
    the same on every machine.
    """
    n_experts = len(problem.experts)
    cosine_TEE = np.zeros((len(columns.tasks), n_experts, n_experts))
    for t, task in enumerate(columns.tasks):
        known_E = np.flatnonzero(known_ET[:, t])
        n_blocks = int(columns.first_T[t + 1] - columns.first_T[t])
        if not len(known_E) or not n_blocks:
            continue
        n_pooled = pooled_blocks(n_blocks)
        pooled = np.arange(n_pooled) * n_blocks // n_pooled
        blocks_EBK = np.stack([problem.statistics[e][task.name].blocks_B["sketch"][pooled] for e in known_E.tolist()])
        cosine_TEE[t][np.ix_(known_E, known_E)] = _cosines(blocks_EBK.reshape(len(known_E), -1))
    return cosine_TEE


def _cosines(sketch_EX: NDArray[np.float16]) -> NDArray[np.float64]:
    clean_EX = np.nan_to_num(sketch_EX.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    steps_EX = np.rint(clean_EX / SKETCH_STEP)
    product_EE = np.asarray(steps_EX @ steps_EX.T, np.float64)
    length_E = np.sqrt(np.diagonal(product_EE))
    scale_EE = length_E[:, None] * length_E[None, :]
    cosine_EE = np.zeros(product_EE.shape, np.float64)
    np.divide(product_EE, scale_EE, out=cosine_EE, where=scale_EE > 0)
    return cosine_EE


def pooled_blocks(n_blocks: int) -> int:
    """Return how many blocks of a tensor its cosines are computed from."""
    return min(n_blocks, MOST_POOLED_BLOCKS)


def shrink_cosines(cosine_TEE: NDArray[np.float64], columns: Columns) -> NDArray[np.float64]:
    """Shrink cosines by two standard deviations of noise, `2 / sqrt(16 blocks)`, so that noise selects nothing."""
    blocks_T = np.minimum(np.maximum(1, np.diff(columns.first_T)), MOST_POOLED_BLOCKS)
    noise_T = _NOISE_DEVIATIONS / np.sqrt(N_SKETCH * blocks_T)
    size_TEE = np.clip(np.abs(cosine_TEE) - noise_T[:, None, None], 0.0, 1.0)
    return np.asarray(np.copysign(size_TEE, cosine_TEE), np.float64)


def conflict_order(
    items: Items,
    candidates: Candidates,
    amplitude_EB: NDArray[np.float64],
    cosine_TEE: NDArray[np.float64],
) -> Order:
    """Order items by falling gain per byte; whole tensors by their own score. Memory: 40 bytes per candidate."""
    columns = candidates.columns
    taking_part_EB = candidates.own_EB() & ~candidates.whole_ET[:, columns.tensor_B]
    amplitude_BE = np.where(taking_part_EB, _joint(candidates, amplitude_EB), 0.0).T.copy()
    # A block that is not taken may cost nothing, and so may one with levels whose pages others need.
    cost_BE = np.where(taking_part_EB, np.maximum(candidates.cost_EB, 1), 1).T
    rate_BE = _greedy_rates(amplitude_BE, cost_BE, taking_part_EB.T, shrink_cosines(cosine_TEE, columns), columns)
    rate_I = items.rate_I.copy()
    single = slice(0, items.n_single)
    rate_I[single] = rate_BE[items.column_I[single], items.expert_I[single]] * items.steepness_I[single]
    return descending_order(rate_I)


def _joint(candidates: Candidates, amplitude_EB: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add to serving blocks the amplitudes of the blocks they serve."""
    experts, columns, serving = candidates.followers()
    if not len(experts):
        return amplitude_EB
    joint_EB = amplitude_EB.copy()
    np.add.at(joint_EB, (serving, columns), amplitude_EB[experts, columns])
    return joint_EB


def _greedy_rates(
    amplitude_BE: NDArray[np.float64],
    cost_BE: NDArray[np.int64],
    open_BE: NDArray[np.bool_],
    cosine_TEE: NDArray[np.float64],
    columns: Columns,
) -> NDArray[np.float64]:
    """Compute the gain by byte of each expert of a block, taken greedily; it never rises along that order."""
    n_columns, n_experts = amplitude_BE.shape
    every = np.arange(n_columns)
    gain_BE = amplitude_BE * amplitude_BE
    for e in range(n_experts):
        _add_cross(gain_BE, amplitude_BE, cosine_TEE[columns.tensor_B, :, e], amplitude_BE[:, e], 2.0, e)
    rate_BE = np.zeros_like(gain_BE)
    ceiling_B = np.full(n_columns, np.inf)
    left_BE = open_BE.copy()
    for _ in range(n_experts):
        now_BE = np.where(left_BE, gain_BE / cost_BE, -np.inf)
        taken_B = now_BE.argmax(axis=1)
        valid_B = left_BE[every, taken_B]
        ceiling_B = np.where(valid_B, np.minimum(ceiling_B, now_BE[every, taken_B]), ceiling_B)
        rate_BE[every[valid_B], taken_B[valid_B]] = ceiling_B[valid_B]
        left_BE[every, taken_B] = False
        taken_amplitude_B = np.where(valid_B, amplitude_BE[every, taken_B], 0.0)
        _add_cross(gain_BE, amplitude_BE, cosine_TEE[columns.tensor_B, taken_B], taken_amplitude_B, -2.0, None)
    return rate_BE


def _add_cross(
    gain_BE: NDArray[np.float64],
    amplitude_BE: NDArray[np.float64],
    cosine_BE: NDArray[np.float64],
    other_B: NDArray[np.float64],
    factor: float,
    leave_out: int | None,
) -> None:
    """`gain += factor * amplitude * other * cosine`, but for the expert `leave_out`."""
    cosine_BE *= (factor * other_B)[:, None]
    cosine_BE *= amplitude_BE
    if leave_out is not None:
        cosine_BE[:, leave_out] = 0.0
    gain_BE += cosine_BE
