"""Order what can be read by a policy, and select within a budget."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.statistics import N_SKETCH
from mergepipe.planning.candidates import Candidates, Items
from mergepipe.planning.problem import Columns, PlanningProblem

# --- order items for selection by policy: by norm, or at random ---


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")

Order = NDArray[np.int64]


def descending_order(rate_I: NDArray[np.float64]) -> Order:
    """Sort indices by falling rate, equal rates by index; faster than a stable sort."""
    order_I = np.argsort(-rate_I)
    sorted_I = rate_I[order_I]
    ties = sorted_I[1:] == sorted_I[:-1]
    if not ties.any():
        return order_I
    group_I = np.concatenate([[0], np.cumsum(~ties)])
    tied_I = np.concatenate([ties, [False]]) | np.concatenate([[False], ties])
    keys = np.sort(group_I[tied_I] * len(order_I) + order_I[tied_I])
    order_I[tied_I] = keys % len(order_I)
    return order_I


def norm_order(items: Items, is_unknown_I: NDArray[np.bool_]) -> Order:
    """Order items by falling score per byte; ties by expert, tensor, block.

    Of equal items of which nothing is known, those of all experts for one block or tensor come together, and those
    blocks and tensors in an order that spreads over the model.
    """
    if not is_unknown_I.any():
        return descending_order(items.rate_I)
    column_I = items.column_I.astype(np.uint64)
    place_I = np.where(is_unknown_I, mix(column_I + _GOLDEN), items.flat_I.astype(np.uint64))
    return np.lexsort((items.flat_I, place_I, -items.rate_I))


def random_order(items: Items, seed: int) -> Order:
    """Draw a permutation with `seed`, the same on every machine: items sorted by a hash of seed and index."""
    with np.errstate(over="ignore"):
        mixed = items.flat_I.astype(np.uint64) * _GOLDEN + mix(np.full(1, seed & (2**64 - 1), np.uint64) + _GOLDEN)
    return np.argsort(mix(mixed), kind="stable")


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection that mixes all bits."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def ascending_steps(items: Items, order_I: Order) -> Order:
    """Reorder the level steps of each block to ascend, within the positions that they occupy together."""
    n = items.n_single
    flat_S = items.flat_I[:n]
    if not (flat_S[1:] == flat_S[:-1]).any():
        return order_I
    place_I = np.empty(len(order_I), np.int64)
    place_I[order_I] = np.arange(len(order_I))
    place_I[:n] = place_I[:n][np.lexsort((place_I[:n], flat_S))]
    return np.argsort(place_I)


def layer_of(name: str) -> str:
    """Return the first number among the components of a tensor's name, empty if there is none."""
    match = _LAYER.search(name)
    return match.group(1) if match else ""


# --- order items by the policy `conflict` ---
# prefer deltas that other experts' deltas do not already cover, by cosines
#
# The estimated error of a block while the experts outside S are omitted is `sum_(i, j not in S) g_i g_j c_ij`, with `g`
# the signed square roots of the scores and `c` the cosines. Taking expert e next lowers it by `g_e^2 + 2 g_e sum_j g_j
# c_ej` over the other experts still omitted: of two experts that say the same, the first counts for both and the second
# for the rest. Experts of a block are put in order by this gain per byte, greedily; the blocks then compete by it.


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


# --- select ranked items within a budget: the longest prefix that fits, then whatever of the rest still fits ---


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The blocks that are read, their levels and their cost.

    Attributes:
        level_EB: the level at which blocks are read from the expert's own file, 0 where they are not.
        served_EB: blocks served by another expert's bytes.
        planned_E: bytes per expert, samples included.
        n_prefix: how many items of the order come before the first that did not fit. Law: it never falls as the
            budget grows.
        probability_T, drawn_B: of a sample, how probable the positions of each tensor were, and those that it holds.
    """

    level_EB: NDArray[np.int8]
    served_EB: NDArray[np.bool_]
    planned_E: NDArray[np.int64]
    n_prefix: int
    probability_T: NDArray[np.float64] | None = None
    drawn_B: NDArray[np.bool_] | None = None

    @property
    def read_EB(self) -> NDArray[np.bool_]:
        """Blocks that are read from the expert's own file, in full or in part."""
        return self.level_EB > 0

    @property
    def planned_bytes(self) -> int:
        return int(self.planned_E.sum())


def full_costs(candidates: Candidates, sample_E: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum the bytes per expert of a full read: its own blocks, and its samples if any of its blocks contributes."""
    cost_E = (candidates.cost_EB * candidates.own_EB()).sum(axis=1)
    takes_part_E = (
        (~candidates.free_EB).any(axis=1) if candidates.columns.n_columns else np.zeros(len(cost_E), np.bool_)
    )
    return np.asarray(cost_E + sample_E * takes_part_E, np.int64)


def select_items(
    candidates: Candidates, items: Items, order_I: Order, sample_E: NDArray[np.int64], budget_bytes: int
) -> Selection:
    """Select the longest prefix of `order_I` that costs at most `budget_bytes`, then what else fits, in that order.

    `sample_E` is charged with the first item that an expert takes part in, be it with bytes of its own or served.
    """
    users = _item_users(candidates, items, np.flatnonzero(sample_E))
    cost_I = items.cost_I[order_I]
    for e, uses_I in users.items():
        if uses_I.any():
            cost_I[int(uses_I[order_I].argmax())] += sample_E[e]
    reached_I = np.cumsum(cost_I)
    n_prefix = int(np.searchsorted(reached_I, budget_bytes, side="right"))
    left_bytes = budget_bytes - (int(reached_I[n_prefix - 1]) if n_prefix else 0)
    samples = [(int(sample_E[e]), uses_I) for e, uses_I in users.items() if not uses_I[order_I[:n_prefix]].any()]
    chosen = np.concatenate([order_I[:n_prefix], _fitting_items(items, order_I[n_prefix:], left_bytes, samples)])
    level_EB = _expand(candidates, items, chosen)
    planned_E = np.zeros(candidates.n_experts, np.int64)
    np.add.at(planned_E, items.expert_I[chosen], items.cost_I[chosen])
    for e, uses_I in users.items():
        planned_E[e] += sample_E[e] * uses_I[chosen].any()
    return Selection(level_EB, served_blocks(candidates, level_EB > 0), planned_E, n_prefix)


def _fitting_items(
    items: Items, rest: Order, left_bytes: int, samples: list[tuple[int, NDArray[np.bool_]]]
) -> NDArray[np.int64]:
    """Choose of the `rest`, in order, every item that fits what is left; a level step only after those before it.

    `samples` are costs that come with the first chosen item of those marked. Law: nothing that is left out fits.
    """
    chosen: list[Order] = [rest[:0]]
    while len(rest):
        cost_R = items.cost_I[rest]
        for sample_bytes, uses_I in samples:
            cost_R = cost_R + sample_bytes * uses_I[rest]
        fits_R = _without_gaps(items.flat_I[rest], cost_R <= left_bytes)
        fitting = rest[fits_R]
        if not len(fitting):
            break
        reached_R = np.cumsum(_charged_once(items, fitting, samples))
        n_taken = int(np.searchsorted(reached_R, left_bytes, side="right"))
        fitting_first = fitting[:n_taken]
        chosen.append(fitting_first)
        left_bytes -= int(reached_R[n_taken - 1])
        samples = [(sample_bytes, uses_I) for sample_bytes, uses_I in samples if not uses_I[fitting_first].any()]
        is_open_R = np.ones(len(rest), np.bool_)
        is_open_R[np.flatnonzero(fits_R)[:n_taken]] = False
        rest = rest[is_open_R]
    return np.concatenate(chosen)


def _charged_once(items: Items, fitting: Order, samples: list[tuple[int, NDArray[np.bool_]]]) -> NDArray[np.int64]:
    """Return the cost of each item, with each sample at the first item that it comes with."""
    cost_R = items.cost_I[fitting].copy()
    for sample_bytes, uses_I in samples:
        uses_R = uses_I[fitting]
        if uses_R.any():
            cost_R[int(uses_R.argmax())] += sample_bytes
    return cost_R


def _without_gaps(flat_R: NDArray[np.int64], fits_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Leave out the level steps of a block that come after one of it that does not fit."""
    missed = np.flatnonzero(~fits_R)[::-1]
    if not len(missed) or not fits_R.any():
        return fits_R
    first_missed_F = np.full(int(flat_R.max()) + 1, len(flat_R), np.int64)
    first_missed_F[flat_R[missed]] = missed  # of several the last assignment counts: the first that is missed
    return fits_R & (np.arange(len(flat_R)) < first_missed_F[flat_R])


def _item_users(candidates: Candidates, items: Items, experts: NDArray[np.int64]) -> dict[int, NDArray[np.bool_]]:
    """Mark by expert the items that it takes part in, with bytes of its own or served."""
    if not len(experts) or not len(items):
        return {}
    follower_expert, column, serving = candidates.followers()
    serving_item = np.searchsorted(items.flat_I[: items.n_single], serving * items.n_columns + column)
    users: dict[int, NDArray[np.bool_]] = {}
    for e in experts.tolist():
        uses_I = items.expert_I == e
        uses_I[serving_item[follower_expert == e]] = True
        users[e] = uses_I
    return users


def _expand(candidates: Candidates, items: Items, chosen: Order) -> NDArray[np.int8]:
    """Expand the selected items to levels by block; the last selected step of a block counts."""
    level_EB = np.zeros(candidates.cost_EB.shape, np.int8)
    single = np.sort(chosen[chosen < items.n_single])
    level_EB.ravel()[items.flat_I[single]] = items.level_I[single]
    for item in chosen[chosen >= items.n_single].tolist():
        inside = candidates.columns.of_tensor(int(items.tensor_I[item]))
        expert = int(items.expert_I[item])
        level_EB[expert, inside] = np.where(candidates.free_EB[expert, inside], 0, items.level_I[item])
    return level_EB


def served_blocks(candidates: Candidates, read_EB: NDArray[np.bool_]) -> NDArray[np.bool_]:
    served_EB = np.zeros_like(read_EB)
    experts, columns, serving = candidates.followers()
    served_EB[experts, columns] = read_EB[serving, columns]
    return served_EB
