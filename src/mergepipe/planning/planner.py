"""Plan a merge: rank everything that can be read, and select within the budget. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.errors import LimitError, RecipeError, UnsupportedError
from mergepipe.operators.registry import operator_named
from mergepipe.operators.statistics import TensorStatistics, on_grid
from mergepipe.planning.assembly import (
    estimate_fallbacks,
    planned_models,
    planned_tensors,
    starved_fallbacks,
    unknown_fallbacks,
    unread_fallbacks,
    unspent_fallbacks,
    whole_tensor_fallbacks,
)
from mergepipe.planning.budget import AdjustPolicy, BudgetRequest, OnOmit, PlanningChoices, Policy
from mergepipe.planning.candidates import (
    REASON_UNIT,
    Candidates,
    Items,
    KnownStatistics,
    amplitudes,
    find_candidates,
    gather_statistics,
    make_items,
    match_statistics,
    score_blocks,
    units,
)
from mergepipe.planning.plan import Plan
from mergepipe.planning.problem import Columns, PlanningProblem, lay_out_columns, read_costs, sample_cost_bytes
from mergepipe.planning.rules import REASON_ROWS, Rules, build_ladders, evaluate_rules, row_reasons
from mergepipe.planning.sample import (
    PositionOrder,
    order_positions,
    position_numbers,
    select_positions,
    tensor_weights,
)
from mergepipe.planning.selection import (
    Order,
    Selection,
    ascending_steps,
    conflict_order,
    full_costs,
    norm_order,
    random_order,
    select_items,
    tensor_cosines,
)
from mergepipe.recipes.tasks import Action, MergeTask, TensorParameters
from mergepipe.reports import Fallback
from mergepipe.storage.ranges import PAGE_BYTES

# --- plan a merge: rank everything that can be read, and select within the budget. Pure ---


def plan_merge(problem: PlanningProblem, request: BudgetRequest, policy: Policy, options: PlanningChoices) -> Plan:
    """Choose which blocks of the experts are read under the budget `request`.

    Laws: the planned cost is at most the budget; nothing that is left out would fit as well, but of a sample, which
    takes positions in their order; a budget of the full cost reads everything; the same problem gives the same plan on
    any machine.
    """
    ranking = rank_blocks(problem, request, policy, options)
    return ranking.plan(ranking.budget_bytes)


def rank_blocks(problem: PlanningProblem, request: BudgetRequest, policy: Policy, options: PlanningChoices) -> Ranking:
    """Rank everything that can be read; see `plan_merge`."""
    samples = policy is Policy.SAMPLE
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
    score_EB = score_blocks(data.columns, data.known_statistics, data.rules, data.candidates.ladders)
    items = make_items(data.candidates, score_EB, data.known_statistics.informed_ET)
    order_I = ascending_steps(items, _order(items, problem, data, score_EB, policy, options.selection_seed))
    return Ranking(problem, policy, options, budget_bytes, data, score_EB, items, order_I, adjustments)


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
    candidates = find_candidates(columns, cost_EB, known_statistics, whole_ET, ladders)
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
        raise LimitError.of("budget.too-small", "--budget", message, "raise --budget")


def _check_on_omit(problem: PlanningProblem, data: _PlanningData, on_omit: OnOmit) -> None:
    if on_omit is OnOmit.RENORMALIZE and not data.rules.renormalizes:
        message = f"'{problem.operator}' without normalised weights has nothing to renormalise"
        raise RecipeError.of(
            "option.conflict",
            "--where-omitted",
            message,
            "use operator 'linear' with normalize, or --where-omitted keep",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """A ranking of everything that can be read, which gives a plan for every budget.

    `budget_bytes` is the requested budget. Law: for `a >= b` the prefix of the order
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
    adjustments: tuple[Fallback, ...]

    @property
    def full_cost_bytes(self) -> int:
        """The cost of reading every expert in full."""
        return int(self.data.full_E.sum())

    def select(self, budget_bytes: int) -> Selection:
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
        """Draw positions within the budget."""
        data, columns = self.data, self.data.columns
        selection = select_positions(data.candidates, self._positions(), budget_bytes)
        assert selection.probability_T is not None
        is_cut_T = (selection.probability_T < 1) & (np.diff(columns.first_T) > 1)
        for (e, t), reason in sorted(data.reasons.items()) if budget_bytes > 0 else ():
            if is_cut_T[t]:
                where = f"expert '{self.problem.experts[e].text}', tensor '{columns.tasks[t].name}'"
                message = f"a sample reads parts of it, which is read whole or not at all: {reason}"
                raise UnsupportedError.of("plan.unsupported", where, message, "give --select norm, or --budget 100%")
        return selection

    def _is_informed(self) -> bool:
        """Whether something is known of every tensor that could be read."""
        columns = self.data.columns
        silent_ET = columns.silent_ET() | (np.diff(columns.first_T) == 0)
        return not self.problem.unread and bool((self.data.known_statistics.informed_ET | silent_ET).all())

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
        """Refuse a plan of a positive budget that reads nothing though there is something to read."""
        accesses = (access for tensor in plan.tensors for access in tensor.access)
        reads = any(access.blocks or access.shared for access in accesses)
        if not reads and (least := self.least_useful_bytes()) is not None:
            message = f"nothing that could be read fits {plan.budget_bytes} bytes: the result would be the base"
            hint = f"the smallest useful budget is {least}B; 0 reads nothing of the experts"
            if self.problem.unread:
                hint = f"give more than the {self._index_bytes()} bytes of all indices; 0 reads nothing of the experts"
            raise LimitError.of("budget.too-small", "--budget", message, hint)

    def plan(self, budget_bytes: int) -> Plan:
        """Plan what `select` selects."""
        problem, data, candidates = self.problem, self.data, self.data.candidates
        selection = self.select(budget_bytes)
        parameters, tensors = planned_tensors(candidates, selection, data.rules)
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
            parameters=parameters,
            tensors=tensors,
            fallbacks=(
                *unread_fallbacks(problem, self.budget_bytes),
                *(() if self._samples else self._statistics_fallbacks()),
                *starved_fallbacks(problem, candidates, selection, self.budget_bytes),
                *unspent_fallbacks(budget_bytes, selection.planned_bytes, self.full_cost_bytes),
            ),
            adjustments=self.adjustments,
        )

    def _statistics_fallbacks(self) -> tuple[Fallback, ...]:
        """Build the notices on what is not known, or not exactly, of the experts."""
        problem, data = self.problem, self.data
        return (
            *whole_tensor_fallbacks(problem, data.columns, data.reasons),
            *unknown_fallbacks(problem, data.columns, data.unknown),
            *estimate_fallbacks(problem, data.columns, data.known_statistics, data.rules),
        )


def _order(
    items: Items,
    problem: PlanningProblem,
    data: _PlanningData,
    score_EB: NDArray[np.float64],
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
            cosine_TEE = tensor_cosines(problem, data.columns, data.known_statistics.known_ET)
            return conflict_order(items, data.candidates, amplitude_EB, cosine_TEE)


# --- lower densities under a tight budget: the papers' bounded adjustment of operator parameters ---
#
# A budget that holds the share `held` of what reading everything costs holds at most that share of the elements that an
# operator would keep of a delta. So an expert's density moves down to `max(min_density, held)`, never up and never
# below the bound. For operators that trim it is then raised to the next density whose cut the statistics know, so that
# thresholds stay exact; if there is none below the recipe's, it stays.


NO_DENSITY = "the operator has no density"


def adjust_densities(
    problem: PlanningProblem, policy: AdjustPolicy, held: float, *, needs_cut: bool
) -> tuple[PlanningProblem, tuple[Fallback, ...]]:
    """Lower the problem's densities to what `held` allows; return the new problem and every decision."""
    densities_E = [_known_densities(problem, e) if needs_cut else None for e in range(len(problem.experts))]
    adjuster = _Adjuster(problem, policy, held, densities_E)
    tasks = tuple(adjuster.adjusted(task) for task in problem.resolution.tasks)
    decisions = tuple(adjuster.decisions) or (
        Fallback(f"operator '{problem.operator}'", "nothing adjusted", NO_DENSITY),
    )
    return replace(problem, resolution=replace(problem.resolution, tasks=tasks)), decisions


def adjusted_density(density: float, min_density: float, held: float, known_densities: Sequence[float] | None) -> float:
    """Return the density to use instead of `density`: one of `known_densities` (if given) or `density` itself.

    Laws: never above `density`; never below `min(density, min_density)`; `density` where `held` is 1.
    """
    target = min(density, max(min_density, held))
    if known_densities is None:
        return target
    return min(
        (known_density for known_density in known_densities if target <= known_density < density), default=density
    )


def _known_densities(problem: PlanningProblem, expert: int) -> list[float]:
    """Return the densities whose cut is known in every analysed tensor."""
    density_sets = [set(statistics.densities_D.tolist()) for statistics in problem.statistics[expert].values()]
    return sorted(set.intersection(*density_sets)) if density_sets else []


class _Adjuster:
    """Adjusts the tasks one by one; each distinct set of parameters is adjusted once."""

    def __init__(
        self,
        problem: PlanningProblem,
        policy: AdjustPolicy,
        held: float,
        known_densities: Sequence[Sequence[float] | None],
    ) -> None:
        self.decisions: list[Fallback] = []
        self._texts = [model.text for model in problem.experts]
        self._expert_of = {model: e for e, model in enumerate(problem.resolution.expert_models)}
        self._policy = policy
        self._held = held
        self._known = known_densities
        self._done: dict[tuple[int, tuple[int, ...]], TensorParameters] = {}
        self._decided: set[tuple[int, float]] = set()

    def adjusted(self, task: MergeTask) -> MergeTask:
        if task.action is not Action.MERGE or not any("density" in expert for expert in task.parameters.experts):
            return task
        key = (id(task.parameters), task.expert_models)  # the problem keeps the parameters alive
        if key not in self._done:
            experts = tuple(
                {**parameters, "density": self._density(self._expert_of[model], float(parameters["density"]))}
                for model, parameters in zip(task.expert_models, task.parameters.experts, strict=True)
            )
            self._done[key] = replace(task.parameters, experts=experts)
        return replace(task, parameters=self._done[key])

    def _density(self, e: int, density: float) -> float:
        adjusted = adjusted_density(density, self._policy.min_density, self._held, self._known[e])
        if (e, density) not in self._decided:
            self._decided.add((e, density))
            decision = (
                f"density stays at {density:g}" if adjusted == density else f"density {density:g} -> {adjusted:g}"
            )
            reason = f"the budget holds {100 * self._held:.4g} % of everything; not below {self._policy.min_density:g}"
            self.decisions.append(Fallback(f"expert '{self._texts[e]}'", decision, reason))
        return adjusted
