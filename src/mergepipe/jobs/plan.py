"""Make plans from a recipe, the catalog and a budget, and read them back; report what a recipe would do."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.checkpoints.contract import LeveledTensor, Unchanged
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS
from mergepipe.core.flags import public_call
from mergepipe.core.strict_json import digest_of
from mergepipe.core.units import format_bytes
from mergepipe.errors import LimitError, Problem, RecipeError, UnsupportedError
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.options import CheckOptions, PlanOptions, home_of
from mergepipe.planning.budget import BudgetRequest, OnOmit, PlanningChoices, Policy, parse_budget, retry_reserve_bytes
from mergepipe.planning.plan import NOTHING_READ, READS_ALL, Access, ImportanceRecord, Plan, PlannedTensor
from mergepipe.planning.planner import Ranking, rank_blocks
from mergepipe.planning.problem import PlanningModel, PlanningProblem
from mergepipe.recipes.model_location import locate_model
from mergepipe.recipes.references import reference_text
from mergepipe.recipes.tasks import Action, MergeTask
from mergepipe.recipes.tokenizer_source import OMP
from mergepipe.reports import CheckReport, CopiedTensor, Fallback, ModelUse
from mergepipe.runs.budget import find_unread, planned_cost
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, open_inputs, recipe_of, with_known_digests
from mergepipe.runs.known_statistics import KnownStatistics
from mergepipe.runs.small_files import planned_sidecars
from mergepipe.runs.work import output_of, spectral_cost
from mergepipe.snapshots.staging import needed_bytes
from mergepipe.storage.contract import Store
from mergepipe.storage.stores import Stores

if TYPE_CHECKING:
    from mergepipe.recipes.recipe import ModelInput


Statistics = tuple[Mapping[str, TensorStatistics], ...]
"""By expert, what is known of each task's tensor."""
PACKED_BLOCK_ELEMENTS = 8 * DEFAULT_BLOCK_ELEMENTS
SAMPLED_UNIT_ELEMENTS = 32 * 1024
SMALL_UNITS_BYTES = 1 << 38
"""The block of a sample of local files: 64 KiB of bfloat16; and the largest output it is for: a plan holds all."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request for a plan, by its options but for the home folder; its `repr` tells whether two are equal.

    Without a `policy` it is a sample where that can be, see `make_plan`. With `everything` all experts are read in
    full, no budget limits that, and nothing has to be known.
    """

    budget: BudgetRequest
    policy: Policy | None
    options: PlanOptions
    everything: bool


@public_call(PlanOptions)
def plan(
    recipe: str | Path | Mapping[str, object],
    budget: str | float | None = None,
    *,
    everything: bool = False,
    options: PlanOptions | None = None,
    **fields: Any,
) -> Plan:
    """Decide what a merge reads under a budget, from statistics, and from headers and indices of the inputs.

    Reads no tensor data.

    Args:
        budget: bytes to be read from expert files at most (`4GiB`), or a share of what reading all would cost (`25%`,
            0.25); 0 reads nothing of the experts.
        everything: plan the full merge, without a budget: for `run_part`.
        options: how the budget is spent.
    """
    made = PlanOptions.of(options, fields)
    request = plan_request(budget, made, everything=everything)
    store, link = Stores(), CatalogLink(home_of(made.home), required=True)
    plan = make_plan(store, open_inputs(recipe_of(recipe), store, made), request, link)
    unused = [Fallback("catalog", *notice.partition(": ")[::2]) for notice in link.notices]
    return replace(plan, fallbacks=(*unused, *plan.fallbacks))


def plan_request(budget: str | float | None, options: PlanOptions, *, everything: bool = False) -> PlanRequest:
    """Return what a plan is asked for; `everything` takes the place of a budget."""
    if everything:
        if budget is not None:
            message = "it reads everything, so --budget has no effect"
            raise RecipeError.of("option.conflict", "--all", message, "give only one")
        budget = "100%"
    if budget is None:
        raise RecipeError.of("option.missing", "--budget", "no budget is given", "give one, such as 25%")
    policy = None if options.select is None else Policy(options.select)
    if policy is None and (everything or options.where_omitted != OnOmit.KEEP):
        policy = Policy.NORM
    elif policy is None and options.importance is not None:
        policy = Policy.SAMPLE
    return PlanRequest(parse_budget(budget), policy, options.common(PlanOptions, home=None), everything)


def make_plan(store: Store, inputs: Inputs, request: PlanRequest, link: CatalogLink) -> Plan:
    """Plan a merge of opened inputs from the catalog, and indices of packed experts.

    Where no policy is asked for a sample is planned; blocks by norm where a sample would have to read packed experts
    whole, whose indices have norms. What is on record counts for policies that were asked for, and for nothing else.
    """
    inputs = with_known_digests(inputs, link)
    models = inputs.recipe.inputs()
    if inputs.intermediates or inputs.plain:
        name = models[min(inputs.intermediates, default=0)].text
        message = "a budget cannot be used with several documents or with out_dtype: like_base"
        raise UnsupportedError.of("plan.unsupported", name, message, "merge that document first, into a snapshot")
    if inputs.recipe.tokenizer is not None and inputs.recipe.tokenizer.new_tokens == OMP:
        where, message = (
            inputs.recipe.tokenizer.where,
            "a budget cannot be used with rows that are computed from all others",
        )
        raise UnsupportedError.of("plan.unsupported", where, message, "write new_tokens: subword")
    statistics: Statistics = ({},) * len(inputs.expert_models)
    if request.policy in (None, Policy.SAMPLE):
        named = zip(models, inputs.checkpoints, strict=True)
        planned_models = tuple(PlanningModel(model.text, checkpoint) for model, checkpoint in named)
    else:
        known = KnownStatistics(store, link.home, link.notices, beside=True)
        planned_models, on_record = _lookup_known(known, inputs)
        statistics = statistics if request.everything else on_record
    plan_by = partial(_plan_by, store, inputs, request, planned_models, statistics)
    try:
        plan = plan_by(request.policy or Policy.SAMPLE)
    except UnsupportedError as error:  # the rule needs what a sample does not read
        if request.policy is not None or not all(_are_packed(inputs)):
            raise
        notice = Fallback("policy", "blocks are read by norm, none are sampled", error.problems[0].message)
        plan = plan_by(Policy.NORM)
        plan = replace(plan, fallbacks=(notice, *plan.fallbacks))
    if request.policy in (Policy.NORM, Policy.PAPER, Policy.CONFLICT) and plan.planned_bytes < plan.full_cost_bytes:
        _check_footing(inputs, statistics, request.policy, link.notices)
    if request.options.strict:
        problems = [
            Problem("budget.too-small", fallback.where, f"{fallback.decision}: {fallback.reason}", "raise --budget")
            for fallback in plan.fallbacks
            if fallback.decision == NOTHING_READ
        ]
        if problems:
            raise LimitError(*problems)
    plan = replace(plan, vocabulary=inputs.vocabulary, recipe_notices=inputs.notices)
    if request.everything:
        plan = _of_everything(plan, inputs.resolution.tasks)
    paths = [reference_text(model) for model in models]
    return replace(plan, models=tuple(replace(m, path=path) for m, path in zip(plan.models, paths, strict=True)))


def _plan_by(
    store: Store,
    inputs: Inputs,
    request: PlanRequest,
    models: tuple[PlanningModel, ...],
    statistics: Statistics,
    policy: Policy,
) -> Plan:
    weighs_elements = any(model.numbers is not None for model in inputs.recipe.inputs())
    if weighs_elements and policy is not Policy.SAMPLE and not request.everything:
        message = f"weights by element are read with the elements they weigh, and policy '{policy}' parts them"
        raise UnsupportedError.of("plan.unsupported", "--select", message, "leave it out: a sample reads both")
    unit_elements = _sampled_unit(inputs, store) if policy is Policy.SAMPLE else _suitable_block(inputs, statistics)
    importance, options = None, request.options
    importance_place = None if options.importance is None else locate_model(store, options.importance)
    if importance_place is not None and not request.everything:
        from mergepipe.runs.importance import read_importance

        merged = [task for task in inputs.resolution.tasks if task.action is Action.MERGE]
        importance = read_importance(store, importance_place, merged)
    problem = PlanningProblem(
        operator=inputs.recipe.operator.name,
        recipe=inputs.recipe.source_text,
        seed=options.seed,
        block_elements=options.block_elements or unit_elements,
        resolution=inputs.resolution,
        models=models,
        statistics=statistics,
        unread=find_unread(inputs, request.budget),
        importance=importance,
    )
    choices = PlanningChoices(OnOmit(options.where_omitted), options.min_density, options.seed)
    ranking, budget_bytes = _with_reserve(rank_blocks(problem, request.budget, policy, choices), inputs, store)
    plan = _of_budget(ranking.plan(ranking.budget_bytes), budget_bytes)
    if not request.budget.is_zero:
        ranking.check_usefulness(plan)
    if importance_place is None or importance is None:
        return plan
    return replace(plan, importance=ImportanceRecord(str(importance_place.absolute()), digest_of(importance)))


def _are_dear(inputs: Inputs, store: Store) -> bool:
    """Whether requests for some expert cost anything, by the terms of its store: not by how fast a link is today."""
    return any(store.terms(inputs.checkpoints[model].path).request_cost_bytes for model in inputs.expert_models)


def _with_reserve(ranking: Ranking, inputs: Inputs, store: Store) -> tuple[Ranking, int]:
    """Return a ranking that leaves room for repeated requests where experts lie on servers, and the whole budget."""
    budget_bytes, full_bytes = ranking.budget_bytes, ranking.full_cost_bytes
    least_bytes = ranking.least_useful_bytes()
    if least_bytes is None or not _are_dear(inputs, store):
        return ranking, budget_bytes
    reserve_bytes = retry_reserve_bytes(budget_bytes, full_bytes)
    spent_bytes = budget_bytes - reserve_bytes
    return (replace(ranking, budget_bytes=spent_bytes) if spent_bytes >= least_bytes else ranking), budget_bytes


def _of_budget(plan: Plan, budget_bytes: int) -> Plan:
    """Return a plan with its whole budget; a reserve is told as a fallback."""
    reserve_bytes = budget_bytes - plan.budget_bytes
    if not reserve_bytes:
        return plan
    decision = f"{format_bytes(reserve_bytes)} are left for requests that fail and are repeated"
    told = Fallback("budget", decision, "experts lie on servers")
    return replace(plan, budget_bytes=budget_bytes, fallbacks=(told, *plan.fallbacks))


def _of_everything(plan: Plan, tasks: Sequence[MergeTask]) -> Plan:
    """Return the plan of the full merge, which computes everything from what it reads, as that does.

    Blocks that an index says equal the base are read as well: rules make something else of infinities in them.
    """
    task_of = {task.name: task for task in tasks}
    tensors = tuple(_read_whole(tensor, task_of[tensor.name], plan.block_elements) for tensor in plan.tensors)
    everything = replace(plan, policy=READS_ALL, tensors=tensors, fallbacks=())
    more = planned_cost(everything, tasks) - planned_cost(plan, tasks)
    return replace(
        everything,
        budget_bytes=plan.budget_bytes + more,
        planned_bytes=plan.planned_bytes + more,
        full_cost_bytes=plan.full_cost_bytes + more,
    )


def _read_whole(tensor: PlannedTensor, task: MergeTask, block_elements: int) -> PlannedTensor:
    """Plan to read all blocks of the experts that change a tensor; of the others there is nothing to read."""
    n_blocks = -(-tensor.n_elements // block_elements)
    all_blocks = ((0, n_blocks),) if n_blocks else ()
    accesses = []
    for source in task.experts:
        is_unchanged = isinstance(source, Unchanged)
        accesses.append(Access(free=all_blocks) if is_unchanged else Access(blocks=all_blocks))

    reads = tuple(dict.fromkeys(accesses))
    read_of = tuple(map(reads.index, accesses)) if len(reads) > 1 else ()
    return replace(tensor, reads=reads, read_of=read_of, cuts=(), products=())


def _are_packed(inputs: Inputs) -> tuple[bool, ...]:
    """Tell by expert whether it is packed: its index has norms."""
    return tuple(inputs.checkpoints[model].encoded is not None for model in inputs.expert_models)


def _check_footing(inputs: Inputs, statistics: Statistics, policy: Policy | None, notices: Sequence[str]) -> None:
    """Refuse to rank by norm experts of which nothing is known against others: hardly anything of them would be read.

    Raises:
        UnsupportedError: `plan.unsupported`, norms of some experts are known, and none of others that change tensors;
            `notices` may say why.
    """
    packed = _are_packed(inputs)
    are_known = [bool(known) or is_packed for known, is_packed in zip(statistics, packed, strict=True)]
    changing = {
        model
        for task in inputs.resolution.tasks
        for model, source in zip(task.expert_models, task.experts, strict=True)
        if task.action is Action.MERGE and not isinstance(source, Unchanged)
    }
    models = inputs.recipe.inputs()
    for model, is_known in zip(inputs.expert_models, are_known, strict=True):
        if any(are_known) and not is_known and model in changing:
            where = f"expert '{models[model].text}'"
            unused = "".join(f" ({notice})" for notice in notices)
            message = f"has no statistics{unused} and others have: by policy '{policy}' hardly anything of it is read"
            hint = "run `mergepipe analyze` on all models of the recipe, or leave --select out"
            raise UnsupportedError.of("plan.unsupported", where, message, hint)


def _suitable_block(inputs: Inputs, statistics: Statistics) -> int:
    """Choose larger blocks where all experts are packed and have no statistics: fewer partial pages are read."""
    if any(statistics):
        return DEFAULT_BLOCK_ELEMENTS
    experts = [inputs.checkpoints[model] for model in inputs.expert_models]
    are_packed = all(any(isinstance(t, LeveledTensor) for t in expert.tensors.values()) for expert in experts)
    return PACKED_BLOCK_ELEMENTS if experts and are_packed else DEFAULT_BLOCK_ELEMENTS


def _sampled_unit(inputs: Inputs, store: Store) -> int:
    """Choose the unit of a sample: a larger one for costly requests, encoded blocks, and models of very many units."""
    is_large = inputs.resolution.output_bytes > SMALL_UNITS_BYTES
    if is_large or any(_are_packed(inputs)) or _are_dear(inputs, store):
        return DEFAULT_BLOCK_ELEMENTS
    return SAMPLED_UNIT_ELEMENTS


def _lookup_known(known: KnownStatistics, inputs: Inputs) -> tuple[tuple[PlanningModel, ...], Statistics]:
    """Return the models with the content ids that are known of them, and the statistics on record."""
    by_model: dict[int, dict[str, TensorStatistics]] = {model: {} for model in inputs.expert_models}
    content_ids: list[str | None] = [None] * len(inputs.checkpoints)
    for task in inputs.resolution.tasks:
        for slot, model in enumerate(task.expert_models):
            statistics = known.of_task(inputs, task, slot)
            models = inputs.checkpoints[model], inputs.checkpoints[task.base_model]
            file = known.file(*models) if statistics is not None else None
            if statistics is not None and file is not None:
                by_model[model][task.name] = statistics
                content_ids[model], content_ids[task.base_model] = file.expert.content_id, file.base.content_id
    named = zip(inputs.recipe.inputs(), inputs.checkpoints, content_ids, strict=True)
    models_known = tuple(PlanningModel(model.text, checkpoint, content_id) for model, checkpoint, content_id in named)
    return models_known, tuple(by_model.values())


# --- report what a merge would do, without reading tensor data ---


@public_call(CheckOptions)
def check(
    recipe: str | Path | Mapping[str, object], *, options: CheckOptions | None = None, **fields: Any
) -> CheckReport:
    """Validate a recipe and its inputs without reading any tensor data."""
    made = CheckOptions.of(options, fields)
    store = Stores()
    inputs = open_inputs(recipe_of(recipe), store, made)
    opened, output, merged = inputs.recipe, output_of(inputs, made.shard_bytes), inputs.plain or inputs
    resolution, staged_bytes = merged.resolution, merged.resolution.output_bytes if inputs.plain else 0
    return CheckReport(
        recipe=str(opened.path),
        operator=opened.operator.name,
        models=_uses_of(merged, tuple(map(_shown, opened.inputs()))),
        merged_tensors=resolution.n_merged,
        copied=tuple(CopiedTensor(task.name, task.reason) for task in resolution.tasks if task.action is Action.COPY),
        dropped=resolution.dropped,
        base_bytes=resolution.base_bytes,
        expert_bytes=resolution.expert_bytes,
        output_bytes=inputs.resolution.output_bytes,
        disk_bytes=needed_bytes(output.total_bytes + staged_bytes, planned_sidecars(inputs, store)),
        shards=len(output.shards),
        spectral=spectral_cost(resolution.tasks),
        free_bytes=shutil.disk_usage(Path.cwd()).free,
        recipe_notices=inputs.notices,
    )


def _shown(model: ModelInput) -> str:
    """Return a model as the recipe names it, with where that is if it is on another machine."""
    return model.text if model.path.is_local else f"{model.text} ({reference_text(model)})"


def _uses_of(inputs: Inputs, texts: Sequence[str]) -> tuple[ModelUse, ...]:
    """Count the tensors of each model that are read, and their bytes; `texts` are the models as they are shown."""
    counts = [0] * len(texts)
    read_bytes = [0] * len(texts)
    for task in inputs.resolution.tasks:
        experts = zip(task.expert_models, task.experts, strict=True)
        stored = [(model, source) for model, source in experts if source.stored]
        for model, source in ((task.base_model, task.base), *stored):
            counts[model] += 1
            read_bytes[model] += source.nbytes
    uses = zip(inputs.roles, texts, counts, read_bytes, strict=True)
    return tuple(ModelUse(*use) for use in uses)
