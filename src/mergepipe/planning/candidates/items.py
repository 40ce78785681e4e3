"""Build the items of a selection: single blocks, level steps, whole tensors; each with cost and score."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.candidates.block_columns import Columns
from mergepipe.planning.candidates.known_statistics import KnownStatistics
from mergepipe.planning.candidates.level_ladders import ALL, NO_LADDERS, Ladders, ladder_steps


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Every (expert, block) with its cost, and which of them share bytes or are read together.

    Attributes:
        cost_EB: bytes requested to read the block.
        free_EB: the block equals the base's and is never read.
        served_by_EB: the expert whose identical bytes serve the block; itself for most.
        whole_ET: the tensor of that expert is read in all its blocks, or not at all.
        ladders: of what can be read in part; `cost_EB` is that of all of a block.
        request_bytes_E: the bytes that a request of an expert's file is worth; 0 where requests cost nothing.
    """

    columns: Columns
    cost_EB: NDArray[np.int64]
    free_EB: NDArray[np.bool_]
    served_by_EB: NDArray[np.int16]
    whole_ET: NDArray[np.bool_]
    ladders: Ladders = field(default_factory=dict)
    request_bytes_E: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))

    @property
    def n_experts(self) -> int:
        return len(self.cost_EB)

    def own_EB(self) -> NDArray[np.bool_]:
        """Mark blocks that can be selected: not free, not served by another expert, not of an unread expert."""
        own_E1 = np.arange(self.n_experts, dtype=np.int16)[:, None]
        own_EB = ~self.free_EB & (self.served_by_EB == own_E1)
        own_EB[list(self.columns.unread)] = False
        return np.asarray(own_EB, np.bool_)

    def followers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return experts, columns and serving experts of the blocks that another expert's bytes serve."""
        own_E1 = np.arange(self.n_experts, dtype=np.int16)[:, None]
        experts, columns = np.nonzero(self.served_by_EB != own_E1)
        return experts, columns, self.served_by_EB[experts, columns].astype(np.int64)


def find_candidates(
    columns: Columns,
    cost_EB: NDArray[np.int64],
    known_statistics: KnownStatistics,
    whole_ET: NDArray[np.bool_],
    ladders: Ladders = NO_LADDERS,
) -> Candidates:
    """Build the candidates; blocks of tensors that are read whole neither serve others nor are served."""
    served_by_EB = known_statistics.same_as_EB
    if whole_ET.any():
        own_EB = np.repeat(np.arange(len(cost_EB), dtype=np.int16)[:, None], columns.n_columns, axis=1)
        whole_EB = whole_ET[:, columns.tensor_B]
        serving_whole_EB = np.take_along_axis(whole_EB, served_by_EB.astype(np.int64), axis=0)
        served_by_EB = np.where(whole_EB | serving_whole_EB, own_EB, served_by_EB)
    return Candidates(columns, cost_EB, known_statistics.free_EB, served_by_EB, whole_ET, ladders)


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Units of selection: first single blocks in order of expert and column, then whole tensors by cost.

    A block that can be read in part is several items, one for each step to a higher level, in order.

    Attributes:
        flat_I: `expert * n_columns + column` of the block, or of the tensor's first block.
        cost_I: bytes; of a step what it costs on top of those before.
        rate_I: score by byte.
        tensor_I: index of the tensor.
        level_I: the level after the step; `ALL` for blocks that are read unencoded.
        steepness_I: `rate_I` by that of reading all of the block at once.
        n_single: how many are (steps of) single blocks.
    """

    flat_I: NDArray[np.int64]
    cost_I: NDArray[np.int64]
    rate_I: NDArray[np.float64]
    tensor_I: NDArray[np.int64]
    level_I: NDArray[np.int8]
    steepness_I: NDArray[np.float64]
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


@dataclass(frozen=True, slots=True, eq=False)
class _Singles:
    """Items that are single blocks or level steps; arrays as in `Items`."""

    flat_I: NDArray[np.int64]
    cost_I: NDArray[np.int64]
    rate_I: NDArray[np.float64]
    level_I: NDArray[np.int8]
    steepness_I: NDArray[np.float64]


def make_items(candidates: Candidates, score_EB: NDArray[np.float64], known_ET: NDArray[np.bool_]) -> Items:
    """Build the items; a serving block scores the square of the sum of the square roots of all scores it serves.

    The score of a step is the share of the block's score that it takes from what is left of the block.
    """
    columns = candidates.columns
    n_columns = max(1, columns.n_columns)
    own_EB = candidates.own_EB()
    single_EB = own_EB & ~candidates.whole_ET[:, columns.tensor_B]
    singles = _singles(candidates, score_EB, single_EB, known_ET)
    wholes = _whole_items(candidates, own_EB, score_EB, known_ET)
    whole_I3 = np.array([whole[:3] for whole in wholes], np.int64).reshape(-1, 3)
    levels = [_top_level(candidates, whole[1] // n_columns, whole[2]) for whole in wholes]
    return Items(
        flat_I=np.concatenate([singles.flat_I, whole_I3[:, 1]]),
        cost_I=np.concatenate([singles.cost_I, whole_I3[:, 0]]),
        rate_I=np.concatenate([singles.rate_I, [whole[3] for whole in wholes]]),
        tensor_I=np.concatenate([columns.tensor_B[singles.flat_I % n_columns], whole_I3[:, 2]]),
        level_I=np.concatenate([singles.level_I, np.array(levels, np.int8)]),
        steepness_I=np.concatenate([singles.steepness_I, np.ones(len(wholes))]),
        n_single=len(singles.flat_I),
        n_columns=n_columns,
    )


def _top_level(candidates: Candidates, e: int, t: int) -> int:
    """Return the level at which a whole tensor is read."""
    ladder = candidates.ladders.get((e, t))
    return ALL if ladder is None else ladder.levels_K[-1]


def _singles(
    candidates: Candidates, score_EB: NDArray[np.float64], single_EB: NDArray[np.bool_], known_ET: NDArray[np.bool_]
) -> _Singles:
    """Build items of blocks without levels, and level steps of the others, sorted by block."""
    columns = candidates.columns
    raw_EB = single_EB.copy()
    for e, t in candidates.ladders:
        raw_EB[e, columns.of_tensor(t)] = False
    flat_S = np.flatnonzero(raw_EB)
    cost_S = candidates.cost_EB.ravel()[flat_S]
    nominal_EB = np.where(known_ET[:, columns.tensor_B], candidates.cost_EB, _nominal_costs(candidates))
    rate_S = _with_followers(candidates, score_EB).ravel()[flat_S] / nominal_EB.ravel()[flat_S]
    parts = [_Singles(flat_S, cost_S, rate_S, np.full(len(flat_S), ALL, np.int8), np.ones(len(flat_S)))]
    for e, t in candidates.ladders:
        if not candidates.whole_ET[e, t]:
            parts.append(_steps(candidates, e, t, score_EB, single_EB))
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part.flat_I for part in parts]), kind="stable")
    return _Singles(
        np.concatenate([part.flat_I for part in parts])[order],
        np.concatenate([part.cost_I for part in parts])[order],
        np.concatenate([part.rate_I for part in parts])[order],
        np.concatenate([part.level_I for part in parts])[order],
        np.concatenate([part.steepness_I for part in parts])[order],
    )


def _steps(
    candidates: Candidates, e: int, t: int, score_EB: NDArray[np.float64], single_EB: NDArray[np.bool_]
) -> _Singles:
    ladder, inside = candidates.ladders[e, t], candidates.columns.of_tensor(t)
    steps = ladder_steps(ladder)
    score_B, cost_B = score_EB[e, inside], ladder.cost_KB[-1]
    weight_B = np.divide(score_B, ladder.unread_B, out=np.zeros_like(score_B), where=ladder.unread_B > 0)
    whole_rate_B = np.divide(ladder.unread_B, cost_B, out=ladder.unread_B.copy(), where=cost_B > 0)
    whole_rate_S = whole_rate_B[steps.block_S]
    steepness_S = np.divide(steps.rate_S, whole_rate_S, out=np.zeros_like(whole_rate_S), where=whole_rate_S > 0)
    is_open_S = single_EB[e, inside][steps.block_S]
    flat_S = e * candidates.columns.n_columns + inside.start + steps.block_S
    rate_S = steps.rate_S * weight_B[steps.block_S]
    level_S, cost_S = steps.level_S, steps.cost_S
    return _Singles(flat_S[is_open_S], cost_S[is_open_S], rate_S[is_open_S], level_S[is_open_S], steepness_S[is_open_S])


def _with_followers(candidates: Candidates, score_EB: NDArray[np.float64]) -> NDArray[np.float64]:
    experts, columns, serving = candidates.followers()
    if not len(experts):
        return score_EB
    amplitude_EB = np.sqrt(score_EB)
    np.add.at(amplitude_EB, (serving, columns), amplitude_EB[experts, columns])
    together_EB = score_EB.copy()
    together_EB[serving, columns] = np.square(amplitude_EB[serving, columns])
    return together_EB


def _whole_items(
    candidates: Candidates, own_EB: NDArray[np.bool_], score_EB: NDArray[np.float64], known_ET: NDArray[np.bool_]
) -> list[tuple[int, int, int, float]]:
    """(cost, flat, tensor, rate) of tensors that are read whole, by cost.

    Where nothing is known the rate leaves rounding to pages out, so that tensors of equal standing tie.
    """
    columns, wholes = candidates.columns, []
    for e, t in np.argwhere(candidates.whole_ET).tolist():
        inside = columns.of_tensor(t)
        cost = int(candidates.cost_EB[e, inside][own_EB[e, inside]].sum())
        if cost:
            first = score_EB[e, inside.start] / columns.n_B[inside.start]
            score = score_EB[e, inside].sum()
            rate = float(score / cost if known_ET[e, t] else first / _itemsize(columns, e, t))
            wholes.append((cost, e * columns.n_columns + inside.start, t, rate))
    return sorted(wholes)


def _nominal_costs(candidates: Candidates) -> NDArray[np.float64]:
    """Compute the bytes of blocks without rounding to pages, so that blocks of which nothing is known tie."""
    columns = candidates.columns
    size_ET = [[_itemsize(columns, e, t) for t in range(len(columns.tasks))] for e in range(candidates.n_experts)]
    size_EB = np.array(size_ET, np.float64).reshape(columns.slot_ET.shape)[:, columns.tensor_B]
    return np.asarray(size_EB * columns.n_B)


def _itemsize(columns: Columns, e: int, t: int) -> int:
    source = columns.source(e, t)
    return 1 if source is None else source.dtype.itemsize
