"""Plan a merge: rank everything that can be read, select within the budget, and say what was decided. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.embedding_rows import embedding_ending
from mergepipe.core.records import encode
from mergepipe.core.strict_json import canonical_json
from mergepipe.core.units import first_names, format_bytes, plural
from mergepipe.errors import LimitError, RecipeError, UnsupportedError
from mergepipe.planning.budget import BudgetRequest, OnOmit, PlanningChoices, Policy
from mergepipe.planning.candidates import REASON_UNIT, Candidates, find_candidates
from mergepipe.planning.omission_bound import omission_bound
from mergepipe.planning.plan import ALL, NOTHING_READ, UNSPENT, Access, LeveledRuns, Plan, PlannedModel, PlannedTensor
from mergepipe.planning.problem import Columns, PlanningModel, PlanningProblem
from mergepipe.planning.selection import (
    ItemOrder,
    PositionOrder,
    Selection,
    conflict_order,
    make_items,
    norm_order,
    order_positions,
    paper_rates,
    position_numbers,
    random_order,
    tensor_weights,
)
from mergepipe.recipes.tasks import Action, MergeTask, TensorParameters
from mergepipe.reports import Fallback

MOST_UNSPENT = 1 / 20  # of a budget: less is what no further block fits into
SPREAD = "it was analysed by larger blocks; `mergepipe analyze --block-elements {}` makes them exact"
NO_DENSITY = "the operator has no density"


def rank_blocks(problem: PlanningProblem, request: BudgetRequest, policy: Policy, options: PlanningChoices) -> Ranking:
    """Rank everything that can be read under the budget `request`, for plans of the blocks of the experts.

    Laws: the planned cost is at most the budget; nothing that is left out would fit as well, but of a sample, which
    takes positions in their order; a budget of the full cost reads everything; the same problem gives the same plan on
    any machine.
    """
    samples = policy is Policy.SAMPLE
    candidates = find_candidates(problem, samples=samples)
    renormalizes = all(rule.influence.divided is not None for rule in candidates.rules)
    if options.on_omit is OnOmit.RENORMALIZE and not renormalizes:
        message = f"'{problem.operator}' without normalised weights has nothing to renormalise"
        hint = "use operator 'linear' with normalize, or --where-omitted keep"
        raise RecipeError.of("option.conflict", "--where-omitted", message, hint)
    full_bytes = int(candidates.full_E.sum())
    budget_bytes, side_bytes = request.limit_bytes(full_bytes), int(candidates.side_E.sum())
    if side_bytes > budget_bytes:
        message = f"planning reads indices of packed experts, {side_bytes}B: more than {budget_bytes}B"
        raise LimitError.of("budget.too-small", "--budget", message, "raise --budget")
    adjustments: tuple[Fallback, ...] = ()
    if options.min_density is not None:
        held = min(1.0, budget_bytes / max(1, full_bytes))
        problem, adjustments = adjust_densities(problem, options.min_density, held, needs_cut=candidates.trims)
        candidates = find_candidates(problem, samples=samples)
    order = _order(problem, candidates, policy, options.selection_seed)
    return Ranking(problem, policy, options, budget_bytes, candidates, order, adjustments)


def _order(
    problem: PlanningProblem, candidates: Candidates, policy: Policy, selection_seed: int
) -> ItemOrder | PositionOrder:
    if policy is Policy.SAMPLE:
        return sample_order(problem, candidates, selection_seed)
    items = make_items(candidates, in_steps=policy is Policy.NORM)
    is_unknown_I = ~candidates.informed_ET[items.expert_I, items.tensor_I]
    match policy:
        case Policy.NORM:
            order_I = norm_order(items, is_unknown_I)
        case Policy.PAPER:
            order_I = norm_order(replace(items, rate_I=paper_rates(items, candidates)), is_unknown_I)
        case Policy.RANDOM:
            order_I = random_order(items, selection_seed)
        case Policy.CONFLICT:
            order_I = conflict_order(items, candidates)
    return ItemOrder(candidates, items, order_I)


def sample_order(problem: PlanningProblem, candidates: Candidates, selection_seed: int) -> PositionOrder:
    """Order positions for a sample: by importance if it is known, else all alike, and those of embeddings last."""
    columns = candidates.columns
    names = [task.name for task in columns.tasks]
    if problem.importance is None:
        weight_T = tensor_weights(candidates)
        is_last_T = np.array([embedding_ending(name) is not None for name in names], np.bool_)
    else:
        weight_T = tensor_weights(candidates, np.array([problem.importance[name] for name in names]))
        is_last_T = np.zeros(len(names), np.bool_)
    return order_positions(candidates, position_numbers(names, columns, selection_seed), weight_T, is_last_T)


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
    candidates: Candidates
    order: ItemOrder | PositionOrder
    adjustments: tuple[Fallback, ...]

    @property
    def full_cost_bytes(self) -> int:
        """The cost of reading every expert in full."""
        return int(self.candidates.full_E.sum())

    def select(self, budget_bytes: int) -> Selection:
        """Select in the policy's order within the budget, indices included."""
        selection, candidates = self.order.select(budget_bytes), self.candidates
        if selection.probability_T is None or budget_bytes <= int(candidates.side_E.sum()):
            return selection
        is_cut_T = (selection.probability_T < 1) & (np.diff(candidates.columns.first_T) > 1)
        for (e, t), reason in sorted(candidates.whole.items()):
            if is_cut_T[t] and reason != REASON_UNIT:
                where = f"expert '{self.problem.experts[e].text}', tensor '{candidates.columns.tasks[t].name}'"
                message = f"a sample reads parts of it, which is read whole or not at all: {reason}"
                raise UnsupportedError.of("plan.unsupported", where, message, "give --select norm, or --budget 100%")
        return selection

    def least_useful_bytes(self) -> int | None:
        """Return the smallest budget under which something is read; None where there is nothing to read.

        Of an expert whose index is not read only that cost is known.
        """
        side_bytes = int(self.candidates.side_E.sum())
        indices = (self.problem.experts[e].checkpoint.encoded for e in sorted(self.problem.unread))
        least = [side_bytes + index.cost_bytes for index in indices if index is not None]
        if self.order.least_bytes is not None:
            least.append(self.order.least_bytes)
        return min(least, default=None)

    def check_usefulness(self, plan: Plan) -> None:
        """Refuse a plan of a positive budget that reads nothing though there is something to read."""
        reads = any(access.blocks for tensor in plan.tensors for access in tensor.reads)
        if not reads and (least := self.least_useful_bytes()) is not None:
            message = f"nothing that could be read fits {format_bytes(plan.budget_bytes)}: the result would be the base"
            hint = f"the smallest useful budget is {least}B; 0 reads nothing of the experts"
            if self.problem.unread:
                indices = (expert.checkpoint.encoded for expert in self.problem.experts)
                index_bytes = sum(index.cost_bytes for index in indices if index is not None)
                hint = f"give more than the {index_bytes}B of all indices; 0 reads nothing of the experts"
            raise LimitError.of("budget.too-small", "--budget", message, hint)

    def plan(self, budget_bytes: int) -> Plan:
        """Plan what `select` selects."""
        problem, candidates = self.problem, self.candidates
        selection = self.select(budget_bytes)
        parameters, tensors = _planned_tensors(candidates, selection)
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
            models=_planned_models(problem, candidates, selection),
            parameters=parameters,
            tensors=tensors,
            fallbacks=(
                *_unread_fallbacks(problem, self.budget_bytes),
                *(() if self.policy is Policy.SAMPLE else _statistics_fallbacks(problem, candidates)),
                *_starved_fallbacks(problem, candidates, selection, self.budget_bytes),
                *_last_fallbacks(problem, candidates, selection),
                *_unspent_fallbacks(budget_bytes, selection.planned_bytes, self.full_cost_bytes),
            ),
            adjustments=self.adjustments,
            bound=omission_bound(candidates, selection, self.options.on_omit),
        )


# --- the blocks of a selection as runs, by tensor ---


def _planned_tensors(
    candidates: Candidates, selection: Selection
) -> tuple[tuple[TensorParameters, ...], tuple[PlannedTensor, ...]]:
    """Return the distinct parameters, in order of first use, and one `PlannedTensor` per merged tensor."""
    columns, free_EB = candidates.columns, candidates.free_EB
    if selection.drawn_B is not None:  # what is equal to the base takes part in a sample's cuts where it was drawn
        free_EB = free_EB & selection.drawn_B
    accesses_ET = [_accesses(e, candidates, selection, free_EB[e]) for e in range(candidates.n_experts)]
    parameters: dict[bytes, TensorParameters] = {}
    place_of: dict[bytes, int] = {}
    tensors: list[PlannedTensor] = []
    for t, (task, rule) in enumerate(zip(columns.tasks, candidates.rules, strict=True)):
        key = canonical_json(encode(task.parameters))
        parameters.setdefault(key, task.parameters)
        experts = columns.participants(t)
        accesses = [accesses_ET[e][t] for e in experts]
        reads = tuple(dict.fromkeys(accesses))
        # what is read in full, or all that the rule needs of it, has its exact cut computed on the way, what is
        # sampled that of the sample
        cuts = [
            rule.cuts.get(e) if e not in rule.cut_errors or _is_omitted(e, t, candidates, selection) else None
            for e in experts
        ]
        products = [rule.products.get(e) for e in experts]
        tensors.append(
            PlannedTensor(
                name=task.name,
                n_elements=task.base.n_elements,
                parameters=place_of.setdefault(key, len(place_of)),
                models=tuple(experts),
                reads=reads,
                read_of=tuple(map(reads.index, accesses)) if len(reads) > 1 else (),
                cuts=tuple(cuts) if any(cut is not None for cut in cuts) else (),
                products=tuple(products) if any(product is not None for product in products) else (),
                probability=1.0 if selection.probability_T is None else float(selection.probability_T[t]),
            )
        )
    return tuple(parameters.values()), tuple(tensors)


def _is_omitted(e: int, t: int, candidates: Candidates, selection: Selection) -> bool:
    """Whether some blocks of an expert's tensor are omitted, or read below the level that the rule needs."""
    if selection.drawn_B is not None:
        return False
    inside, ladder = candidates.columns.of_tensor(t), candidates.ladders.get((e, t))
    needed = ALL if ladder is None else ladder.levels_K[-1]
    return bool(((selection.level_EB[e, inside] < needed) & ~candidates.free_EB[e, inside]).any())


def _accesses(e: int, candidates: Candidates, selection: Selection, free_B: NDArray[np.bool_]) -> list[Access]:
    columns, level_B = candidates.columns, selection.level_EB[e]
    values = (np.minimum(level_B, np.int8(1)), free_B.astype(np.int8), np.where(level_B < ALL, level_B, np.int8(0)))
    return [
        Access(tuple(run[:2] for run in blocks), tuple(run[:2] for run in free), levels)
        for blocks, free, levels in zip(*(_runs(value_B, columns) for value_B in values), strict=True)
    ]


def _runs(value_B: NDArray[np.int8], columns: Columns) -> list[LeveledRuns]:
    """Return per tensor the half-open runs of equal values above 0, counted from the tensor's first block."""
    begins_B = np.ones(len(value_B), np.bool_)
    begins_B[1:] = (value_B[1:] != value_B[:-1]) | (columns.tensor_B[1:] != columns.tensor_B[:-1])
    start_R = np.flatnonzero((value_B > 0) & begins_B)
    stop_R = np.flatnonzero((value_B > 0) & np.append(begins_B[1:], True)) + 1
    first_R = columns.first_T[columns.tensor_B[start_R]]
    parts = ((start_R - first_R).tolist(), (stop_R - first_R).tolist(), value_B[start_R].tolist())
    runs = list(zip(*parts, strict=True))
    return [tuple(runs[a:b]) for a, b in pairwise(np.searchsorted(start_R, columns.first_T).tolist())]


def _planned_models(problem: PlanningProblem, candidates: Candidates, selection: Selection) -> tuple[PlannedModel, ...]:
    """Build all `PlannedModel`s; models that are never an expert are read in full where they are the base."""
    expert_of = {model: e for e, model in enumerate(problem.resolution.expert_models)}
    models = []
    for index, model in enumerate(problem.models):
        e = expert_of.get(index)
        if e is None:
            base_bytes = problem.resolution.base_bytes_of(index)
            models.append(_planned_model("base", model, base_bytes, base_bytes))
        else:
            planned = _planned_model("expert", model, int(candidates.full_E[e]), int(selection.planned_E[e]))
            models.append(replace(planned, side_bytes=int(candidates.side_E[e])))
    return tuple(models)


def _planned_model(role: str, model: PlanningModel, full_cost_bytes: int, planned_bytes: int) -> PlannedModel:
    return PlannedModel(
        role=role,
        model=model.text,
        path=str(model.checkpoint.path),
        identity=model.identity,
        content_id=model.content_id,
        files=model.checkpoint.file_ids,
        full_cost_bytes=full_cost_bytes,
        planned_bytes=planned_bytes,
    )


# --- notices: decisions of a plan for want of something better ---


def _statistics_fallbacks(problem: PlanningProblem, candidates: Candidates) -> tuple[Fallback, ...]:
    """Build the notices on what is not known, or not exactly, of the experts: one for each of them and reason."""
    tasks = candidates.columns.tasks
    n_tensors, notices = len(tasks), []

    def tell(e: int, decision: str, reason: str) -> None:
        notices.append(Fallback(f"expert '{problem.experts[e].text}'", decision, reason))

    tensors: dict[tuple[int, str], list[int]] = defaultdict(list)
    for (e, t), reason in sorted(candidates.whole.items()):
        tensors[e, reason].append(t)
    for (e, reason), places in tensors.items():
        first = tasks[places[0]].name
        tell(e, f"{len(places)} of {n_tensors} tensors are read whole or not at all, from '{first}' on", reason)
    unknown = Counter((e, reason) for (e, _), reason in sorted(candidates.unknown.items()))
    for (e, reason), n in unknown.items():
        tell(e, f"the blocks of {n} of {n_tensors} tensors are spread over the model, whatever is in them", reason)
    for e in range(candidates.n_experts):
        n_spread = sum(expert == e for expert, _ in candidates.spread)
        errors = [rule.cut_errors[e] for rule in candidates.rules if e in rule.cut_errors]
        if n_spread:
            decision = f"the norms of {n_spread} of {n_tensors} tensors are those of larger blocks, spread evenly"
            tell(e, decision, SPREAD.format(problem.block_elements))
        if errors:
            reason = f"the share that is kept is off by at most {max(errors):.2g} where a tensor is read in part"
            tell(e, f"the magnitude cuts of {len(errors)} of {n_tensors} tensors are taken from histograms", reason)
    return tuple(notices)


def _unread_fallbacks(problem: PlanningProblem, budget_bytes: int) -> tuple[Fallback, ...]:
    """Build one notice for each expert whose index does not fit the budget."""
    fallbacks = []
    for e in sorted(problem.unread) if budget_bytes else ():
        model = problem.experts[e]
        cost = 0 if model.checkpoint.encoded is None else model.checkpoint.encoded.cost_bytes
        reason = f"its index costs {format_bytes(cost)}, for which {format_bytes(budget_bytes)} have no room as well"
        fallbacks.append(Fallback(f"expert '{model.text}'", NOTHING_READ, reason))
    return tuple(fallbacks)


def _unspent_fallbacks(budget_bytes: int, planned_bytes: int, full_bytes: int) -> tuple[Fallback, ...]:
    """Build the notice of a budget of which a good part is left though something could still be read."""
    unspent_bytes = budget_bytes - planned_bytes
    if planned_bytes >= full_bytes or unspent_bytes <= MOST_UNSPENT * budget_bytes:
        return ()
    reason = "what else could be read comes in larger pieces"
    return (Fallback("budget", f"{format_bytes(unspent_bytes)} of {format_bytes(budget_bytes)} {UNSPENT}", reason),)


def _last_fallbacks(problem: PlanningProblem, candidates: Candidates, selection: Selection) -> tuple[Fallback, ...]:
    """Build the notice of the tensors of which a sample holds nothing since all others come before them."""
    if selection.probability_T is None or not selection.planned_bytes:
        return ()
    left_out = [candidates.columns.tasks[t].name for t in np.flatnonzero(selection.probability_T == 0).tolist()]
    if not left_out:
        return ()
    reason = "embeddings and output heads are read after all other tensors; --importance sets another order"
    if problem.importance is not None:
        reason = "their importance is 0, or next to nothing"
    decision = f"{first_names(left_out)}: equal to the base, nothing of the experts is read"
    return (Fallback(plural(len(left_out), "tensor"), decision, reason),)


def _starved_fallbacks(
    problem: PlanningProblem, candidates: Candidates, selection: Selection, budget_bytes: int
) -> tuple[Fallback, ...]:
    """Build one notice for each expert that differs from the base and of which the budget reads nothing."""
    if not budget_bytes:
        return ()
    contributes_E = selection.read_EB.any(axis=1)
    differs_E = (~candidates.free_EB).any(axis=1)
    unread_E = np.isin(np.arange(candidates.n_experts), list(problem.unread))
    reason = f"within {format_bytes(budget_bytes)} the blocks of other experts come first"
    return tuple(
        Fallback(f"expert '{problem.experts[e].text}'", NOTHING_READ, reason)
        for e in np.flatnonzero(differs_E & ~contributes_E & ~unread_E).tolist()
    )


# --- lower densities under a tight budget: the papers' bounded adjustment of operator parameters ---
#
# A budget that holds the share `held` of what reading everything costs holds at most that share of the elements that an
# operator would keep of a delta. So an expert's density moves down to `max(min_density, held)`, never up and never
# below the bound. For operators that trim it is then raised to the next density whose cut the statistics know, so that
# thresholds stay exact; if there is none below the recipe's, it stays.


def adjust_densities(
    problem: PlanningProblem, min_density: float, held: float, *, needs_cut: bool
) -> tuple[PlanningProblem, tuple[Fallback, ...]]:
    """Lower the problem's densities to what `held` allows; return the new problem and every decision."""
    known_E = [_known_densities(problem, e) if needs_cut else None for e in range(len(problem.experts))]
    expert_of = {model: e for e, model in enumerate(problem.resolution.expert_models)}
    adjusted: dict[tuple[int, float], float] = {}
    made: dict[tuple[int, tuple[int, ...]], TensorParameters] = {}  # each distinct set of parameters is adjusted once

    def with_densities(task: MergeTask) -> MergeTask:
        if task.action is not Action.MERGE or not any("density" in expert for expert in task.parameters.experts):
            return task
        key = (id(task.parameters), task.expert_models)  # the problem keeps the parameters alive
        if key not in made:
            pairs = [
                (expert_of[model], float(parameters["density"]))
                for model, parameters in zip(task.expert_models, task.parameters.experts, strict=True)
            ]
            for e, density in pairs:
                adjusted.setdefault((e, density), adjusted_density(density, min_density, held, known_E[e]))
            experts = zip(task.parameters.experts, pairs, strict=True)
            made[key] = replace(
                task.parameters, experts=tuple({**expert, "density": adjusted[pair]} for expert, pair in experts)
            )
        return replace(task, parameters=made[key])

    tasks = tuple(with_densities(task) for task in problem.resolution.tasks)
    reason = f"the budget holds {100 * held:.4g} % of everything; not below {min_density:g}"
    decisions = tuple(
        Fallback(
            f"expert '{problem.experts[e].text}'",
            f"density stays at {density:g}" if new == density else f"density {density:g} -> {new:g}",
            reason,
        )
        for (e, density), new in adjusted.items()
    )
    nothing = Fallback(f"operator '{problem.operator}'", "nothing adjusted", NO_DENSITY)
    return replace(problem, resolution=replace(problem.resolution, tasks=tasks)), decisions or (nothing,)


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
