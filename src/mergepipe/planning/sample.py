"""Draw block positions for a sample: evenly along each tensor, of all experts at once, a superset as budgets grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import GRAIN_ELEMENTS
from mergepipe.planning.candidates import Candidates
from mergepipe.planning.problem import Columns
from mergepipe.planning.rules import ALL
from mergepipe.planning.selection import Selection, mix, served_blocks

SMALL_ELEMENTS = GRAIN_ELEMENTS
SMALL_SHARE = 0.01
"""Tensors of up to `SMALL_ELEMENTS` are small, from the smallest on, while all of them cost at most this share."""
SMALL_WEIGHT = 100.0
"""A small tensor is that much more probable than the mean: from a budget of about 1 % on it is read in full."""
_LEAST_WEIGHT = 1e-9  # of tensors that are expected not to change
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


def tensor_weights(
    candidates: Candidates, *, norm_T: NDArray[np.float64] | None = None, total_T: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return how probable the positions of each tensor are, relative to one another.

    All alike, or by the norm of a tensor's merged delta per element, which makes the least variance, or by an
    importance per element, of which `total_T` is the sum; small tensors before all others.
    """
    columns = candidates.columns
    cost_T = np.bincount(columns.tensor_B, _costs(candidates), len(columns.tasks))
    elements_T = np.array([task.base.n_elements for task in columns.tasks], np.int64)
    weight_T = np.ones(len(cost_T))
    if norm_T is not None:
        weight_T = norm_T / np.sqrt(np.maximum(1, elements_T))
    elif total_T is not None:
        weight_T = total_T / np.maximum(1, elements_T)
    mean = float((weight_T * cost_T).sum() / max(1.0, cost_T.sum()))
    weight_T = np.maximum(_LEAST_WEIGHT, weight_T / mean) if mean > 0 else np.ones(len(cost_T))
    ascending = np.lexsort((np.arange(len(cost_T)), elements_T))
    is_small = (elements_T[ascending] <= SMALL_ELEMENTS) & (np.cumsum(cost_T[ascending]) <= SMALL_SHARE * cost_T.sum())
    weight_T[ascending[is_small]] = np.maximum(SMALL_WEIGHT, weight_T[ascending[is_small]])
    return weight_T


@dataclass(frozen=True, slots=True, eq=False)
class PositionOrder:
    """Positions in the order in which budgets take them.

    Attributes:
        order_B: columns by rising number over weight, which are `key_B` in this order.
        reached_B: the bytes of the positions up to each, of all experts, `side_E` included.
        weight_T: see `tensor_weights`.
        side_E: what is charged once for each expert.
    """

    order_B: NDArray[np.int64]
    key_B: NDArray[np.float64]
    reached_B: NDArray[np.int64]
    weight_T: NDArray[np.float64]
    side_E: NDArray[np.int64]

    @property
    def least_bytes(self) -> int | None:
        """The smallest budget under which anything is read; None where there is nothing to read."""
        reading_B = self.reached_B[self.reached_B > self.side_E.sum()]
        return int(reading_B[0]) if len(reading_B) else None


def order_positions(
    candidates: Candidates, number_B: NDArray[np.float64], weight_T: NDArray[np.float64], sample_E: NDArray[np.int64]
) -> PositionOrder:
    """Order positions by their numbers over their tensors' weights."""
    key_B = number_B / weight_T[candidates.columns.tensor_B]
    order_B = np.argsort(key_B, kind="stable")
    side_E = sample_E * (~candidates.free_EB).any(axis=1) if len(order_B) else np.zeros_like(sample_E)
    reached_B = np.cumsum(_costs(candidates)[order_B]) + int(side_E.sum())
    return PositionOrder(order_B, key_B[order_B], reached_B, weight_T, side_E)


def select_positions(candidates: Candidates, order: PositionOrder, budget_bytes: int) -> Selection:
    """Select the first positions of an order that `budget_bytes` hold, each of all experts.

    Laws: a larger budget selects a superset; what is selected costs at most the budget, to which only less than the
    next position is missing.
    """
    columns, own_EB, side_E = candidates.columns, candidates.own_EB(), order.side_E
    n_drawn = int(np.searchsorted(order.reached_B, budget_bytes, side="right"))
    drawn_B = np.zeros(columns.n_columns, np.bool_)
    drawn_B[order.order_B[:n_drawn]] = True
    level_EB = np.where(own_EB & drawn_B, np.int8(ALL), np.int8(0))
    for (e, t), ladder in candidates.ladders.items():
        inside = columns.of_tensor(t)
        level_EB[e, inside] = np.where(level_EB[e, inside] > 0, ladder.levels_K[-1], 0)
    return Selection(
        level_EB,
        served_blocks(candidates, level_EB > 0),
        np.asarray((candidates.cost_EB * (level_EB > 0)).sum(axis=1) + side_E * bool(n_drawn), np.int64),
        n_drawn,
        np.minimum(1.0, _scale(order.key_B, n_drawn) * order.weight_T),
        drawn_B,
    )


def _scale(key_B: NDArray[np.float64], n_drawn: int) -> float:
    """Return the probability of a position of weight 1: between the last number that is drawn and the next one."""
    if n_drawn == len(key_B):
        return np.inf
    return float(key_B[n_drawn - 1] + key_B[n_drawn]) / 2 if n_drawn else 0.0


def _costs(candidates: Candidates) -> NDArray[np.int64]:
    """Return the bytes of each position, of all experts."""
    return np.asarray((candidates.cost_EB * candidates.own_EB()).sum(axis=0), np.int64)
