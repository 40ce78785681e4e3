"""Levels of packed experts: the lowest that a rule needs, what each costs and leaves, the efficient steps between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import LeveledTensor, Unchanged
from mergepipe.operators.base import NOTHING_REDUCED, MagnitudeCut, Operator, OperatorInput, Reduced
from mergepipe.planning.plan import ALL
from mergepipe.planning.problem import Columns
from mergepipe.recipes.tasks import Action, MergeTask

# --- find the lowest level of each packed expert that gives the operator the same result ---


def sufficient_levels(operator: Operator, inputs: OperatorInput, task: MergeTask) -> tuple[tuple[int, int], ...]:
    """Return (expert, level) for experts of which a lower level gives the same result; the lowest such level.

    That is so for rules that keep nothing but the largest deltas of each expert, if a level has all of these.
    """
    if task.action is Action.COPY or not any(isinstance(source, LeveledTensor) for source in task.experts):
        return ()
    request = operator.reduction(inputs, NOTHING_REDUCED)
    if not isinstance(request, MagnitudeCut) or not _trims_only(operator, inputs):
        return ()
    levels = []
    for e, (source, n_kept) in enumerate(zip(task.experts, request.kept_E, strict=True)):
        if isinstance(source, LeveledTensor):
            level = source.exact_level(n_kept)
            if level < source.last_level:
                levels.append((e, level))
    return tuple(levels)


def _trims_only(operator: Operator, inputs: OperatorInput) -> bool:
    """Whether no value below the cuts matters, neither to other reductions."""
    reduced = Reduced(cuts_E3=np.zeros((len(inputs.experts), 3), np.uint32))
    return operator.influence(inputs, None).trims and operator.reduction(inputs, reduced) is None


# --- compute cost and remaining error of each level of packed experts by block, and the efficient steps between ---


_FOR_NOTHING = 1e150  # the rate of what costs nothing more


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """The levels (K, ascending) of one expert's tensor, by blocks (B). The last gives what reading everything gives.

    Attributes:
        levels_K: the levels; `ALL` for a source's last.
        cost_KB: bytes requested to read a block at the level.
        left_KB: what the level leaves of the squared delta, beyond what the last leaves: 0 at the last.
        unread_B: the same where nothing is read.
        square_B: ||delta||^2.
    """

    levels_K: tuple[int, ...]
    cost_KB: NDArray[np.int64]
    left_KB: NDArray[np.float64]
    unread_B: NDArray[np.float64]
    square_B: NDArray[np.float64]


Ladders = Mapping[tuple[int, int], Ladder]
"""By expert and tensor."""


def build_ladders(columns: Columns, operator: Operator, grid: int) -> Ladders:
    """Build the ladders of all tensors with levels whose encoded blocks fit into blocks of `grid` elements.

    Those of other grids are read in full or not at all, as anything else.
    """
    ladders: dict[tuple[int, int], Ladder] = {}
    for t, task in enumerate(columns.tasks):
        if not task.base.n_elements:
            continue
        open_task = _without_unread_experts(task, columns, t)
        sufficient = dict(sufficient_levels(operator, open_task.operator_input(), open_task))
        for slot, e in enumerate(columns.participants(t)):
            source = open_task.experts[slot]
            if isinstance(source, LeveledTensor) and grid % source.cut_elements == 0:
                top = sufficient.get(slot, source.last_level)
                ladders[e, t] = _ladder(source, top, grid // source.cut_elements)
    return ladders


def _without_unread_experts(task: MergeTask, columns: Columns, t: int) -> MergeTask:
    """Remove the experts whose index is not read from a task."""
    if not columns.unread:
        return task
    experts = list(task.experts)
    for slot, e in enumerate(columns.participants(t)):
        if e in columns.unread:
            experts[slot] = Unchanged(task.experts[slot].name, task.experts[slot].dtype, task.experts[slot].shape)
    return replace(task, experts=tuple(experts))


def _ladder(source: LeveledTensor, top: int, stretches: int) -> Ladder:
    levels = source.ladder(top)
    beyond_B = _joined(source.squared_errors(top), stretches)
    square_B = _joined(source.squared_errors(0), stretches)
    left_KB = np.stack([_joined(source.squared_errors(level), stretches) - beyond_B for level in levels])
    left_KB[-1] = 0.0
    return Ladder(
        levels_K=tuple(ALL if level == source.last_level else int(level) for level in levels),
        cost_KB=np.stack([source.level_costs_bytes(level, stretches) for level in levels]),
        left_KB=np.maximum(left_KB, 0.0),
        unread_B=np.maximum(square_B - beyond_B, 0.0),
        square_B=square_B,
    )


def _joined(values_C: NDArray[np.float64], stretches: int) -> NDArray[np.float64]:
    """Sum over the encoded blocks that make up a plan block."""
    joined: NDArray[np.float64] = np.add.reduceat(values_C, np.arange(0, len(values_C), stretches))
    return joined


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Level steps (S) of every block, in order of block and level.

    Each goes from the level of the one before to `level_S`, for `cost_S` more bytes, and takes `gain_S` from what is
    left. `rate_S`, gain by byte, never rises inside a block: taken in falling order, steps are taken in order.
    """

    block_S: NDArray[np.int64]
    level_S: NDArray[np.int8]
    cost_S: NDArray[np.int64]
    gain_S: NDArray[np.float64]
    rate_S: NDArray[np.float64]


def ladder_steps(ladder: Ladder) -> Steps:
    """Compute the lower hull of cost and remaining error: each step goes to the level with the most gain per byte."""
    n_levels, n_blocks = ladder.cost_KB.shape
    every, rungs_K1 = np.arange(n_blocks), np.arange(n_levels)[:, None]
    at_B, cost_B, left_B = np.full(n_blocks, -1), np.zeros(n_blocks, np.int64), ladder.unread_B
    ceiling_B = np.full(n_blocks, np.inf)
    parts = []
    for _ in range(n_levels):
        gain_KB = np.maximum(left_B - ladder.left_KB, 0.0)
        more_KB = np.maximum(ladder.cost_KB - cost_B, 0)
        free_KB = np.where(gain_KB > 0, _FOR_NOTHING, 0.0)
        rate_KB = np.divide(gain_KB, more_KB, out=free_KB, where=more_KB > 0)
        rate_KB = np.where(rungs_K1 > at_B, rate_KB, -1.0)
        best_B = n_levels - 1 - rate_KB[::-1].argmax(axis=0)  # of equals the highest
        ceiling_B = np.minimum(ceiling_B, rate_KB[best_B, every])
        open_B = np.flatnonzero(at_B < n_levels - 1)
        level_of_open = best_B[open_B]
        level_S = np.array(ladder.levels_K, np.int8)[level_of_open]
        cost_S = np.maximum(ladder.cost_KB[level_of_open, open_B] - cost_B[open_B], 0)
        parts.append((open_B, level_S, cost_S, gain_KB[level_of_open, open_B], np.maximum(ceiling_B[open_B], 0.0)))
        at_B[open_B], cost_B[open_B] = level_of_open, ladder.cost_KB[level_of_open, open_B]
        left_B = np.where(at_B >= 0, ladder.left_KB[at_B, every], left_B)
    block_S, level_S, cost_S, gain_S, rate_S = (np.concatenate(column) for column in zip(*parts, strict=True))
    order_S = np.argsort(block_S, kind="stable")
    return Steps(block_S[order_S], level_S[order_S], cost_S[order_S], gain_S[order_S], rate_S[order_S])
