"""Make plans from a recipe, the catalog and a budget; read them back, and run them against unchanged inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import Evidence
from mergepipe.checkpoints.contract import Checkpoint, LeveledTensor
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import ConflictError, LimitError, NotFoundError, Problem, RecipeError, UnsupportedError
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.options import PlanOptions, check_seed, default_memory_bytes, default_threads
from mergepipe.planning.budget import BudgetRequest, parse_budget, parse_target_error
from mergepipe.planning.choices import AdjustPolicy, OnOmit, PlanningChoices, Policy
from mergepipe.planning.plan import NOTHING_READ, Plan, PlannedModel
from mergepipe.planning.plan_json import parse_plan
from mergepipe.planning.planner import rank_blocks
from mergepipe.planning.problem import PlanningModel, PlanningProblem
from mergepipe.recipes.parse.problems import LENIENT, USUAL, Strictness
from mergepipe.recipes.parse.recipe_files import reload_recipe
from mergepipe.recipes.parse.references import reference_text
from mergepipe.recipes.parse.yaml_source import RecipeText
from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.runs.budget.probe import Prober, probe_unknown
from mergepipe.runs.budget.speeds import BY_BYTES, PriceRequest
from mergepipe.runs.inputs.opened import (
    Inputs,
    PairStatistics,
    open_inputs,
    open_recipes,
    with_known_digests,
    with_parameters,
)
from mergepipe.runs.merge_run import MergeSettings, publish_merge
from mergepipe.runs.packing.indices import find_unread
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.runs.recovery.resume import Resume
from mergepipe.runs.reuse.blocks import EarlierSnapshots, reuse_candidates
from mergepipe.runs.reuse.planned import ReusingPlanner
from mergepipe.runs.settings import price_request
from mergepipe.runs.statistics_files import StatisticsBeside
from mergepipe.runs.stored_plan import plan_key, stored_plan
from mergepipe.snapshots.staging import staging_directory
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import EXPERT_PURPOSES, Usage
from mergepipe.storage.limits import PLAN_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.prices import Speeds
from mergepipe.storage.stores import Stores

PACKED_BLOCK_ELEMENTS = 8 * DEFAULT_BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request for a plan. Without `block_elements` the block size follows the experts.

    Under strictness an expert of which nothing is read is an error. `probes`: experts of which nothing is known are
    sampled.
    """

    budget: BudgetRequest
    policy: Policy
    choices: PlanningChoices
    block_elements: int | None
    allow_dropped: tuple[str, ...] = ()
    reuse: bool = False
    pricing: PriceRequest = BY_BYTES
    strictness: Strictness = USUAL
    probes: bool = True

    @property
    def seed(self) -> int:
        """The seed of the random operators and of the policy `random`."""
        return self.choices.selection_seed


def plan_request(
    budget: str | float | None,
    target_error: str | float | None,
    options: PlanOptions,
    *,
    seed: int,
    allow_dropped: Sequence[str] = (),
    reuse: bool = False,
    strict: bool = False,
) -> PlanRequest:
    """Return what a plan is asked for.

    Raises:
        RecipeError: `budget.*`, neither a budget nor a target error, or one that cannot be; `option.error`.
    """
    if budget is None and target_error is None:
        raise RecipeError.of("budget.missing", "--budget", "nothing says what may be read", "give one, such as 25%")
    density = options.min_density
    choices = PlanningChoices(
        OnOmit(options.where_omitted),
        None if density is None else AdjustPolicy(density),
        check_seed(seed),
        None if target_error is None else parse_target_error(target_error),
    )
    return PlanRequest(
        parse_budget("100%" if budget is None else budget),
        Policy(options.select),
        choices,
        options.block_elements,
        tuple(allow_dropped),
        reuse,
        price_request(options),
        Strictness(strict or options.strict, options.lenient),
        options.probe,
    )


def make_plan(
    store: Store,
    inputs: Inputs,
    request: PlanRequest,
    link: CatalogLink,
    replaced: Path | None = None,
    speeds: Speeds | None = None,
    prober: Prober | None = None,
) -> Plan:
    """Plan a merge of opened inputs from the catalog, from indices of packed experts, and with a `prober` from samples.

    With `request.reuse`, what stands in earlier snapshots (that about to be `replaced` among them) is not charged.
    With `speeds` steps are priced in seconds.
    """
    inputs = with_known_digests(inputs, link)
    models = inputs.recipe.inputs()
    if inputs.intermediates:
        name = models[min(inputs.intermediates)].text
        message = "a budget does not reach into what another document makes"
        raise UnsupportedError.of("plan.intermediate", name, message, "merge that document first, into a snapshot")
    beside = StatisticsBeside(store, link.notices)
    known = link.use(lambda catalog: _lookup_known(catalog, inputs, beside)) or _lookup_known(None, inputs, beside)
    described = zip(models, inputs.checkpoints, known.content_ids, strict=True)
    block_elements = request.block_elements or _suitable_block(inputs, known)
    request_bytes = request.pricing.request_bytes(inputs, store, link.home)
    statistics, probe_bytes = known.statistics, (0,) * len(inputs.expert_models)
    if prober is not None:
        probe = probe_unknown(
            prober, inputs, known.statistics, request.budget, block_elements, link, max(request_bytes, default=0)
        )
        statistics, probe_bytes = probe.statistics, probe.cost_bytes
    problem = PlanningProblem(
        operator=inputs.recipe.operator.name,
        recipe=inputs.recipe.source_text,
        seed=request.seed,
        block_elements=block_elements,
        resolution=inputs.resolution,
        models=tuple(PlanningModel(model.text, checkpoint, identity) for model, checkpoint, identity in described),
        statistics=statistics,
        speeds=speeds,
        unread=find_unread(inputs, request.budget),
        probe_bytes=probe_bytes if any(probe_bytes) else (),
        request_bytes=request_bytes if any(request_bytes) else (),
    )
    ranking = rank_blocks(problem, request.budget, request.policy, request.choices)
    earlier = EarlierSnapshots(store, reuse_candidates(link, replaced) if request.reuse else (), link)
    ids = {model: identity or "" for model, identity in enumerate(known.content_ids)}
    plan = ReusingPlanner(
        ranking, inputs, lambda made: with_parameters(inputs, made).resolution.tasks, ids, earlier
    ).plan()
    if not request.budget.is_zero:
        ranking.check_usefulness(plan)
    if request.strictness.strict:
        _refuse_starved(plan)
    plan = replace(plan, vocabulary=_vocabulary(inputs), outlook=ranking.outlook(plan))
    paths = [reference_text(model) for model in models]
    return replace(plan, models=tuple(replace(m, path=path) for m, path in zip(plan.models, paths, strict=True)))


def _refuse_starved(plan: Plan) -> None:
    """Refuse a plan that reads nothing of an expert, whatever the reason.

    Raises:
        LimitError: `plan.expert-unread`, one problem for each such expert.
    """
    problems = [
        Problem("plan.expert-unread", fallback.where, f"{fallback.decision}: {fallback.reason}", "raise --budget")
        for fallback in plan.fallbacks
        if fallback.decision == NOTHING_READ
    ]
    if problems:
        raise LimitError(*problems)


def _suitable_block(inputs: Inputs, known: _KnownFacts) -> int:
    """Choose larger blocks where all experts are packed and have no statistics: fewer partial pages are read."""
    if any(known.statistics):
        return DEFAULT_BLOCK_ELEMENTS
    experts = [inputs.checkpoints[model] for model in inputs.expert_models]
    are_packed = all(any(isinstance(t, LeveledTensor) for t in expert.tensors.values()) for expert in experts)
    return PACKED_BLOCK_ELEMENTS if experts and are_packed else DEFAULT_BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class _KnownFacts:
    """Known content ids by model, and statistics by expert and task."""

    content_ids: tuple[str | None, ...]
    statistics: tuple[Mapping[str, TensorStatistics], ...]


def _lookup_known(catalog: Catalog | None, inputs: Inputs, beside: StatisticsBeside) -> _KnownFacts:
    pairs = PairStatistics(catalog, inputs, (Evidence.EXACT, Evidence.PROBE), beside)
    by_model: dict[int, dict[str, TensorStatistics]] = {model: {} for model in inputs.expert_models}
    for task in inputs.resolution.tasks:
        for slot, model in enumerate(task.expert_models):
            found = pairs.of(task, slot)
            if found is not None:
                by_model[model][task.name] = found
    content_ids = tuple(pairs.content_id(model) for model in range(len(inputs.checkpoints)))
    return _KnownFacts(content_ids, tuple(by_model.values()))


def plan_recipe(recipe: Location | RecipeText, request: PlanRequest, home: Path) -> Plan:
    """Plan a recipe."""
    store = Stores()
    inputs = open_inputs(recipe, store, request.allow_dropped, strictness=request.strictness)
    speeds = request.pricing.speeds(inputs, store, home, default_threads())
    with closing(CatalogLink(home, required=True)) as link:
        engine = EngineOptions(default_threads(), default_memory_bytes())
        prober = Prober(store, engine, _no_tick) if request.probes else None
        return make_plan(store, inputs, request, link, speeds=speeds, prober=prober)


def run_budgeted(
    recipe: Location | RecipeText,
    out: Path,
    request: PlanRequest,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Plan and run at once; an unfinished merge of this very request is resumed with the plan that it was begun with.

    Where another process replaces a snapshot in between, of which blocks were to be reused, it is planned again
    without reuse, unless something was read of the experts already.
    """
    store = Stores()
    inputs = open_inputs(recipe, store, request.allow_dropped, strictness=settings.strictness)
    speeds = request.pricing.speeds(inputs, store, settings.home, settings.engine.threads)
    planned = Usage({}, {})

    def attempt(wanted: PlanRequest) -> MergeReport:
        nonlocal planned
        key = plan_key(inputs, repr(wanted))
        follows = settings.resume in (Resume.AUTO, Resume.REQUIRED)
        plan = stored_plan(staging_directory(out.absolute()), key) if follows else None
        with closing(CatalogLink(settings.home)) as link:
            if plan is None:
                prober = Prober(store, settings.engine, _no_tick) if wanted.probes else None
                plan = make_plan(store, inputs, wanted, link, out if settings.force else None, speeds, prober)
            planned = store.ledger.usage()
            merged, kept = with_parameters(inputs, plan), replace(settings, plan_key=key)
            return publish_merge(merged, plan, out, kept, store, link, started, on_progress)

    try:
        return attempt(request)
    except ConflictError as error:
        usage = store.ledger.usage()
        if error.code != "plan.reuse-gone" or any(usage[each] > planned[each] for each in EXPERT_PURPOSES):
            raise
    return attempt(replace(request, reuse=False))


def run_plan(
    plan: Plan, out: Path, settings: MergeSettings, *, started: float, on_progress: ProgressCallback | None
) -> MergeReport:
    """Run a stored plan against the inputs it was made for.

    Raises:
        ConflictError: `plan.input-changed`, an input is not what it was.
        NotFoundError: an input is gone.
    """
    store = Stores()
    with closing(CatalogLink(settings.home)) as link:
        inputs = _open_planned(plan, store, link)
        return publish_merge(with_parameters(inputs, plan), plan, out, settings, store, link, started, on_progress)


def _no_tick() -> None:
    """Samples are read in moments: nothing is reported."""


def read_plan(store: Store, path: Location) -> Plan:
    """Read a stored plan.

    Raises:
        NotFoundError: there is none.
        CorruptError, UnsupportedError: as `parse_plan`.
    """
    return parse_plan(store.read_small(path, PLAN_BYTES), path)


def _open_planned(plan: Plan, store: Store, link: CatalogLink) -> Inputs:
    recipe = reload_recipe(plan.recipe, store, {model.model: model.path for model in plan.models})
    if [reference_text(model) for model in recipe.inputs()] != [model.path for model in plan.models]:
        raise NotFoundError.of("plan.models", "plan", "its models are not those of its recipe", "make the plan again")
    inputs = open_recipes((recipe,), store, ("*",), strictness=LENIENT)  # it was accepted when the plan was made
    inputs = with_known_digests(inputs, link)
    bound = zip(plan.models, inputs.checkpoints, strict=True)
    problems = [problem for model, found in bound for problem in _changes(model, found)]
    if _vocabulary(inputs) != plan.vocabulary:
        message = "the tokenizers of its models are not those that it was made for"
        problems.append(Problem("plan.input-changed", "tokenizer", message, "make the plan again"))
    if problems:
        raise ConflictError(*problems)
    return inputs


def _vocabulary(inputs: Inputs) -> str | None:
    return None if inputs.alignment is None else inputs.alignment.digest


def _changes(model: PlannedModel, checkpoint: Checkpoint) -> Sequence[Problem]:
    """List the files that changed since the plan was made. Equal SHA-256 digests say that one did not."""
    then = {file.name: file for file in model.files}
    now = {file.name: file for file in checkpoint.files}
    same = {
        name
        for name in now.keys() & then.keys()
        if (now[name].size_bytes, now[name].header_digest) == (then[name].size_bytes, then[name].header_digest)
        and (now[name].version == then[name].version or now[name].sha256 == then[name].sha256 is not None)
    }
    hint = "make the plan again (`mergepipe analyze`, then `mergepipe plan`)"
    return [
        Problem("plan.input-changed", f"{model.path}/{name}", "changed since the plan was made", hint)
        for name in sorted((now.keys() | then.keys()) - same)
    ]
