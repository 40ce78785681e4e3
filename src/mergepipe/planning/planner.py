"""From a planning problem and a budget to a plan: the planner's front door. Pure: arrays in, a value out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Graded
from mergepipe.errors import LimitError, RecipeError, UnsupportedError
from mergepipe.operators.registry import operator_named
from mergepipe.planning.adjust import adjust_densities
from mergepipe.planning.assembly import (
    budget_fallbacks,
    planned_models,
    planned_tensors,
    unread_fallbacks,
    whole_tensor_fallbacks,
)
from mergepipe.planning.block_columns import Columns, lay_out_columns, read_costs
from mergepipe.planning.budget import BudgetRequest
from mergepipe.planning.choices import OnOmit, PlanningChoices, Policy
from mergepipe.planning.conflict_policy import by_conflict, tensor_cosines
from mergepipe.planning.expected_error import norms_left
from mergepipe.planning.items import Candidates, Items, find_candidates, make_items
from mergepipe.planning.known_statistics import REASON_UNIT, Knowledge, find_usable, gather_knowledge, units
from mergepipe.planning.levels import ALL, Ladders, find_ladders
from mergepipe.planning.omission_bound import NoBound, omission_bound
from mergepipe.planning.operator_rules import REASON_ROWS, Rules, work_out_rules
from mergepipe.planning.plan import Access, Fallback, OmissionBound, Plan, Runs, TimePrice
from mergepipe.planning.policies import Order, at_random, by_norm, in_step, stratified
from mergepipe.planning.pricing import Pricing
from mergepipe.planning.problem import PlanningProblem
from mergepipe.planning.sampling_cost import sample_cost_bytes
from mergepipe.planning.scores import amplitudes, score_blocks
from mergepipe.planning.selection import Selection, full_costs, take_prefix
from mergepipe.planning.sign_elections import expected_energies, expected_error, is_worked_out
from mergepipe.storage.buffers import PAGE_BYTES
from mergepipe.storage.prices import Duration, three_digits


def plan_merge(problem: PlanningProblem, request: BudgetRequest, policy: Policy, options: PlanningChoices) -> Plan:
    """Choose what is read of the experts under `request`.

    Laws: the planned cost is at most the budget; for `OnOmit.KEEP` without adjustment a larger budget reads the same
    blocks and more; a budget of the full cost reads everything; the same problem gives the same plan on any machine.

    Raises:
        RecipeError: `plan.on-omit`, the operator has no weights to renormalise.
        LimitError: `plan.budget-index`, the budget does not hold the indices that were read; as `cheapest_bytes`.
    """
    ranking = rank_blocks(problem, request, policy, options)
    return ranking.plan(ranking.budget_bytes)


def rank_blocks(problem: PlanningProblem, request: BudgetRequest, policy: Policy, options: PlanningChoices) -> Ranking:
    """Put everything that can be read in order; see `plan_merge`."""
    survey = _survey(problem)
    _check_on_omit(problem, survey, options.on_omit)
    budget_bytes = request.limit_bytes(int(survey.full_E.sum()))
    _check_indices(survey, budget_bytes)
    adjustments: tuple[Fallback, ...] = ()
    if options.adjust is not None:
        held = min(1.0, budget_bytes / max(1, int(survey.full_E.sum())))
        problem, adjustments = adjust_densities(problem, options.adjust, held, needs_cut=survey.rules.trims)
        survey = _survey(problem)
    cosine_TEE = _cosines(problem, survey, policy)
    score_EB = score_blocks(survey.columns, survey.knowledge, survey.rules, survey.candidates.ladders)
    items = make_items(survey.candidates, score_EB, survey.knowledge.informed_ET)
    order_I = in_step(items, _order(items, survey, score_EB, cosine_TEE, policy, options.selection_seed))
    ranking = Ranking(problem, policy, options, budget_bytes, survey, score_EB, items, order_I, cosine_TEE, adjustments)
    if options.target_error is None:
        return ranking
    enough_bytes = ranking.cheapest_bytes()
    is_by_time = problem.speeds is not None  # then what is left of the budget may make it faster
    return replace(ranking, enough_bytes=enough_bytes, budget_bytes=budget_bytes if is_by_time else enough_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Survey:
    """What is known before anything is chosen."""

    columns: Columns
    knowledge: Knowledge
    rules: Rules
    candidates: Candidates
    reasons: Mapping[tuple[int, int], str]  # why tensors are read whole
    sample_E: NDArray[np.int64]
    side_E: NDArray[np.int64]  # bytes of indices: read to make the plan, whatever it says
    full_E: NDArray[np.int64]


def _survey(problem: PlanningProblem) -> _Survey:
    pricing = Pricing.of(problem.speeds)
    columns = lay_out_columns(problem.tasks, problem.resolution.expert_models, problem.block_elements, problem.unread)
    known_ET, unusable = find_usable(problem, columns)
    rules = work_out_rules(problem, columns, known_ET)
    by_rows = {key for key, reason in rules.lacking.items() if reason == REASON_ROWS}
    ladders = find_ladders(columns, operator_named(problem.operator), problem.block_elements, pricing)
    knowledge = gather_knowledge(problem, columns, known_ET, ladders, with_octaves=rules.trims)
    of_units = dict.fromkeys(units(columns), REASON_UNIT)
    unknown = {key: reason for key, reason in unusable.items() if key not in ladders}
    reasons = {**of_units, **rules.lacking, **unknown}
    whole_ET = np.zeros_like(known_ET)
    for e, t in reasons:
        whole_ET[e, t] = True
    cost_EB = read_costs(columns, ladders)
    for e, t in by_rows:  # cut between rows: no block is free alone, a page at each cut may be read twice
        inside = columns.of_tensor(t)
        knowledge.free_EB[e, inside] = knowledge.free_EB[e, inside].all()
        cost_EB[e, inside] += PAGE_BYTES
    for (e, t), ladder in ladders.items():
        cost_EB[e, columns.of_tensor(t)] = ladder.cost_KB[-1]
    decoding_EB = _decoding(columns, ladders, pricing)
    candidates = find_candidates(columns, cost_EB, knowledge, whole_ET, ladders, pricing, decoding_EB)
    sample_E, side_E = _sample_costs(problem), _side_costs(problem)
    full_E = full_costs(candidates, sample_E) + side_E + _least_of_unread(problem)
    return _Survey(columns, knowledge, rules, candidates, reasons, sample_E, side_E, full_E)


def _decoding(columns: Columns, ladders: Ladders, pricing: Pricing) -> NDArray[np.float64] | None:
    """Seconds to decode each block in full, by expert; None where only bytes count."""
    if not pricing.is_time:
        return None
    decoding_EB = np.zeros((columns.n_experts, columns.n_columns))
    for e in range(columns.n_experts):
        for t in range(len(columns.tasks)):
            inside, ladder = columns.of_tensor(t), ladders.get((e, t))
            if ladder is not None:
                decoding_EB[e, inside] = 0.0 if ladder.decoding_KB is None else ladder.decoding_KB[-1]
                continue
            source, n_B = columns.source(e, t), columns.n_B[inside]
            if source is not None and isinstance(source, Graded) and len(n_B):
                seconds = pricing.of_decoding(source, source.last_level, 1).sum()
                decoding_EB[e, inside] = seconds * n_B / n_B.sum()
    return decoding_EB


def _decoding_seconds(candidates: Candidates, selection: Selection) -> float:
    """Seconds to decode what is selected, with all threads; none where only bytes count."""
    extra_EB = candidates.extra_price_EB
    if extra_EB is None:
        return 0.0
    seconds_EB = np.where(selection.level_EB > 0, extra_EB, 0.0)
    for (e, t), ladder in candidates.ladders.items():
        inside = candidates.columns.of_tensor(t)
        seconds_EB[e, inside] = ladder.decoding_at(selection.level_EB[e, inside])
    return float(seconds_EB.sum())


def _side_costs(problem: PlanningProblem) -> NDArray[np.int64]:
    """Bytes of the index of each expert whose index is read, be it used afterwards or not."""
    sides = [None if e in problem.unread else model.checkpoint.encoded for e, model in enumerate(problem.experts)]
    return np.array([0 if side is None else side.cost_bytes for side in sides], np.int64)


def _least_of_unread(problem: PlanningProblem) -> NDArray[np.int64]:
    """What reading those experts would cost at least, of which not even the index is read."""
    sides = [model.checkpoint.encoded if e in problem.unread else None for e, model in enumerate(problem.experts)]
    return np.array([0 if side is None else side.least_bytes for side in sides], np.int64)


def _sample_costs(problem: PlanningProblem) -> NDArray[np.int64]:
    """Bytes to find out each expert's content id, 0 where it is known or not needed."""
    is_random = operator_named(problem.operator).is_random
    costs = [
        sample_cost_bytes(model.checkpoint) if is_random and model.content_id is None and e not in problem.unread else 0
        for e, model in enumerate(problem.experts)
    ]
    return np.array(costs, np.int64)


def _check_indices(survey: _Survey, budget_bytes: int) -> None:
    """Refuse a budget that does not hold what was read to make the plan."""
    side_bytes = int(survey.side_E.sum())
    if side_bytes > budget_bytes:
        message = f"{budget_bytes} bytes do not hold the indices of packed experts: {side_bytes} bytes, read to plan"
        raise LimitError.of("plan.budget-index", "--budget", message, "raise --budget")


def _check_on_omit(problem: PlanningProblem, survey: _Survey, on_omit: OnOmit) -> None:
    if on_omit is OnOmit.RENORMALIZE and any(average is None for average in survey.rules.average_T):
        message = f"'{problem.operator}' without normalised weights has nothing to renormalise"
        raise RecipeError.of(
            "plan.on-omit", "on_omit", message, "use operator 'linear' with normalize, or on_omit: keep"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Everything that can be read, in the order in which it is taken: a plan for every budget.

    `budget_bytes` is the budget that was asked for, or that the error asked for needs. Law: `plan(a)` reads what
    `plan(b)` reads and more, for `a >= b`; of what can be read in part, it reads it at the same level or a higher one.
    """

    problem: PlanningProblem
    policy: Policy
    options: PlanningChoices
    budget_bytes: int
    survey: _Survey
    score_EB: NDArray[np.float64]
    items: Items
    order_I: Order
    cosine_TEE: NDArray[np.float64]
    adjustments: tuple[Fallback, ...]
    enough_bytes: int | None = None  # what the error asked for needs

    @property
    def full_cost_bytes(self) -> int:
        """The cost of reading everything."""
        return int(self.survey.full_E.sum())

    def select(self, budget_bytes: int) -> Selection:
        """The longest prefix that costs no more, indices included."""
        survey, side_bytes = self.survey, int(self.survey.side_E.sum())
        prefix_bytes = budget_bytes if self.enough_bytes is None else min(budget_bytes, self.enough_bytes)
        found = take_prefix(survey.candidates, self.items, self.order_I, survey.sample_E, prefix_bytes - side_bytes)
        return replace(found, planned_E=found.planned_E + survey.side_E)

    def cheapest_bytes(self) -> int:
        """The least budget whose expected error is at most `options.target_error`.

        Raises:
            LimitError: `plan.target-error`, the budget that was asked for does not hold it.
            UnsupportedError: `plan.target-unknown`, nothing is known of some tensors, so no error is expected.
        """
        survey, target = self.survey, self.options.target_error
        silent_ET = survey.columns.silent_ET() | (np.diff(survey.columns.first_T) == 0)
        unknown_E = (~survey.knowledge.informed_ET & ~silent_ET).any(axis=1)
        if unknown_E.any() or target is None:
            name = self.problem.experts[int(np.flatnonzero(unknown_E)[0])].text
            message = "has tensors of which nothing is known, so that no error can be expected"
            raise UnsupportedError.of("plan.target-unknown", name, message, "run `mergepipe analyze` first, or pack it")
        known: dict[int, float] = {}
        found = self._error(self.budget_bytes, known)
        if found > target:
            message = f"the error that is expected within {self.budget_bytes} bytes is {found:.4g}, not {target:g}"
            raise LimitError.of("plan.target-error", "--target-error", message, "raise --budget or --target-error")
        low, high = 0, self.budget_bytes
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._error(middle, known) <= target else (middle + 1, high)
        return self.select(high).planned_bytes

    def _error(self, budget_bytes: int, known: dict[int, float]) -> float:
        """The error that is expected within a budget; `known` by planned bytes, since many budgets read the same."""
        selection = self.select(budget_bytes)
        if selection.planned_bytes not in known:
            known[selection.planned_bytes] = expected_error(self._energies(selection))
        return known[selection.planned_bytes]

    def _energies(self, selection: Selection) -> NDArray[np.float64]:
        return expected_energies(self.survey.candidates, selection, self.score_EB, self.survey.rules)

    def plan(self, budget_bytes: int) -> Plan:
        """The longest prefix that costs no more."""
        problem, survey, candidates = self.problem, self.survey, self.survey.candidates
        selection = self.select(budget_bytes)
        says_error = bool(candidates.ladders) or self.options.target_error is not None
        energy_ET2 = self._energies(selection) if says_error else None
        bound, no_bound = _bound(survey, selection, self.options.on_omit, self.cosine_TEE)
        tensors = planned_tensors(candidates, selection, survey.rules, energy_ET2)
        return Plan(
            operator=problem.operator,
            block_elements=problem.block_elements,
            seed=problem.seed,
            policy=self.policy.value,
            on_omit=self.options.on_omit.value,
            budget_bytes=budget_bytes,
            planned_bytes=selection.planned_bytes,
            full_cost_bytes=self.full_cost_bytes,
            recipe=problem.recipe,
            models=planned_models(problem, survey.full_E, selection.planned_E, survey.side_E),
            tensors=tensors,
            fallbacks=(
                *unread_fallbacks(problem, budget_bytes),
                *whole_tensor_fallbacks(problem, survey.columns, survey.reasons),
                *budget_fallbacks(problem, survey.columns, self.items, selection, budget_bytes),
                *no_bound,
                *self._target_fallback(energy_ET2),
            ),
            adjustments=self.adjustments,
            bound=bound,
            price=self._price(selection),
            error_is_least=energy_ET2 is not None and self._is_least(energy_ET2),
        )

    def _target_fallback(self, energy_ET2: NDArray[np.float64] | None) -> tuple[Fallback, ...]:
        """A notice where an error was asked for, and what is expected is not all that is lost."""
        target = self.options.target_error
        if target is None or energy_ET2 is None or not self._is_least(energy_ET2):
            return ()
        reason = f"of '{self.problem.operator}' with these parameters only a part of what is lost can be expected"
        return (Fallback("target error", f"the error may be larger than {target:g}", reason),)

    def _is_least(self, energy_ET2: NDArray[np.float64]) -> bool:
        return expected_error(energy_ET2) > 0 and not is_worked_out(self.survey.columns, self.survey.rules)

    def _price(self, selection: Selection) -> TimePrice | None:
        speeds = self.problem.speeds
        if speeds is None:
            return None
        reading = selection.planned_bytes * speeds.seconds_per_byte
        decoding = _decoding_seconds(self.survey.candidates, selection)
        return TimePrice(speeds, Duration(three_digits(reading), three_digits(decoding)))

    def read_cost_E(self, plan: Plan, runs: Mapping[str, Runs]) -> NDArray[np.int64]:
        """Bytes per expert that `plan` charges for the blocks in `runs`, by tensor."""
        columns, candidates = self.survey.columns, self.survey.candidates
        cost_E = np.zeros(columns.n_experts, np.int64)
        planned = {tensor.name: tensor for tensor in plan.tensors}
        for t, task in enumerate(columns.tasks):
            if task.name in runs:
                tensor, inside = planned[task.name], columns.of_tensor(t)
                wanted_B = _mask(runs[task.name], inside.stop - inside.start)
                for e, access in zip(tensor.models, tensor.access, strict=True):
                    cost_E[e] += _cost_of(access, candidates, e, t)[wanted_B].sum()
        return cost_E


def _cost_of(access: Access, candidates: Candidates, e: int, t: int) -> NDArray[np.int64]:
    """Bytes that an access costs, by block."""
    inside, ladder = candidates.columns.of_tensor(t), candidates.ladders.get((e, t))
    cost_B = candidates.cost_EB[e, inside]
    level_B = np.where(_mask(access.blocks, len(cost_B)), ALL, 0).astype(np.int8)
    if ladder is None:
        return np.where(level_B > 0, cost_B, 0)
    for start, stop, level in access.levels:
        level_B[start:stop] = level
    return ladder.cost_at(level_B)


def _mask(runs: Runs, n_blocks: int) -> NDArray[np.bool_]:
    mask_B = np.zeros(n_blocks, np.bool_)
    for start, stop in runs:
        mask_B[start:stop] = True
    return mask_B


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
    left_EB = norms_left(survey.candidates, selection)
    found = omission_bound(survey.columns, survey.knowledge, survey.rules, present_EB, left_EB, on_omit, cosine_TEE)
    if isinstance(found, NoBound):
        return None, (Fallback("omission bound", "none is given", found.reason),)
    return found, ()
