"""What is left of a budget buys time: blocks of packed experts are read from the originals where that is faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.planner.items import Candidates
from mergepipe.planner.levels import Ladder
from mergepipe.planner.policies import descending
from mergepipe.planner.selection import Selection
from mergepipe.readers.base import ORIGINAL_LEVEL


@dataclass(frozen=True, slots=True)
class _Swaps:
    """Blocks (S) that would be read faster from their originals: what that costs on top, and the seconds it saves."""

    flat_S: NDArray[np.int64]
    cost_S: NDArray[np.int64]
    saved_S: NDArray[np.float64]


def take_originals(candidates: Candidates, selection: Selection, left_bytes: int) -> Selection:
    """Swap as many blocks for their originals as `left_bytes` allow: those first that save most seconds a byte.

    Errors come first: a selection that ends before everything is read, for want of bytes, is not for this.
    """
    swaps = _find_swaps(candidates, selection)
    rate_S = np.divide(swaps.saved_S, swaps.cost_S, out=np.full(len(swaps.cost_S), np.inf), where=swaps.cost_S > 0)
    order_S = descending(rate_S)
    n_taken = int(np.searchsorted(np.cumsum(swaps.cost_S[order_S]), left_bytes, side="right"))
    taken = order_S[:n_taken]
    level_EB, planned_E = selection.level_EB.copy(), selection.planned_E.copy()
    level_EB.ravel()[swaps.flat_S[taken]] = ORIGINAL_LEVEL
    np.add.at(planned_E, swaps.flat_S[taken] // max(1, candidates.columns.n_columns), swaps.cost_S[taken])
    return replace(selection, level_EB=level_EB, planned_E=planned_E)


def originals_cost(candidates: Candidates) -> NDArray[np.int64]:
    """By expert what is added where everything is read and all is swapped that saves time."""
    cost_E = np.zeros(candidates.n_experts, np.int64)
    for (e, t), ladder in candidates.ladders.items():
        own_B = candidates.own_EB()[e, candidates.columns.of_tensor(t)]
        top_B = np.where(own_B, ladder.levels_K[-1], 0).astype(np.int8)
        cost_B, saved_B = _swap_of(ladder, top_B)
        cost_E[e] += cost_B[saved_B > 0].sum()
    return cost_E


def _find_swaps(candidates: Candidates, selection: Selection) -> _Swaps:
    flat, cost, saved = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for (e, t), ladder in candidates.ladders.items():
        inside = candidates.columns.of_tensor(t)
        cost_B, saved_B = _swap_of(ladder, selection.level_EB[e, inside])
        pays_B = np.flatnonzero(saved_B > 0)
        flat.append(e * candidates.columns.n_columns + inside.start + pays_B)
        cost.append(cost_B[pays_B])
        saved.append(saved_B[pays_B])
    return _Swaps(np.concatenate(flat), np.concatenate(cost), np.concatenate(saved))


def _swap_of(ladder: Ladder, level_B: NDArray[np.int8]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What reading each block from the original costs more than at its level, and the seconds that it takes less."""
    if ladder.original_cost_B is None:
        return np.zeros(len(level_B), np.int64), np.zeros(len(level_B))
    cost_B = ladder.cost_at(level_B)
    price_B = cost_B * ladder.price_of_byte + ladder.decoding_at(level_B)
    saved_B = np.where(level_B > 0, price_B - ladder.original_cost_B * ladder.price_of_byte, 0.0)
    return ladder.original_cost_B - cost_B, saved_B


def decoding_seconds(candidates: Candidates, selection: Selection) -> float:
    """Seconds to decode what is selected, with all threads; none where only bytes count."""
    extra_EB = candidates.extra_price_EB
    if extra_EB is None:
        return 0.0
    seconds_EB = np.where(selection.level_EB > 0, extra_EB, 0.0)
    for (e, t), ladder in candidates.ladders.items():
        inside = candidates.columns.of_tensor(t)
        seconds_EB[e, inside] = ladder.decoding_at(selection.level_EB[e, inside])
    return float(seconds_EB.sum())
