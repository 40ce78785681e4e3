"""Select ranked items within a budget: the longest prefix that fits, then whatever of the rest still fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.candidates.items import Candidates, Items
from mergepipe.planning.selection.gaps import Gaps
from mergepipe.planning.selection.policy_order import Order


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
    Where requests have a price, a prefix comes with the blocks of short gaps in it; see `gaps.Gaps`.
    """
    users = _item_users(candidates, items, np.flatnonzero(sample_E))
    gaps = Gaps(candidates, items)
    if gaps.is_priced:
        return _select_with_gaps(candidates, items, order_I, sample_E, budget_bytes, users, gaps)
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


def _select_with_gaps(
    candidates: Candidates,
    items: Items,
    order_I: Order,
    sample_E: NDArray[np.int64],
    budget_bytes: int,
    users: Mapping[int, NDArray[np.bool_]],
    gaps: Gaps,
) -> Selection:
    """Do as `select_items` where requests have a price.

    Law: a longer prefix comes with all that a shorter one comes with, so that its cost never falls.
    """

    def cost_bytes(chosen_I: NDArray[np.bool_]) -> int:
        samples = sum(int(sample_E[e]) for e, uses_I in users.items() if (uses_I & chosen_I).any())
        return int(items.cost_I[chosen_I].sum()) + samples

    low, high = 0, len(order_I)
    while low < high:
        middle = (low + high + 1) // 2
        fits = cost_bytes(gaps.closed(order_I[:middle])) <= budget_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    chosen_I = gaps.closed(order_I[:low])
    left_bytes = budget_bytes - cost_bytes(chosen_I)
    samples = [(int(sample_E[e]), uses_I) for e, uses_I in users.items() if not (uses_I & chosen_I).any()]
    rest = order_I[low:]
    rest = rest[~chosen_I[rest]]
    if left_bytes > 0:
        chosen_I[_fitting_items(items, rest, left_bytes, samples)] = True
    chosen = np.flatnonzero(chosen_I)
    level_EB = _expand(candidates, items, chosen)
    planned_E = np.zeros(candidates.n_experts, np.int64)
    np.add.at(planned_E, items.expert_I[chosen], items.cost_I[chosen])
    for e, uses_I in users.items():
        planned_E[e] += sample_E[e] * uses_I[chosen].any()
    return Selection(level_EB, served_blocks(candidates, level_EB > 0), planned_E, low)


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
