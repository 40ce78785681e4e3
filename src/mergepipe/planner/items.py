"""What can be selected: single blocks, and whole tensors where it must be all or nothing; each with cost and score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.planner.columns import Columns
from mergepipe.planner.knowledge import Knowledge


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Every (expert, block), and how they hang together.

    Attributes:
        cost_EB: bytes requested to read the block.
        free_EB: the block equals the base's and is never read.
        served_by_EB: the expert whose identical bytes serve the block; itself for most.
        whole_ET: the tensor of that expert is read in all its blocks, or not at all.
    """

    columns: Columns
    cost_EB: NDArray[np.int64]
    free_EB: NDArray[np.bool_]
    served_by_EB: NDArray[np.int16]
    whole_ET: NDArray[np.bool_]

    @property
    def n_experts(self) -> int:
        return len(self.cost_EB)

    def own_EB(self) -> NDArray[np.bool_]:
        """Where reading costs something: not free, not served by another expert."""
        own_E1 = np.arange(self.n_experts, dtype=np.int16)[:, None]
        return np.asarray(~self.free_EB & (self.served_by_EB == own_E1), np.bool_)

    def followers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Experts, columns and serving experts of the blocks that another expert's bytes serve."""
        own_E1 = np.arange(self.n_experts, dtype=np.int16)[:, None]
        experts, columns = np.nonzero(self.served_by_EB != own_E1)
        return experts, columns, self.served_by_EB[experts, columns].astype(np.int64)


def find_candidates(
    columns: Columns, cost_EB: NDArray[np.int64], knowledge: Knowledge, whole_ET: NDArray[np.bool_]
) -> Candidates:
    """Blocks of tensors that are read whole neither serve others nor are served."""
    served_by_EB = knowledge.same_as_EB
    if whole_ET.any():
        own_EB = np.repeat(np.arange(len(cost_EB), dtype=np.int16)[:, None], columns.n_columns, axis=1)
        whole_EB = whole_ET[:, columns.tensor_B]
        serving_whole_EB = np.take_along_axis(whole_EB, served_by_EB.astype(np.int64), axis=0)
        served_by_EB = np.where(whole_EB | serving_whole_EB, own_EB, served_by_EB)
    return Candidates(columns, cost_EB, knowledge.free_EB, served_by_EB, whole_ET)


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """What is selected as one: first the single blocks in order of expert and column, then whole tensors by cost.

    Attributes:
        flat_I: `expert * n_columns + column` of the block, or of the tensor's first block.
        cost_I: bytes.
        rate_I: score per byte.
        tensor_I: index of the tensor.
        n_single: how many are single blocks.
    """

    flat_I: NDArray[np.int64]
    cost_I: NDArray[np.int64]
    rate_I: NDArray[np.float64]
    tensor_I: NDArray[np.int64]
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


def make_items(candidates: Candidates, score_EB: NDArray[np.float64], known_ET: NDArray[np.bool_]) -> Items:
    """Score of a block that serves other experts too: the square of the sum of their scores' square roots."""
    columns = candidates.columns
    own_EB = candidates.own_EB()
    single_EB = own_EB & ~candidates.whole_ET[:, columns.tensor_B]
    flat_S = np.flatnonzero(single_EB)
    score_S = _with_followers(candidates, score_EB).ravel()[flat_S]
    cost_S = candidates.cost_EB.ravel()[flat_S]
    wholes = _whole_items(candidates, own_EB, score_EB, known_ET)
    rest = np.array([each[:3] for each in wholes], np.int64).reshape(-1, 3)
    return Items(
        flat_I=np.concatenate([flat_S, rest[:, 1]]),
        cost_I=np.concatenate([cost_S, rest[:, 0]]),
        rate_I=np.concatenate([score_S / cost_S, [each[3] for each in wholes]]),
        tensor_I=np.concatenate([columns.tensor_B[flat_S % max(1, columns.n_columns)], rest[:, 2]]),
        n_single=len(flat_S),
        n_columns=max(1, columns.n_columns),
    )


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

    Where nothing is known the rate leaves rounding to pages out, so that tensors of equal standing tie and the cheaper
    comes first.
    """
    columns, found = candidates.columns, []
    for e, t in np.argwhere(candidates.whole_ET).tolist():
        inside = columns.of_tensor(t)
        cost = int(candidates.cost_EB[e, inside][own_EB[e, inside]].sum())
        if cost:
            first = score_EB[e, inside.start] / columns.n_B[inside.start]
            nbytes = columns.tasks[t].experts[e].dtype.itemsize
            rate = float(score_EB[e, inside].sum() / cost) if known_ET[e, t] else float(first / nbytes)
            found.append((cost, e * columns.n_columns + inside.start, t, rate))
    return sorted(found)
