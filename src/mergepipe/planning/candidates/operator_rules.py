"""Evaluate the operator on every expert's tensor, and take tensor-wide quantities from statistics where possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import (
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
from mergepipe.planning.candidates.block_columns import Columns
from mergepipe.planning.problem import PlanningProblem
from mergepipe.recipes.tasks import MergeTask

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
