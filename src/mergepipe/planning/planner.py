"""Plan a merge: rank everything that can be read, and select within the budget. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.errors import LimitError, RecipeError, UnsupportedError
from mergepipe.operators.registry import operator_named
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.operators.statistics_grid import on_grid
from mergepipe.planning.budget import BudgetRequest
from mergepipe.planning.candidates.block_columns import Columns, lay_out_columns, read_costs
from mergepipe.planning.candidates.content_id_cost import sample_cost_bytes
from mergepipe.planning.candidates.density_adjustment import adjust_densities
from mergepipe.planning.candidates.items import Candidates, Items, find_candidates, make_items
from mergepipe.planning.candidates.known_statistics import (
    REASON_UNIT,
    KnownStatistics,
    gather_statistics,
    match_statistics,
    units,
)
from mergepipe.planning.candidates.level_ladders import ALL, build_ladders
from mergepipe.planning.candidates.operator_rules import REASON_ROWS, Rules, evaluate_rules, row_reasons
from mergepipe.planning.candidates.scores import amplitudes, score_blocks
from mergepipe.planning.choices import OnOmit, PlanningChoices, Policy
from mergepipe.planning.estimates.energy_left import norms_left
from mergepipe.planning.estimates.expected_errors import expected_energies, expected_error, is_error_complete
from mergepipe.planning.estimates.omission_bound import NoBound, omission_bound
from mergepipe.planning.plan import Access, Fallback, OmissionBound, Outlook, Plan, Runs
from mergepipe.planning.plan_assembly import (
    estimate_fallbacks,
    planned_models,
    planned_tensors,
    starved_fallbacks,
    unknown_fallbacks,
    unread_fallbacks,
    unspent_fallbacks,
    whole_tensor_fallbacks,
)
from mergepipe.planning.problem import PlanningProblem
from mergepipe.planning.selection.conflict_order import conflict_order, tensor_cosines
from mergepipe.planning.selection.least_error import compared_budgets, least_error_budget
from mergepipe.planning.selection.policy_order import Order, ascending_steps, norm_order, random_order
from mergepipe.planning.selection.positions import (
    PositionOrder,
    order_positions,
    position_numbers,
    select_positions,
    tensor_weights,
)
from mergepipe.planning.selection.select import Selection, full_costs, select_items
from mergepipe.storage.buffers import PAGE_BYTES

_SELECTIONS_AT_ONCE = 32  # whose expected errors are computed together: a byte of memory for each block and selection


def plan_merge(problem: PlanningProblem, request: BudgetRequest, policy: Policy, options: PlanningChoices) -> Plan:
    """Choose which blocks of the experts are read under the budget `request`.

    Laws: the planned cost is at most the budget; nothing that is left out would fit as well, unless more of it is
    expected to make the result worse, and for rules other than sums as far as budgets are compared (`least_error`); the
    expected error never grows with the budget, but for the policies `random` and `sample`, which are draws; a budget of
    the full cost reads everything; the same problem gives the same plan on any machine.

    Raises:
        RecipeError: `plan.on-omit`, the operator has no weights to renormalise.
        LimitError: `plan.budget-index`, the budget does not hold the indices that were read; as `cheapest_bytes`.
    """
    ranking = rank_blocks(problem, request, policy, options)
    return ranking.plan(ranking.budget_bytes)


def rank_blocks(problem: PlanningProblem, request: BudgetRequest, policy: Policy, options: PlanningChoices) -> Ranking:
    """Rank everything that can be read; see `plan_merge`."""
    samples = policy is Policy.SAMPLE
    if samples and options.target_error is not None:
        message = "a sample is not meant to be near the full merge: no error is expected of it"
        raise RecipeError.of("option.pair", "--target-error", message, "give a --budget, or another --select")
    problem = replace(problem, statistics=_on_grid(problem))
    data = _planning_data(problem, samples=samples)
    _check_on_omit(problem, data, options.on_omit)
    budget_bytes = request.limit_bytes(int(data.full_E.sum()))
    _check_indices(data, budget_bytes)
    adjustments: tuple[Fallback, ...] = ()
    if options.adjust is not None:
        held = min(1.0, budget_bytes / max(1, int(data.full_E.sum())))
        problem, adjustments = adjust_densities(problem, options.adjust, held, needs_cut=data.rules.trims)
        data = _planning_data(problem, samples=samples)
    cosine_TEE = _cosines(problem, data, policy)
    score_EB = score_blocks(data.columns, data.known_statistics, data.rules, data.candidates.ladders)
    items = make_items(data.candidates, score_EB, data.known_statistics.informed_ET)
    order_I = ascending_steps(items, _order(items, data, score_EB, cosine_TEE, policy, options.selection_seed))
    ranking = Ranking(problem, policy, options, budget_bytes, data, score_EB, items, order_I, cosine_TEE, adjustments)
    if options.target_error is None:
        return ranking
    enough_bytes = ranking.cheapest_bytes()
    return replace(ranking, enough_bytes=enough_bytes, budget_bytes=enough_bytes)


def _on_grid(problem: PlanningProblem) -> tuple[Mapping[str, TensorStatistics], ...]:
    """Carry statistics of other blocks over to the plan's."""
    return tuple(
        {name: on_grid(statistics, problem.block_elements) for name, statistics in of_expert.items()}
        for of_expert in problem.statistics
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PlanningData:
    """Columns, statistics, rules and candidates of a problem, computed before anything is selected."""

    columns: Columns
    known_statistics: KnownStatistics
    rules: Rules
    candidates: Candidates
    reasons: Mapping[tuple[int, int], str]  # why tensors are read whole
    unknown: Mapping[tuple[int, int], str]  # why nothing is known of tensors that are planned by blocks
    sample_E: NDArray[np.int64]
    side_E: NDArray[np.int64]  # bytes of indices: read to make any plan
    full_E: NDArray[np.int64]


def _planning_data(problem: PlanningProblem, *, samples: bool) -> _PlanningData:
    columns = lay_out_columns(problem.tasks, problem.resolution.expert_models, problem.block_elements, problem.unread)
    known_ET, unusable = match_statistics(problem, columns)
    rules = evaluate_rules(problem, columns, known_ET)
    # what a sample does not know of a whole tensor it takes from what it reads
    lacking = row_reasons(problem, columns) if samples else rules.lacking
    by_rows = {key for key, reason in lacking.items() if reason == REASON_ROWS}
    ladders = build_ladders(columns, operator_named(problem.operator), problem.block_elements)
    known_statistics = gather_statistics(problem, columns, known_ET, ladders, with_octaves=rules.trims)
    of_units = dict.fromkeys(units(columns), REASON_UNIT)
    unknown = {key: reason for key, reason in unusable.items() if key not in ladders}
    reasons = {**of_units, **lacking}
    if not samples:
        reasons = {key: unknown.pop(key, reason) for key, reason in reasons.items()}
    whole_ET = np.zeros_like(known_ET)
    for e, t in reasons:
        whole_ET[e, t] = True
    cost_EB = read_costs(columns, ladders)
    for e, t in by_rows:  # cut between rows: no block is free alone, a page at each cut may be read twice
        inside = columns.of_tensor(t)
        known_statistics.free_EB[e, inside] = known_statistics.free_EB[e, inside].all()
        source = columns.source(e, t)
        step = source.granularity_bytes if isinstance(source, TensorEntry) else PAGE_BYTES
        cost_EB[e, inside] += 0 if step == 1 else step
    for (e, t), ladder in ladders.items():
        cost_EB[e, columns.of_tensor(t)] = ladder.cost_KB[-1]
    candidates = replace(
        find_candidates(columns, cost_EB, known_statistics, whole_ET, ladders),
        request_bytes_E=np.array(problem.request_bytes or np.zeros(columns.n_experts), np.int64),
    )
    sample_E, side_E = _sample_costs(problem), _side_costs(problem)
    full_E = full_costs(candidates, sample_E) + side_E + _unread_lower_bounds(problem)
    return _PlanningData(columns, known_statistics, rules, candidates, reasons, unknown, sample_E, side_E, full_E)


def _side_costs(problem: PlanningProblem) -> NDArray[np.int64]:
    """Return the bytes of each index that is read to make the plan."""
    indices = [None if e in problem.unread else model.checkpoint.encoded for e, model in enumerate(problem.experts)]
    return np.array([0 if index is None else index.cost_bytes for index in indices], np.int64)


def _unread_lower_bounds(problem: PlanningProblem) -> NDArray[np.int64]:
    """Return a lower bound on the full cost of each expert whose index is not read."""
    indices = [model.checkpoint.encoded if e in problem.unread else None for e, model in enumerate(problem.experts)]
    return np.array([0 if index is None else index.least_bytes for index in indices], np.int64)


def _sample_costs(problem: PlanningProblem) -> NDArray[np.int64]:
    """Return the bytes to compute each expert's content id, 0 where it is known or not needed."""
    is_random = operator_named(problem.operator).is_random
    costs = [
        sample_cost_bytes(model.checkpoint) if is_random and model.content_id is None and e not in problem.unread else 0
        for e, model in enumerate(problem.experts)
    ]
    return np.array(costs, np.int64)


def _check_indices(data: _PlanningData, budget_bytes: int) -> None:
    """Refuse a budget smaller than the indices that were read to make the plan."""
    side_bytes = int(data.side_E.sum())
    if side_bytes > budget_bytes:
        message = f"{budget_bytes} bytes do not hold the indices of packed experts: {side_bytes} bytes, read to plan"
        raise LimitError.of("plan.budget-index", "--budget", message, "raise --budget")


def _check_on_omit(problem: PlanningProblem, data: _PlanningData, on_omit: OnOmit) -> None:
    if on_omit is OnOmit.RENORMALIZE and any(average is None for average in data.rules.average_T):
        message = f"'{problem.operator}' without normalised weights has nothing to renormalise"
        raise RecipeError.of(
            "plan.on-omit", "--where-omitted", message, "use operator 'linear' with normalize, or --where-omitted keep"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """A ranking of everything that can be read, which gives a plan for every budget.

    `budget_bytes` is the requested budget, or what the target error needs. Law: for `a >= b` the prefix of the order
    that `plan(a)` reads holds that of `plan(b)`, without adjustment of densities.
    """

    problem: PlanningProblem
    policy: Policy
    options: PlanningChoices
    budget_bytes: int
    data: _PlanningData
    score_EB: NDArray[np.float64]
    items: Items
    order_I: Order
    cosine_TEE: NDArray[np.float64]
    adjustments: tuple[Fallback, ...]
    enough_bytes: int | None = None  # what the target error needs
    error_by_prefix: dict[int, float] = field(default_factory=dict)  # expected errors by the bytes selected for

    @property
    def full_cost_bytes(self) -> int:
        """The cost of reading every expert in full."""
        return int(self.data.full_E.sum())

    def select(self, budget_bytes: int) -> Selection:
        """Select within the budget, indices included; a smaller one if that is expected to lose less.

        The errors that an outlook tells are estimated on the way, where they cost little more.
        """
        return self.select_in_order(self._wanted_bytes(budget_bytes, tells_outlook=True))

    def _wanted_bytes(self, budget_bytes: int, *, tells_outlook: bool = False) -> int:
        wanted_bytes = budget_bytes if self.enough_bytes is None else min(budget_bytes, self.enough_bytes)
        if not self._compares_budgets:
            return wanted_bytes
        compared = self._compared_budgets()
        larger_bytes = self._half_more_bytes(wanted_bytes, compared) if tells_outlook else 0
        beside = [nbytes for nbytes in compared if nbytes <= larger_bytes]

        def errors_of(budgets: Sequence[int]) -> list[float]:
            return self._errors_at([*budgets, *beside])[: len(budgets)]

        return least_error_budget(wanted_bytes, compared, errors_of)

    def _half_more_bytes(self, spent_bytes: int, compared: Sequence[int]) -> int:
        """Return the budget whose error an outlook tells beside one that spends `spent_bytes`."""
        half_more_bytes = spent_bytes + max(1, spent_bytes // 2)
        larger = (nbytes for nbytes in compared if nbytes >= half_more_bytes)
        return min(next(larger, self.full_cost_bytes), self.full_cost_bytes)

    def _compared_budgets(self) -> tuple[int, ...]:
        return compared_budgets(self.full_cost_bytes, self.least_useful_bytes() or 0)

    def select_in_order(self, budget_bytes: int) -> Selection:
        """Select in the policy's order within the budget, indices included; see `select_items`."""
        data, left_bytes = self.data, budget_bytes - int(self.data.side_E.sum())
        if self._samples:
            selection = self._sample(left_bytes)
        else:
            selection = select_items(data.candidates, self.items, self.order_I, data.sample_E, left_bytes)
        return replace(selection, planned_E=selection.planned_E + data.side_E)

    @property
    def _samples(self) -> bool:
        return self.policy is Policy.SAMPLE

    def _positions(self) -> PositionOrder:
        """Order positions for a sample: by importance, by the tensors' norms if all are on record, or all alike."""
        data, columns = self.data, self.data.columns
        names = [task.name for task in columns.tasks]
        if self.problem.importance is not None:
            weight_T = tensor_weights(data.candidates, total_T=np.array([self.problem.importance[n] for n in names]))
        elif self._is_informed():
            energy_T = np.bincount(columns.tensor_B, self.score_EB.sum(axis=0), len(columns.tasks))
            weight_T = tensor_weights(data.candidates, norm_T=np.sqrt(energy_T))
        else:
            weight_T = tensor_weights(data.candidates)
        number_B = position_numbers(names, columns, self.options.selection_seed)
        return order_positions(data.candidates, number_B, weight_T, data.sample_E)

    def _sample(self, budget_bytes: int) -> Selection:
        """Draw positions within the budget.

        Raises:
            UnsupportedError: `plan.sample-whole`, it would hold parts of a tensor that is read whole or not at all.
        """
        data, columns = self.data, self.data.columns
        selection = select_positions(data.candidates, self._positions(), budget_bytes)
        assert selection.probability_T is not None
        is_cut_T = (selection.probability_T < 1) & (np.diff(columns.first_T) > 1)
        for (e, t), reason in sorted(data.reasons.items()) if budget_bytes > 0 else ():
            if is_cut_T[t]:
                where = f"expert '{self.problem.experts[e].text}', tensor '{columns.tasks[t].name}'"
                message = f"a sample reads parts of it, which is read whole or not at all: {reason}"
                raise UnsupportedError.of("plan.sample-whole", where, message, "give --select norm, or --budget 100%")
        return selection

    @property
    def _compares_budgets(self) -> bool:
        """Whether a smaller budget may be expected to lose less, as far as that is known."""
        data = self.data
        is_by_rate = self.policy is Policy.NORM and data.rules.is_additive
        is_by_rate &= self.options.on_omit is OnOmit.KEEP  # else one expert more in a block may be worse than none
        has_one_cost_each = not data.candidates.ladders and not data.sample_E.any()
        has_followers = bool(len(data.candidates.followers()[0]))
        if self.policy in (Policy.RANDOM, Policy.SAMPLE) or (is_by_rate and has_one_cost_each and not has_followers):
            return False
        return len(self.items) > 0 and self._is_informed()

    def _is_informed(self) -> bool:
        """Whether something is known of every tensor that could be read."""
        columns = self.data.columns
        silent_ET = columns.silent_ET() | (np.diff(columns.first_T) == 0)
        return not self.problem.unread and bool((self.data.known_statistics.informed_ET | silent_ET).all())

    def _error_at(self, budget_bytes: int) -> float:
        return self._errors_at([budget_bytes])[0]

    def _errors_at(self, budgets_bytes: Sequence[int]) -> list[float]:
        """Compute the expected errors of selections in the policy's order; those of several together cost less."""
        new = [nbytes for nbytes in dict.fromkeys(budgets_bytes) if nbytes not in self.error_by_prefix]
        for start in range(0, len(new), _SELECTIONS_AT_ONCE):
            together = new[start : start + _SELECTIONS_AT_ONCE]
            energy_SET2 = self._energies(self.select_in_order(nbytes) for nbytes in together)
            self.error_by_prefix.update(zip(together, map(expected_error, energy_SET2), strict=True))
        return [self.error_by_prefix[nbytes] for nbytes in budgets_bytes]

    def expected_error(self, budget_bytes: int) -> float:
        """Compute the expected error of a budget."""
        return self._error_at(self._wanted_bytes(budget_bytes))

    def outlook(self, plan: Plan) -> Outlook | None:
        """Estimate what a plan of this ranking loses, and what half as much again would leave; None if not known."""
        if self._samples or not self._is_informed():
            return None
        spent_bytes = max(plan.budget_bytes, plan.planned_bytes)
        larger_bytes = self._half_more_bytes(spent_bytes, self._compared_budgets())
        selected = replace(self, enough_bytes=None)  # beyond a target error too
        return Outlook(
            _three_digits(self.expected_error(plan.budget_bytes)),
            larger_bytes,
            _three_digits(selected.expected_error(larger_bytes)),
            is_least=not is_error_complete(self.data.columns, self.data.rules),
        )

    def least_useful_bytes(self) -> int | None:
        """Return the smallest budget under which something is read; None where there is nothing to read.

        Of an expert whose index is not read only that cost is known.
        """
        side_bytes = int(self.data.side_E.sum())
        indices = (self.problem.experts[e].checkpoint.encoded for e in sorted(self.problem.unread))
        least = [side_bytes + index.cost_bytes for index in indices if index is not None]
        if self._samples:
            first_bytes = self._positions().least_bytes
            least += [] if first_bytes is None else [side_bytes + first_bytes]
        elif len(self.items):
            begins_I = np.ones(len(self.items), np.bool_)  # a block's first step, or a whole tensor
            flat_S = self.items.flat_I[: self.items.n_single]
            begins_I[1 : self.items.n_single] = flat_S[1:] != flat_S[:-1]
            cost_I = self.items.cost_I + self.data.sample_E[self.items.expert_I]
            least.append(side_bytes + int(cost_I[begins_I].min()))
        return min(least, default=None)

    def _index_bytes(self) -> int:
        """Return the cost of the indices of all packed experts."""
        indices = (expert.checkpoint.encoded for expert in self.problem.experts)
        return sum(index.cost_bytes for index in indices if index is not None)

    def check_usefulness(self, plan: Plan) -> None:
        """Refuse a plan of a positive budget that reads nothing though there is something to read.

        Raises:
            LimitError: `plan.budget-useless`, it names the smallest useful budget, as far as the indices are known.
        """
        least = self.least_useful_bytes()
        accesses = (access for tensor in plan.tensors for access in tensor.access)
        if (
            self.options.target_error is None
            and least is not None
            and not any(access.blocks or access.shared for access in accesses)
        ):
            message = f"nothing that could be read fits {plan.budget_bytes} bytes: the result would be the base"
            hint = f"the smallest useful budget is {least}B; 0 reads nothing of the experts"
            if self.problem.unread:
                hint = f"give more than the {self._index_bytes()} bytes of all indices; 0 reads nothing of the experts"
            raise LimitError.of("plan.budget-useless", "--budget", message, hint)

    def cheapest_bytes(self) -> int:
        """Find the smallest budget whose expected error is at most `options.target_error`.

        Raises:
            LimitError: `plan.target-error`, the requested budget does not reach it.
            UnsupportedError: `plan.target-unknown`, some tensors have no statistics, so no error can be estimated.
        """
        data, target = self.data, self.options.target_error
        silent_ET = data.columns.silent_ET() | (np.diff(data.columns.first_T) == 0)
        unknown_E = (~data.known_statistics.informed_ET & ~silent_ET).any(axis=1)
        if unknown_E.any() or target is None:
            name = self.problem.experts[int(np.flatnonzero(unknown_E)[0])].text
            message = "has tensors without statistics, so that its error cannot be estimated"
            raise UnsupportedError.of(
                "plan.target-unknown", name, message, "run `mergepipe analyze` first, or pack it beside its base"
            )
        error = self.expected_error(self.budget_bytes)
        if error > target:
            message = f"the error that is expected within {self.budget_bytes} bytes is {error:.4g}, not {target:g}"
            raise LimitError.of("plan.target-error", "--target-error", message, "raise --budget or --target-error")
        low, high = 0, self.budget_bytes
        for compared in self._compared_budgets() if self._compares_budgets else ():
            if compared < high:
                low, high = (compared + 1, high) if self.expected_error(compared) > target else (low, compared)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.expected_error(middle) <= target else (middle + 1, high)
        return high if self._compares_budgets else self.select(high).planned_bytes

    def _energies(self, selections: Iterable[Selection]) -> NDArray[np.float64]:
        on_omit = self.options.on_omit
        return expected_energies(self.data.candidates, selections, self.score_EB, self.data.rules, on_omit)

    def plan(self, budget_bytes: int) -> Plan:
        """Plan what `select` selects; notices name the budget that is asked for, which reuse may let a plan exceed."""
        problem, data, candidates = self.problem, self.data, self.data.candidates
        selection = self.select(budget_bytes)
        says_error = not self._samples and (bool(candidates.ladders) or self.options.target_error is not None)
        energy_ET2 = self._energies([selection])[0] if says_error else None
        bound, no_bound = _bound(data, selection, self.options.on_omit, self.cosine_TEE)
        tensors = planned_tensors(candidates, selection, data.rules, energy_ET2)
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
            models=planned_models(problem, data.full_E, selection.planned_E, data.side_E),
            tensors=tensors,
            fallbacks=(
                *unread_fallbacks(problem, self.budget_bytes),
                *(() if self._samples else self._statistics_fallbacks()),
                *starved_fallbacks(problem, candidates, selection, self.budget_bytes),
                *no_bound,
                *self._unspent(budget_bytes, selection.planned_bytes),
                *self._target_fallback(energy_ET2),
            ),
            adjustments=self.adjustments,
            bound=bound,
            error_is_least=energy_ET2 is not None and self._is_lower_bound(energy_ET2),
        )

    def _statistics_fallbacks(self) -> tuple[Fallback, ...]:
        """Build the notices on what is not known, or not exactly, of the experts."""
        problem, data = self.problem, self.data
        return (
            *whole_tensor_fallbacks(problem, data.columns, data.reasons),
            *unknown_fallbacks(problem, data.columns, data.unknown),
            *estimate_fallbacks(problem, data.columns, data.known_statistics, data.rules),
        )

    def _unspent(self, budget_bytes: int, planned_bytes: int) -> tuple[Fallback, ...]:
        """Build a notice if a good part of the budget is left; what reaches a target error is meant to leave some."""
        if self.options.target_error is not None:
            return ()
        wanted_bytes = self._wanted_bytes(budget_bytes, tells_outlook=True)
        return unspent_fallbacks(budget_bytes, wanted_bytes, planned_bytes, self.full_cost_bytes)

    def _target_fallback(self, energy_ET2: NDArray[np.float64] | None) -> tuple[Fallback, ...]:
        """Build a notice if the expected error is only a lower bound of the target error."""
        target = self.options.target_error
        if target is None or energy_ET2 is None or not self._is_lower_bound(energy_ET2):
            return ()
        reason = f"of '{self.problem.operator}' with these parameters only a part of what is lost can be expected"
        return (Fallback("target error", f"the error may be larger than {target:g}", reason),)

    def _is_lower_bound(self, energy_ET2: NDArray[np.float64]) -> bool:
        return expected_error(energy_ET2) > 0 and not is_error_complete(self.data.columns, self.data.rules)


def _cost_of(access: Access, candidates: Candidates, e: int, t: int) -> NDArray[np.int64]:
    """Compute the bytes that an access costs, by block."""
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


def _cosines(problem: PlanningProblem, data: _PlanningData, policy: Policy) -> NDArray[np.float64]:
    if policy is Policy.CONFLICT or data.rules.is_additive:
        return tensor_cosines(problem, data.columns, data.known_statistics.known_ET)
    return np.zeros((0, 0, 0))


def _order(
    items: Items,
    data: _PlanningData,
    score_EB: NDArray[np.float64],
    cosine_TEE: NDArray[np.float64],
    policy: Policy,
    selection_seed: int,
) -> Order:
    if not len(items):
        return np.zeros(0, np.int64)
    match policy:
        case Policy.SAMPLE:
            return np.arange(len(items))  # unused: positions are drawn
        case Policy.NORM:
            return norm_order(items, ~data.known_statistics.informed_ET[items.expert_I, items.tensor_I])
        case Policy.RANDOM:
            return random_order(items, selection_seed)
        case Policy.CONFLICT:
            amplitude_EB = amplitudes(score_EB, data.columns, data.rules)
            return conflict_order(items, data.candidates, amplitude_EB, cosine_TEE)


def _bound(
    data: _PlanningData, selection: Selection, on_omit: OnOmit, cosine_TEE: NDArray[np.float64]
) -> tuple[OmissionBound | None, tuple[Fallback, ...]]:
    if not data.rules.is_additive or selection.drawn_B is not None:
        return None, ()
    present_EB = selection.read_EB | selection.served_EB | data.known_statistics.free_EB
    left_EB = norms_left(data.candidates, selection)
    bound = omission_bound(data.columns, data.known_statistics, data.rules, present_EB, left_EB, on_omit, cosine_TEE)
    if isinstance(bound, NoBound):
        return None, (Fallback("omission bound", "none is given", bound.reason),)
    return bound, ()


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
