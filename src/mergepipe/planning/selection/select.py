"""Select the longest prefix of the ranked items that fits a budget, so that a larger budget selects a superset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.candidates.items import Candidates, Items
from mergepipe.planning.selection.policy_order import Order


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The blocks that are read, their levels and their cost.

    Attributes:
        level_EB: the level at which blocks are read from the expert's own file, 0 where they are not.
        served_EB: blocks served by another expert's bytes.
        planned_E: bytes per expert, samples included.
        next_item: the first item that did not fit, None if everything is selected.
        next_cost_bytes: what it would have cost on top.
    """

    level_EB: NDArray[np.int8]
    served_EB: NDArray[np.bool_]
    planned_E: NDArray[np.int64]
    next_item: int | None
    next_cost_bytes: int

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


def take_prefix(
    candidates: Candidates, items: Items, order_I: Order, sample_E: NDArray[np.int64], budget_bytes: int
) -> Selection:
    """Select the longest prefix of `order_I` that costs at most `budget_bytes`.

    `sample_E` is charged with the first item that an expert takes part in, be it with bytes of its own or served.
    """
    first_E = _first_uses(candidates, items, order_I, np.flatnonzero(sample_E))
    cost_I = items.cost_I[order_I]
    for e, place in first_E.items():
        cost_I[place] += sample_E[e]
    reached_I = np.cumsum(cost_I)
    n_taken = int(np.searchsorted(reached_I, budget_bytes, side="right"))
    taken = order_I[:n_taken]
    level_EB = _expand(candidates, items, taken)
    served_EB = _served(candidates, level_EB > 0)
    planned_E = np.zeros(candidates.n_experts, np.int64)
    np.add.at(planned_E, items.expert_I[taken], items.cost_I[taken])
    for e, place in first_E.items():
        planned_E[e] += sample_E[e] * (place < n_taken)
    rest = n_taken < len(items)
    return Selection(
        level_EB,
        served_EB,
        planned_E,
        int(order_I[n_taken]) if rest else None,
        int(cost_I[n_taken]) if rest else 0,
    )


def _first_uses(candidates: Candidates, items: Items, order_I: Order, experts: NDArray[np.int64]) -> dict[int, int]:
    """Find the position in the order at which each of `experts` first contributes; others are left out."""
    if not len(experts) or not len(items):
        return {}
    place_I = np.empty(len(items), np.int64)
    place_I[order_I] = np.arange(len(items))
    found: dict[int, int] = {}
    follower_expert, column, serving = candidates.followers()
    serving_item = np.searchsorted(items.flat_I[: items.n_single], serving * items.n_columns + column)
    for e in experts.tolist():
        places = np.concatenate([place_I[items.expert_I == e], place_I[serving_item[follower_expert == e]]])
        if len(places):
            found[e] = int(places.min())
    return found


def _expand(candidates: Candidates, items: Items, taken: Order) -> NDArray[np.int8]:
    """Expand the selected items to levels by block; the last selected step of a block counts."""
    level_EB = np.zeros(candidates.cost_EB.shape, np.int8)
    single = np.sort(taken[taken < items.n_single])
    level_EB.ravel()[items.flat_I[single]] = items.level_I[single]
    for item in taken[taken >= items.n_single].tolist():
        inside = candidates.columns.of_tensor(int(items.tensor_I[item]))
        expert = int(items.expert_I[item])
        level_EB[expert, inside] = np.where(candidates.free_EB[expert, inside], 0, items.level_I[item])
    return level_EB


def _served(candidates: Candidates, read_EB: NDArray[np.bool_]) -> NDArray[np.bool_]:
    served_EB = np.zeros_like(read_EB)
    experts, columns, serving = candidates.followers()
    served_EB[experts, columns] = read_EB[serving, columns]
    return served_EB
