"""What a rule needs of each tensor, which levels of packed experts give it, and what these cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import LeveledTensor, Unchanged
from mergepipe.operators.base import (
    NOTHING_REDUCED,
    ColumnGram,
    InnerProducts,
    MagnitudeCut,
    Operator,
    OperatorInput,
    Reduced,
    ReductionRequest,
    RowGram,
    RowSums,
    SoftmaxDivergence,
    SurvivorSums,
)
from mergepipe.operators.influence import Influence
from mergepipe.operators.registry import operator_named
from mergepipe.operators.statistics import NOTHING_KEPT, Cut, CutEstimate, TensorStatistics
from mergepipe.planning.problem import Columns, PlanningProblem
from mergepipe.recipes.tasks import Action, MergeTask

# --- evaluate the operator on every expert's tensor, and take tensor-wide quantities from statistics where ---


REASON_NO_CUT = "the magnitude cut of its density is not in the statistics"
REASON_NO_PRODUCTS = "its inner products are not finite"
REASON_ROWS = "the rule needs whole rows, which blocks would cut"
REASON_NOT_STATED = "the rule does not say what a part of a delta does"
REASON_NOT_KEPT = "the rule needs sums or cuts over the whole tensor that statistics do not hold"
UNKNOWN = -1

_Products = tuple[float, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """The operator evaluated on every tensor (T) of every expert (E).

    Attributes:
        coefficient_ET, energy_factor_ET, trims: see `Influence`.
        renormalizes: every tensor's coefficients can be; see `Influence`.
        cut_bits_ET: the magnitude cut as float32 bits, `UNKNOWN` where there is none or it is not known.
        products: inner products by (expert, tensor), where the operator wants them.
        lacking: why a tensor-wide quantity is not known, by (expert, tensor).
    """

    coefficient_ET: NDArray[np.float64]
    energy_factor_ET: NDArray[np.float64]
    trims: bool
    renormalizes: bool
    cut_bits_ET: NDArray[np.int64]
    products: Mapping[tuple[int, int], _Products]
    lacking: Mapping[tuple[int, int], str]
    cuts: Mapping[tuple[int, int], Cut] = field(default_factory=dict)  # the known ones
    cut_errors: Mapping[tuple[int, int], float] = field(default_factory=dict)  # of the share kept, where estimated


def operator_input(task: MergeTask) -> OperatorInput:
    """Build the operator's input for a task, random streams excluded."""
    parameters = task.parameters
    return OperatorInput(
        parameters.globals, parameters.anchor, parameters.experts, task.base.n_elements, (), shape=task.shape
    )


def evaluate_rules(problem: PlanningProblem, columns: Columns, known_ET: NDArray[np.bool_]) -> Rules:
    """Evaluate the operator on every tensor, answering its reductions from statistics where `known_ET`."""
    n_experts, tasks = len(problem.experts), columns.tasks
    cut_bits_ET = np.full((n_experts, len(tasks)), UNKNOWN, np.int64)
    products: dict[tuple[int, int], _Products] = {}
    lacking: dict[tuple[int, int], str] = {}
    cuts: dict[tuple[int, int], Cut] = {}
    cut_errors: dict[tuple[int, int], float] = {}
    operator = operator_named(problem.operator)
    memo = _Influences(operator)
    by_task: list[Influence] = []
    for t, task in enumerate(tasks):
        experts = columns.participants(t)
        statistics = {e: problem.statistics[e].get(task.name) if known_ET[e, t] else None for e in experts}
        inputs = operator_input(task)
        request = operator.reduction(inputs) if n_experts and task.base.n_elements else None
        match request:
            case MagnitudeCut(kept_E):
                for e, n_kept in zip(experts, kept_E, strict=True):
                    cut = known_cut(statistics[e], n_kept, task.base.n_elements)
                    estimate = estimated_cut(statistics[e], n_kept) if cut is None else None
                    if estimate is not None:
                        cut, cut_errors[e, t] = estimate.cut, estimate.share_error
                    if cut is not None:
                        cuts[e, t], cut_bits_ET[e, t] = cut, cut.bits
                    elif columns.source(e, t) is not None:
                        lacking[e, t] = REASON_NO_CUT
            case InnerProducts():
                for e, record in statistics.items():
                    if record is not None and np.isfinite(record.products_3).all():
                        products[e, t] = (
                            float(record.products_3[0]),
                            float(record.products_3[1]),
                            float(record.products_3[2]),
                        )
                    elif columns.source(e, t) is not None:
                        lacking[e, t] = REASON_NO_PRODUCTS
            case _:
                pass
        influence = memo.of(task, [products.get((e, t)) for e in experts])
        why = (
            whole_tensor_reason(operator, inputs, request, problem.block_elements)
            if influence.is_known
            else REASON_NOT_STATED
        )
        if why is not None:
            lacking.update({(e, t): why for e in experts if columns.source(e, t) is not None})
        by_task.append(influence)
    return replace(_rules(by_task, columns, cut_bits_ET, products, lacking), cuts=cuts, cut_errors=cut_errors)


def whole_tensor_reason(
    operator: Operator, inputs: OperatorInput, request: ReductionRequest | None, block_elements: int
) -> str | None:
    """Return why a tensor must be read whole or not at all even if `request` is answered; None if it need not."""
    granularity = operator.granularity(inputs)
    if granularity > 1 and block_elements % granularity and inputs.n_elements > block_elements:
        return REASON_ROWS
    match request:
        case None:
            return None
        case MagnitudeCut():
            reduced = Reduced(cuts_E3=np.zeros((len(inputs.experts), 3), np.uint32))
        case InnerProducts():
            reduced = Reduced(products_E3=np.zeros((len(inputs.experts), 3)))
        case _:
            return REASON_NOT_KEPT
    return None if operator.reduction(inputs, reduced) is None else REASON_NOT_KEPT


def row_reasons(problem: PlanningProblem, columns: Columns) -> dict[tuple[int, int], str]:
    """Return by expert and tensor that the rule needs whole rows or columns, where blocks would cut them."""
    operator, reasons = operator_named(problem.operator), {}
    for t, task in enumerate(columns.tasks):
        inputs = operator_input(task)
        if inputs.n_elements > problem.block_elements and _needs_rows(operator, inputs):
            reasons.update({(e, t): REASON_ROWS for e in columns.participants(t) if columns.source(e, t) is not None})
    return reasons


def _needs_rows(operator: Operator, inputs: OperatorInput) -> bool:
    match operator.reduction(inputs):
        case ColumnGram():
            return True
        case RowGram(row_elements) | RowSums(_, row_elements) | SurvivorSums(_, row_elements):
            return row_elements < inputs.n_elements
        case SoftmaxDivergence(row_elements):
            return row_elements < inputs.n_elements
        case _:
            return operator.granularity(inputs) > 1


def known_cut(statistics: TensorStatistics | None, n_kept: int, n_elements: int) -> Cut | None:
    """Return the cut that exactly `n_kept` elements reach, None if no recorded density has that rank."""
    if n_kept == 0 or n_kept >= n_elements:
        return NOTHING_KEPT if n_kept == 0 else Cut(0)
    return None if statistics is None else statistics.cut(n_kept)


def estimated_cut(statistics: TensorStatistics | None, n_kept: int) -> CutEstimate | None:
    """Estimate a cut from the shares on record; None if there are none close enough."""
    return None if statistics is None else statistics.estimated_cut(n_kept)


class _Influences:
    """Caches influences by parameters, which most tensors share."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._known: dict[int, Influence] = {}

    def of(self, task: MergeTask, products: list[_Products | None]) -> Influence:
        known_products = [product for product in products if product is not None]
        if known_products:
            return self._operator.influence(operator_input(task), np.array(known_products, np.float64))
        key = id(task.parameters)  # the tasks keep it alive
        if key not in self._known:
            self._known[key] = self._operator.influence(operator_input(task), None)
        return self._known[key]


def _rules(
    influences: list[Influence],
    columns: Columns,
    cut_bits_ET: NDArray[np.int64],
    products: Mapping[tuple[int, int], _Products],
    lacking: Mapping[tuple[int, int], str],
) -> Rules:
    shape = (len(influences), columns.n_experts)
    coefficient_TE = [columns.by_expert(t, influence.coefficients_E, 0.0) for t, influence in enumerate(influences)]
    factor_TE = [columns.by_expert(t, influence.energy_factor_E, 1.0) for t, influence in enumerate(influences)]
    return Rules(
        coefficient_ET=np.array(coefficient_TE, np.float64).reshape(shape).T,
        energy_factor_ET=np.array(factor_TE, np.float64).reshape(shape).T,
        trims=any(influence.trims for influence in influences),
        renormalizes=all(influence.renormalizes for influence in influences),
        cut_bits_ET=cut_bits_ET,
        products=products,
        lacking=lacking,
    )


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
ALL = 126  # above every level of a store
"""The level of what is read as it is."""


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

    def at(
        self, level_B: NDArray[np.int8], values_KB: NDArray[np.float64], none_B: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the value of each block at its own level; `none_B` where the level is 0."""
        found_B = none_B.copy()
        for k, level in enumerate(self.levels_K):
            here_B = level_B == level
            found_B[here_B] = values_KB[k, here_B]
        return found_B


Ladders = Mapping[tuple[int, int], Ladder]
"""By expert and tensor."""

NO_LADDERS: Ladders = {}


def build_ladders(columns: Columns, operator: Operator, grid: int) -> Ladders:
    """Build the ladders of all tensors with levels whose encoded blocks fit into blocks of `grid` elements.

    Those of other grids are read in full or not at all, as anything else.
    """
    ladders: dict[tuple[int, int], Ladder] = {}
    for t, task in enumerate(columns.tasks):
        if not task.base.n_elements:
            continue
        open_task = _without_unread_experts(task, columns, t)
        sufficient = dict(sufficient_levels(operator, operator_input(open_task), open_task))
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
