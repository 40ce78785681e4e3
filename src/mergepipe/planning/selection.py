"""Order what can be read, by a policy or as a sample, and select within a budget."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import GRAIN_ELEMENTS, BlockGrid
from mergepipe.operators.statistics import N_SKETCH, TensorStatistics
from mergepipe.planning.candidates import REASON_UNIT, Candidates, Pair, coefficients
from mergepipe.planning.plan import ALL
from mergepipe.planning.problem import Columns, ladder_steps

Order = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The blocks that are read, their levels and their cost.

    Attributes:
        level_EB: the level at which blocks are read, 0 where they are not.
        planned_E: bytes per expert, those of content ids and indices included.
        n_prefix: how many items of the order come before the first that did not fit. Law: it never falls as the
            budget grows.
        probability_T, drawn_B: of a sample, how probable the positions of each tensor were, and those that it holds.
    """

    level_EB: NDArray[np.int8]
    planned_E: NDArray[np.int64]
    n_prefix: int
    probability_T: NDArray[np.float64] | None = None
    drawn_B: NDArray[np.bool_] | None = None

    @property
    def read_EB(self) -> NDArray[np.bool_]:
        """Blocks that are read, in full or in part."""
        return self.level_EB > 0

    @property
    def planned_bytes(self) -> int:
        return int(self.planned_E.sum())


def planned_bytes(candidates: Candidates, block_E: NDArray[np.int64], *, reads: bool) -> NDArray[np.int64]:
    """Return block bytes + index bytes, + content-id bytes if any block is read."""
    return np.asarray(block_E + candidates.side_E + candidates.content_E * reads, np.int64)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection that mixes all bits."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def layer_of(name: str) -> str:
    """Return the first number among the components of a tensor's name, empty if there is none."""
    match = _LAYER.search(name)
    return match.group(1) if match else ""


# --- the items of a selection: blocks, steps between their levels, whole tensors; each with cost and score ---


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Units of selection: first single blocks in order of expert and column, then whole tensors by cost.

    A block that can be read in part is several items, one for each step to a higher level, in order; their rates never
    rise.

    Attributes:
        flat_I: `expert * n_columns + column` of the block, or of the tensor's first block.
        cost_I: bytes; of a step what it costs on top of those before.
        rate_I: score by byte.
        tensor_I: index of the tensor.
        level_I: the level after the step; `ALL` for blocks that are read unencoded.
        n_single: how many are (steps of) single blocks.
    """

    flat_I: NDArray[np.int64]
    cost_I: NDArray[np.int64]
    rate_I: NDArray[np.float64]
    tensor_I: NDArray[np.int64]
    level_I: NDArray[np.int8]
    n_single: int
    n_columns: int

    @property
    def expert_I(self) -> NDArray[np.int64]:
        return self.flat_I // self.n_columns

    @property
    def column_I(self) -> NDArray[np.int64]:
        return self.flat_I % self.n_columns

    def __len__(self) -> int:
        return len(self.flat_I)

    @property
    def least_bytes(self) -> int | None:
        """The cost of the cheapest item that can be taken first; None without items."""
        begins_I = np.ones(len(self), np.bool_)
        flat_S = self.flat_I[: self.n_single]
        begins_I[1 : self.n_single] = flat_S[1:] != flat_S[:-1]
        return int(self.cost_I[begins_I].min()) if len(self) else None


def make_items(candidates: Candidates, *, in_steps: bool) -> Items:
    """Build the items, those of blocks with levels `in_steps` between these, or each at its highest.

    The score of a step is the share of the block's score that it takes from what is left of the block. Where nothing is
    known rates leave rounding to pages out, so that items of equal standing tie.
    """
    columns, n_columns = candidates.columns, max(1, candidates.columns.n_columns)
    own_EB, whole_EB = candidates.own_EB, np.zeros_like(candidates.free_EB)
    for e, t in candidates.whole:
        whole_EB[e, columns.of_tensor(t)] = True
    raw_EB, steps = own_EB & ~whole_EB, []
    for e, t in candidates.ladders if in_steps else ():
        if (e, t) not in candidates.whole:
            raw_EB[e, columns.of_tensor(t)] = False
            steps.append(_step_items(candidates, e, t, own_EB[e, columns.of_tensor(t)]))
    flat_R = np.flatnonzero(raw_EB)
    expert_R, column_R = flat_R // n_columns, flat_R % n_columns
    informed_EB = candidates.informed_ET[:, columns.tensor_B]
    nominal_EB = np.where(informed_EB, candidates.cost_EB, _itemsizes(columns)[:, columns.tensor_B] * columns.n_B)
    rate_R = candidates.score_EB.ravel()[flat_R] / np.maximum(1, nominal_EB.ravel()[flat_R])
    level_R = _top_levels(candidates)[expert_R, columns.tensor_B[column_R]]
    raw = (flat_R, candidates.cost_EB.ravel()[flat_R], rate_R, level_R)
    flat_S, cost_S, rate_S, level_S = (np.concatenate(arrays) for arrays in zip(raw, *steps, strict=True))
    order_S = np.argsort(flat_S, kind="stable")
    wholes = _whole_items(candidates, own_EB)
    flat_I = np.concatenate([flat_S[order_S], wholes.flat_I])
    return Items(
        flat_I=flat_I,
        cost_I=np.concatenate([cost_S[order_S], wholes.cost_I]),
        rate_I=np.concatenate([rate_S[order_S], wholes.rate_I]),
        tensor_I=columns.tensor_B[flat_I % n_columns],
        level_I=np.concatenate([level_S[order_S], wholes.level_I]),
        n_single=len(flat_S),
        n_columns=n_columns,
    )


def _top_levels(candidates: Candidates) -> NDArray[np.int8]:
    """Return the level (E, T) at which a tensor is read in full."""
    level_ET = np.full(candidates.informed_ET.shape, ALL, np.int8)
    for (e, t), ladder in candidates.ladders.items():
        level_ET[e, t] = ladder.levels_K[-1]
    return level_ET


def _itemsizes(columns: Columns) -> NDArray[np.float64]:
    """Return the bytes of an element (E, T); 1 where there is nothing to read."""
    sources = [[columns.source(e, t) for t in range(len(columns.tasks))] for e in range(columns.n_experts)]
    sizes = [[1 if source is None else source.dtype.itemsize for source in of_expert] for of_expert in sources]
    return np.array(sizes, np.float64).reshape(columns.slot_ET.shape)


_Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int8]]


def _step_items(candidates: Candidates, e: int, t: int, own_B: NDArray[np.bool_]) -> _Arrays:
    """Return flat places, costs, rates and levels of the steps of one tensor's blocks."""
    ladder, inside = candidates.ladders[e, t], candidates.columns.of_tensor(t)
    steps = ladder_steps(ladder)
    score_B = candidates.score_EB[e, inside]
    weight_B = np.divide(score_B, ladder.unread_B, out=np.zeros_like(score_B), where=ladder.unread_B > 0)
    is_own_S = own_B[steps.block_S]
    flat_S = e * candidates.columns.n_columns + inside.start + steps.block_S
    rate_S = steps.rate_S * weight_B[steps.block_S]
    return flat_S[is_own_S], steps.cost_S[is_own_S], rate_S[is_own_S], steps.level_S[is_own_S]


def _whole_items(candidates: Candidates, own_EB: NDArray[np.bool_]) -> Items:
    """Return the tensors that are read whole, by cost."""
    columns, n_columns = candidates.columns, max(1, candidates.columns.n_columns)
    itemsize_ET, level_ET, wholes = _itemsizes(columns), _top_levels(candidates), []
    for e, t in candidates.whole:
        inside = columns.of_tensor(t)
        if own_EB[e, inside].any():  # some cost nothing, and are the base in another dtype
            cost = int(candidates.cost_EB[e, inside][own_EB[e, inside]].sum())
            score_B = candidates.score_EB[e, inside]
            nominal = score_B[0] / columns.n_B[inside.start] / itemsize_ET[e, t]
            rate = float(score_B.sum() / max(cost, 1) if candidates.informed_ET[e, t] else nominal)
            wholes.append((cost, e * n_columns + inside.start, t, rate, int(level_ET[e, t])))
    cost_I, flat_I, tensor_I, rate_I, level_I = zip(*sorted(wholes), strict=True) if wholes else ((),) * 5
    return Items(
        np.array(flat_I, np.int64), np.array(cost_I, np.int64), np.array(rate_I, np.float64),
        np.array(tensor_I, np.int64), np.array(level_I, np.int8), 0, n_columns,
    )  # fmt: skip


# --- order items by norm, or at random ---


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

    Items without statistics tie; a tie keeps all experts of a block or tensor together, and visits the blocks in hashed
    order, which spreads over the model.
    """
    if not is_unknown_I.any():
        return descending_order(items.rate_I)
    column_I = items.column_I.astype(np.uint64)
    place_I = np.where(is_unknown_I, mix(column_I + _GOLDEN), items.flat_I.astype(np.uint64))
    return np.lexsort((items.flat_I, place_I, -items.rate_I))


def paper_rates(items: Items, candidates: Candidates) -> NDArray[np.float64]:
    """Return `|coefficient| * ||delta||` of each item by the bytes that it costs, whatever the operator keeps of it.

    Where nothing is known the delta is one of typical elements, see `Candidates.score_EB`.

    Source: arXiv 2602.13273, the score of blocks in PLANGEN.
    """
    columns = candidates.columns
    coefficient_EB = np.abs(coefficients(columns, candidates.rules))[:, columns.tensor_B]
    informed_EB = candidates.informed_ET[:, columns.tensor_B]
    square_EB = np.where(informed_EB, np.square(coefficient_EB) * candidates.square_EB, candidates.score_EB)
    square_I = square_EB.ravel()[items.flat_I]
    for whole in range(items.n_single, len(items)):
        square_I[whole] = square_EB[items.expert_I[whole], columns.of_tensor(int(items.tensor_I[whole]))].sum()
    rate_I: NDArray[np.float64] = np.sqrt(square_I) / np.maximum(1, items.cost_I)
    return rate_I


def random_order(items: Items, seed: int) -> Order:
    """Draw a permutation with `seed`, the same on every machine: items sorted by a hash of seed and index."""
    with np.errstate(over="ignore"):
        mixed = items.flat_I.astype(np.uint64) * _GOLDEN + mix(np.full(1, seed & (2**64 - 1), np.uint64) + _GOLDEN)
    return np.argsort(mix(mixed), kind="stable")


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


def tensor_cosines(columns: Columns, statistics: Mapping[Pair, TensorStatistics]) -> NDArray[np.float64]:
    """Compute `cosine_TEE`: cosines between experts' deltas, pooled over up to 64 equally weighted blocks per tensor.

    They are shrunk by two standard deviations of noise, `2 / sqrt(16 blocks)`, so that noise selects nothing. Zero
    where nothing is known, and between experts that were analysed by blocks of different sizes. Sketches are rounded
    to whole steps, so that sums of products are exact in float64 and the same on every machine.
    """
    cosine_TEE = np.zeros((len(columns.tasks), columns.n_experts, columns.n_experts))
    by_grid: dict[tuple[int, BlockGrid], list[int]] = {}
    for (e, t), known in sorted(statistics.items(), key=lambda item: item[0]):
        by_grid.setdefault((t, known.grid), []).append(e)
    for (t, grid), experts in by_grid.items():
        n_pooled = min(grid.n_blocks, MOST_POOLED_BLOCKS)
        pooled = np.arange(n_pooled) * grid.n_blocks // max(1, n_pooled)
        blocks_EBK = np.stack([statistics[e, t].blocks_B["sketch"][pooled] for e in experts])
        cosine_TEE[t][np.ix_(experts, experts)] = _cosines(blocks_EBK.reshape(len(experts), -1), n_pooled)
    return cosine_TEE


def _cosines(sketch_EX: NDArray[np.float16], n_blocks: int) -> NDArray[np.float64]:
    """Return the cosines of sketches of so many blocks, shorter by what noise makes of them."""
    clean_EX = np.nan_to_num(sketch_EX.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    steps_EX = np.rint(clean_EX / SKETCH_STEP)
    product_EE = np.asarray(steps_EX @ steps_EX.T, np.float64)
    length_E = np.sqrt(np.diagonal(product_EE))
    scale_EE = length_E[:, None] * length_E[None, :]
    cosine_EE = np.zeros(product_EE.shape, np.float64)
    np.divide(product_EE, scale_EE, out=cosine_EE, where=scale_EE > 0)
    noise = _NOISE_DEVIATIONS / np.sqrt(N_SKETCH * max(1, n_blocks))
    size_EE = np.clip(np.abs(cosine_EE) - noise, 0.0, 1.0)
    return np.asarray(np.copysign(size_EE, cosine_EE), np.float64)


def conflict_order(items: Items, candidates: Candidates) -> Order:
    """Order items by falling gain per byte; whole tensors by their own score. Memory: 40 bytes per candidate."""
    columns = candidates.columns
    taking_part_EB = candidates.own_EB
    for e, t in candidates.whole:
        taking_part_EB[e, columns.of_tensor(t)] = False
    sign_ET = np.where(coefficients(columns, candidates.rules) < 0, -1.0, 1.0)
    amplitude_EB = np.sqrt(candidates.score_EB) * sign_ET[:, columns.tensor_B]
    amplitude_BE = np.where(taking_part_EB, amplitude_EB, 0.0).T.copy()
    # A block that is not taken may cost nothing, and so may one with levels whose pages others need.
    cost_BE = np.where(taking_part_EB, np.maximum(candidates.cost_EB, 1), 1).T
    cosine_TEE = tensor_cosines(columns, candidates.statistics)
    rate_BE = _greedy_rates(amplitude_BE, cost_BE, taking_part_EB.T, cosine_TEE, columns)
    rate_I = items.rate_I.copy()
    single = slice(0, items.n_single)
    rate_I[single] = rate_BE[items.column_I[single], items.expert_I[single]]
    return descending_order(rate_I)


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


# --- select ordered items within a budget: the longest prefix that fits, then whatever of the rest still fits ---


@dataclass(frozen=True, slots=True, eq=False)
class ItemOrder:
    """Items in the order in which budgets take them."""

    candidates: Candidates
    items: Items
    order_I: Order

    @property
    def least_bytes(self) -> int | None:
        """The smallest budget under which anything is read; None where there is nothing to read."""
        least, candidates = self.items.least_bytes, self.candidates
        return None if least is None else least + int((candidates.side_E + candidates.content_E).sum())

    def select(self, budget_bytes: int) -> Selection:
        """Select the longest prefix that costs at most `budget_bytes`, then what else fits, in order.

        A level step is taken only after those before it. Law: nothing that is left out would fit.
        """
        candidates, items, rest = self.candidates, self.items, self.order_I
        left_bytes = budget_bytes - int((candidates.side_E + candidates.content_E).sum())
        chosen: list[Order] = []
        while len(rest):
            reached_R = np.cumsum(items.cost_I[rest])
            n_taken = int(np.searchsorted(reached_R, left_bytes, side="right")) if left_bytes >= 0 else 0
            left_bytes -= int(reached_R[n_taken - 1]) if n_taken else 0
            chosen.append(rest[:n_taken])
            rest = rest[n_taken:]
            rest = rest[_without_gaps(items.flat_I[rest], items.cost_I[rest] <= left_bytes)]
        chosen_I = np.concatenate(chosen) if chosen else self.order_I
        block_E = np.zeros(candidates.n_experts, np.int64)
        np.add.at(block_E, items.expert_I[chosen_I], items.cost_I[chosen_I])
        planned_E = planned_bytes(candidates, block_E, reads=bool(len(chosen_I)))
        return Selection(self._levels(chosen_I), planned_E, len(chosen[0]) if chosen else 0)

    def _levels(self, chosen: Order) -> NDArray[np.int8]:
        """Expand the selected items to levels by block; the last selected step of a block counts."""
        candidates, items = self.candidates, self.items
        level_EB = np.zeros(candidates.cost_EB.shape, np.int8)
        single = np.sort(chosen[chosen < items.n_single])
        level_EB.ravel()[items.flat_I[single]] = items.level_I[single]
        for item in chosen[chosen >= items.n_single].tolist():
            inside = candidates.columns.of_tensor(int(items.tensor_I[item]))
            expert = int(items.expert_I[item])
            level_EB[expert, inside] = np.where(candidates.free_EB[expert, inside], 0, items.level_I[item])
        return level_EB


def _without_gaps(flat_R: NDArray[np.int64], fits_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Leave out the level steps of a block that come after one of it that does not fit."""
    missed = np.flatnonzero(~fits_R)[::-1]
    if not len(missed) or not fits_R.any():
        return fits_R
    first_missed_F = np.full(int(flat_R.max()) + 1, len(flat_R), np.int64)
    first_missed_F[flat_R[missed]] = missed  # of several the last assignment counts: the first that is missed
    return fits_R & (np.arange(len(flat_R)) < first_missed_F[flat_R])


# --- draw a sample of block positions: evenly along each tensor, of all experts at once, more as budgets grow ---


SMALL_ELEMENTS = GRAIN_ELEMENTS
SMALL_SHARE = 0.01
"""Tensors of up to `SMALL_ELEMENTS` are small, from the smallest on, while all of them cost at most this share."""
SMALL_WEIGHT = 100.0
"""A small tensor is that much more probable than the mean: from a budget of about 1 % on it is read in full."""
_LEAST_WEIGHT = 1e-9  # beside the mean: less is none
_FREE_WEIGHT = 1e9
_UNIT = 2.0**-53


def position_numbers(names: Sequence[str], columns: Columns, seed: int) -> NDArray[np.float64]:
    """Return the number of each position, by column.

    Laws: numbers are uniform in [0, 1) over seeds; of 2^k neighbours that begin at a multiple of 2^k just one lies in
    each interval of length 2^-k, so that any share of a tensor is spread evenly along it.

    Source: nested scrambling of digits (Owen 1995) in base 2, of a van der Corput sequence whose first digits are
    those of the position's parity.
    """
    index_B = (np.arange(columns.n_columns) - columns.first_T[columns.tensor_B]).astype(np.uint64)
    keys = [blake3(f"{seed}\0{name}".encode()).digest(8) for name in names]
    key_B = np.array([int.from_bytes(key, "little") for key in keys], np.uint64)[columns.tensor_B]
    digits_T = np.array([max(0, int(n) - 1).bit_length() for n in np.diff(columns.first_T)], np.int64)
    digits_B = digits_T[columns.tensor_B]
    prefix_B = np.zeros(columns.n_columns, np.uint64)
    for k in range(int(digits_T.max(initial=0))):
        node_B = mix(key_B + (index_B >> np.uint64(k + 1)))  # the 2^(k+1) neighbours that the position is one of
        node_B = mix(node_B + (prefix_B << np.uint64(6)) + np.uint64(k)) & np.uint64(1)  # whether its digit is flipped
        node_B ^= (index_B >> np.uint64(k)) & np.uint64(1)
        prefix_B = np.where(digits_B > k, prefix_B * np.uint64(2) + node_B, prefix_B)
    rest_B = (mix(mix(~key_B) + index_B) >> np.uint64(11)) * _UNIT
    return np.asarray(np.minimum((prefix_B + rest_B) * 0.5**digits_B, 1.0 - _UNIT), np.float64)


def tensor_weights(candidates: Candidates, importance_T: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return how probable the positions of each tensor are, relative to one another; 0 of no importance.

    All alike, or by an importance per element, of which `importance_T` is the sum; small tensors before all others, and
    tensors of which every position is free once units are read before these.
    """
    columns = candidates.columns
    cost_T = np.bincount(columns.tensor_B, _position_costs(candidates, _unit_costs(candidates)), len(columns.tasks))
    elements_T = np.array([task.base.n_elements for task in columns.tasks], np.int64)
    weight_T = np.ones(len(cost_T))
    if importance_T is not None:
        weight_T = importance_T / np.maximum(1, elements_T)
    mean = float((weight_T * cost_T).sum() / max(1.0, cost_T.sum()))
    weight_T = weight_T / mean if mean > 0 else np.ones(len(cost_T))
    ascending = np.lexsort((np.arange(len(cost_T)), elements_T))
    is_small = (elements_T[ascending] <= SMALL_ELEMENTS) & (np.cumsum(cost_T[ascending]) <= SMALL_SHARE * cost_T.sum())
    weight_T[ascending[is_small]] = np.maximum(SMALL_WEIGHT, weight_T[ascending[is_small]])
    weight_T[cost_T == 0] = _FREE_WEIGHT
    return weight_T


@dataclass(frozen=True, slots=True, eq=False)
class PositionOrder:
    """Positions in the order in which budgets take them.

    Attributes:
        order_B: columns by rising number over weight, which are `key_B` in this order.
        reached_B: the bytes of the positions up to each, of all experts, with those of content ids and indices, and of
            all tensors that are read as units: adapters come first, whole.
        weight_T: see `tensor_weights`.
        begin_T: the key from which on positions of a tensor are taken: 0, or beyond all keys of the tensors before.
    """

    candidates: Candidates
    order_B: NDArray[np.int64]
    key_B: NDArray[np.float64]
    reached_B: NDArray[np.int64]
    weight_T: NDArray[np.float64]
    begin_T: NDArray[np.float64]

    @property
    def least_bytes(self) -> int | None:
        """The smallest budget under which anything is read; None where there is nothing to read."""
        aside_bytes = int((self.candidates.side_E + self.candidates.content_E).sum())
        reading_B = self.reached_B[self.reached_B > aside_bytes]
        return int(reading_B[0]) if len(reading_B) else None

    def select(self, budget_bytes: int) -> Selection:
        """Select the first positions that `budget_bytes` hold, each of all experts.

        Laws: a larger budget selects a superset; what is selected costs at most the budget, to which only less than
        the next position is missing.
        """
        candidates, columns = self.candidates, self.candidates.columns
        n_drawn = int(np.searchsorted(self.reached_B, budget_bytes, side="right"))
        drawn_B = np.zeros(columns.n_columns, np.bool_)
        drawn_B[self.order_B[:n_drawn]] = True
        level_EB = np.where(candidates.own_EB & drawn_B, _top_levels(candidates)[:, columns.tensor_B], np.int8(0))
        units = _unit_costs(candidates)
        block_E = (_block_costs(candidates, units) * (level_EB > 0)).sum(axis=1)
        for (e, t), cost_bytes in units.items():
            if (level_EB[e, columns.of_tensor(t)] > 0).any():
                block_E[e] += cost_bytes
        reached_T = np.maximum(0.0, _scale(self.key_B, n_drawn) - self.begin_T)
        probability_T = np.minimum(1.0, reached_T * self.weight_T)
        planned_E = planned_bytes(candidates, block_E, reads=bool(n_drawn))
        return Selection(level_EB, planned_E, n_drawn, probability_T, drawn_B)


def order_positions(
    candidates: Candidates,
    number_B: NDArray[np.float64],
    weight_T: NDArray[np.float64],
    is_last_T: NDArray[np.bool_],
) -> PositionOrder:
    """Order positions by their numbers over their tensors' weights.

    Positions of tensors that are last, or next to without weight, come after all others: they are drawn of what the
    budget leaves, the latter alike.
    """
    is_weightless_T = weight_T < _LEAST_WEIGHT
    is_last_T = is_last_T | is_weightless_T
    weight_T = np.where(is_weightless_T, 1.0, weight_T)
    begin_T = np.where(is_last_T, 2 / weight_T.min(initial=1.0), 0.0)
    tensor_B = candidates.columns.tensor_B
    key_B = number_B / weight_T[tensor_B] + begin_T[tensor_B]
    order_B = np.argsort(key_B, kind="stable")
    units = _unit_costs(candidates)
    aside_bytes = int((candidates.side_E + candidates.content_E).sum()) + sum(units.values())
    reached_B = np.cumsum(_position_costs(candidates, units)[order_B]) + aside_bytes
    return PositionOrder(candidates, order_B, key_B[order_B], reached_B, weight_T, begin_T)


def _scale(key_B: NDArray[np.float64], n_drawn: int) -> float:
    """Return the probability of a position of weight 1: between the last number that is drawn and the next one."""
    if n_drawn == len(key_B):
        return np.inf
    return float(key_B[n_drawn - 1] + key_B[n_drawn]) / 2 if n_drawn else 0.0


def _unit_costs(candidates: Candidates) -> dict[Pair, int]:
    """Return the bytes of the tensors whose stored bytes are read all at once, whichever positions are drawn."""
    columns = candidates.columns
    own_EB = candidates.own_EB
    costs = {}
    for (e, t), reason in candidates.whole.items():
        if reason == REASON_UNIT:
            inside = columns.of_tensor(t)
            costs[e, t] = int(candidates.cost_EB[e, inside][own_EB[e, inside]].sum())
    return costs


def _block_costs(candidates: Candidates, units: Collection[Pair]) -> NDArray[np.int64]:
    """Return the bytes that each block adds to those of the units."""
    cost_EB = candidates.cost_EB * candidates.own_EB
    for e, t in units:
        cost_EB[e, candidates.columns.of_tensor(t)] = 0
    return cost_EB


def _position_costs(candidates: Candidates, units: Collection[Pair]) -> NDArray[np.int64]:
    """Return the bytes that each position adds, of all experts."""
    return np.asarray(_block_costs(candidates, units).sum(axis=0), np.int64)
