"""From a planning problem and a budget to a plan: the planner's front door. Pure: arrays in, a value out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.budget_request import BudgetRequest
from mergepipe.errors import RecipeError
from mergepipe.operators.registry import operator_named
from mergepipe.plan import Fallback, OmissionBound, Plan
from mergepipe.planner.adjust import adjust_densities
from mergepipe.planner.assembly import budget_fallbacks, planned_models, planned_tensors, whole_tensor_fallbacks
from mergepipe.planner.bound import NoBound, omission_bound
from mergepipe.planner.columns import Columns, lay_out_columns, read_costs
from mergepipe.planner.conflict import by_conflict, tensor_cosines
from mergepipe.planner.items import Candidates, Items, find_candidates, make_items
from mergepipe.planner.knowledge import Knowledge, find_usable, gather_knowledge
from mergepipe.planner.policies import Order, at_random, by_norm, stratified
from mergepipe.planner.problem import OnOmit, PlanningProblem, PlanOptions, Policy
from mergepipe.planner.rules import Rules, work_out_rules
from mergepipe.planner.sampling import sample_cost_bytes
from mergepipe.planner.scores import amplitudes, score_blocks
from mergepipe.planner.selection import Selection, full_costs, take_prefix


def plan_merge(problem: PlanningProblem, request: BudgetRequest, policy: Policy, options: PlanOptions) -> Plan:
    """Choose what is read of the experts under `request`.

    Laws: the planned cost is at most the budget; for `OnOmit.KEEP` without adjustment a larger budget reads the same
    blocks and more; a budget of the full cost reads everything; the same problem gives the same plan on any machine.

    Raises:
        RecipeError: `plan.on-omit`, the operator has no weights to renormalise.
    """
    survey = _survey(problem)
    _check_on_omit(problem, survey, options.on_omit)
    budget_bytes = request.limit_bytes(int(survey.full_E.sum()))
    adjustments: tuple[Fallback, ...] = ()
    if options.adjust is not None:
        held = min(1.0, budget_bytes / max(1, int(survey.full_E.sum())))
        problem, adjustments = adjust_densities(problem, options.adjust, held, needs_cut=survey.rules.trims)
        survey = _survey(problem)
    return _select(problem, survey, budget_bytes, policy, options, adjustments)


@dataclass(frozen=True, slots=True, eq=False)
class _Survey:
    """What is known before anything is chosen."""

    columns: Columns
    knowledge: Knowledge
    rules: Rules
    candidates: Candidates
    reasons: Mapping[tuple[int, int], str]  # why tensors are read whole
    sample_E: NDArray[np.int64]
    full_E: NDArray[np.int64]


def _survey(problem: PlanningProblem) -> _Survey:
    columns = lay_out_columns(problem.tasks, problem.block_elements)
    known_ET, unusable = find_usable(problem, columns)
    rules = work_out_rules(problem, columns, known_ET)
    knowledge = gather_knowledge(problem, columns, known_ET, with_octaves=rules.trims)
    whole_ET = ~known_ET
    for e, t in rules.lacking:
        whole_ET[e, t] = True
    candidates = find_candidates(columns, read_costs(columns, len(problem.experts)), knowledge, whole_ET)
    sample_E = _sample_costs(problem)
    reasons = {**rules.lacking, **unusable}
    return _Survey(columns, knowledge, rules, candidates, reasons, sample_E, full_costs(candidates, sample_E))


def _sample_costs(problem: PlanningProblem) -> NDArray[np.int64]:
    """Bytes to find out each expert's content id, 0 where it is known or not needed."""
    is_random = operator_named(problem.operator).is_random
    costs = [
        sample_cost_bytes(model.checkpoint) if is_random and model.content_id is None else 0
        for model in problem.experts
    ]
    return np.array(costs, np.int64)


def _check_on_omit(problem: PlanningProblem, survey: _Survey, on_omit: OnOmit) -> None:
    if on_omit is OnOmit.RENORMALIZE and any(average is None for average in survey.rules.average_T):
        message = f"'{problem.operator}' without normalised weights has nothing to renormalise"
        raise RecipeError.of(
            "plan.on-omit", "on_omit", message, "use operator 'linear' with normalize, or on_omit: keep"
        )


def _select(
    problem: PlanningProblem,
    survey: _Survey,
    budget_bytes: int,
    policy: Policy,
    options: PlanOptions,
    adjustments: tuple[Fallback, ...],
) -> Plan:
    columns, knowledge, rules, candidates = survey.columns, survey.knowledge, survey.rules, survey.candidates
    cosine_TEE = _cosines(problem, survey, policy)
    score_EB = score_blocks(columns, knowledge, rules)
    items = make_items(candidates, score_EB, knowledge.known_ET)
    order_I = _order(items, survey, score_EB, cosine_TEE, policy, options.selection_seed)
    selection = take_prefix(candidates, items, order_I, survey.sample_E, budget_bytes)
    bound, no_bound = _bound(survey, selection, options.on_omit, cosine_TEE)
    return Plan(
        operator=problem.operator,
        block_elements=problem.block_elements,
        seed=problem.seed,
        policy=policy.value,
        on_omit=options.on_omit.value,
        budget_bytes=budget_bytes,
        planned_bytes=selection.planned_bytes,
        full_cost_bytes=int(survey.full_E.sum()),
        recipe=problem.recipe,
        models=planned_models(problem, survey.full_E, selection.planned_E),
        tensors=planned_tensors(candidates, selection, rules),
        fallbacks=(
            *whole_tensor_fallbacks(problem, columns, survey.reasons),
            *budget_fallbacks(problem, columns, items, selection, budget_bytes),
            *no_bound,
        ),
        adjustments=adjustments,
        bound=bound,
    )


def _cosines(problem: PlanningProblem, survey: _Survey, policy: Policy) -> NDArray[np.float64]:
    if policy is Policy.CONFLICT or survey.rules.is_additive:
        return tensor_cosines(problem, survey.columns, survey.knowledge.known_ET)
    return np.zeros((0, 0, 0))


def _order(
    items: Items,
    survey: _Survey,
    score_EB: NDArray[np.float64],
    cosine_TEE: NDArray[np.float64],
    policy: Policy,
    selection_seed: int,
) -> Order:
    if not len(items):
        return np.zeros(0, np.int64)
    match policy:
        case Policy.NORM:
            return by_norm(items)
        case Policy.RANDOM:
            return at_random(items, selection_seed)
        case Policy.STRATIFIED:
            return stratified(items, [task.name for task in survey.columns.tasks])
        case Policy.CONFLICT:
            amplitude_EB = amplitudes(score_EB, survey.columns, survey.rules)
            return by_conflict(items, survey.candidates, amplitude_EB, cosine_TEE)


def _bound(
    survey: _Survey, selection: Selection, on_omit: OnOmit, cosine_TEE: NDArray[np.float64]
) -> tuple[OmissionBound | None, tuple[Fallback, ...]]:
    if not survey.rules.is_additive:
        return None, ()
    present_EB = selection.read_EB | selection.served_EB | survey.knowledge.free_EB
    found = omission_bound(survey.columns, survey.knowledge, survey.rules, present_EB, on_omit, cosine_TEE)
    if isinstance(found, NoBound):
        return None, (Fallback("omission bound", "none is given", found.reason),)
    return found, ()
