"""Make plans from a recipe, the catalog and a budget; read them back, and run them against unchanged inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import Evidence
from mergepipe.checkpoints.contract import Checkpoint, Graded
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS
from mergepipe.errors import ConflictError, NotFoundError, Problem, RecipeError, UnsupportedError
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.options import PlanOptions, check_seed, default_threads
from mergepipe.planning.budget import BudgetRequest, parse_budget
from mergepipe.planning.choices import AdjustPolicy, OnOmit, PlanningChoices, Policy
from mergepipe.planning.plan import Plan, PlannedModel
from mergepipe.planning.plan_json import parse_plan
from mergepipe.planning.planner import rank_blocks
from mergepipe.planning.problem import PlanningModel, PlanningProblem
from mergepipe.recipes.parse.problems import LENIENT, USUAL, Strictness
from mergepipe.recipes.parse.recipe_files import reload_recipe
from mergepipe.recipes.parse.references import reference_text
from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, PairStatistics, open_inputs, open_recipes, with_parameters
from mergepipe.runs.merge_run import MergeSettings, publish_merge
from mergepipe.runs.packed_indices import find_unread
from mergepipe.runs.reuse.blocks import EarlierSnapshots, reuse_candidates
from mergepipe.runs.reuse.planned import ReusingPlanner
from mergepipe.runs.settings import price_request
from mergepipe.runs.speeds import BY_BYTES, PriceRequest
from mergepipe.storage.ledger import EXPERT_PURPOSES, Usage
from mergepipe.storage.limits import PLAN_BYTES
from mergepipe.storage.local import LocalStore
from mergepipe.storage.prices import Speeds
from mergepipe.storage.regular import read_small

PACKED_BLOCK_ELEMENTS = 8 * DEFAULT_BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request for a plan. Without `block_elements` the block size follows the experts."""

    budget: BudgetRequest
    policy: Policy
    choices: PlanningChoices
    block_elements: int | None
    allow_dropped: tuple[str, ...] = ()
    reuse: bool = False
    pricing: PriceRequest = BY_BYTES
    strictness: Strictness = USUAL

    @property
    def seed(self) -> int:
        """The seed of the random operators and of the policy `random`."""
        return self.choices.selection_seed


def plan_request(
    budget: str | None,
    target_error: float | None,
    options: PlanOptions,
    *,
    seed: int,
    allow_dropped: Sequence[str] = (),
    reuse: bool = False,
) -> PlanRequest:
    """Return what a plan is asked for.

    Raises:
        RecipeError: `budget.*`, neither a budget nor a target error, or one that cannot be; `option.error`.
    """
    if target_error is not None and not target_error >= 0:
        raise RecipeError.of("option.error", "--target-error", f"{target_error:g} was given", "it is 0 or more")
    if budget is None and target_error is None:
        raise RecipeError.of("budget.missing", "--budget", "nothing says what may be read", "give one, such as 25%")
    density = options.adjust_min_density
    choices = PlanningChoices(
        OnOmit(options.on_omit),
        None if density is None else AdjustPolicy(density),
        check_seed(seed),
        target_error,
    )
    return PlanRequest(
        parse_budget("100%" if budget is None else budget),
        Policy(options.select),
        choices,
        options.block_elements,
        tuple(allow_dropped),
        reuse,
        price_request(options),
        Strictness(options.strict, options.lenient),
    )


def make_plan(
    inputs: Inputs,
    request: PlanRequest,
    link: CatalogLink,
    replaced: Path | None = None,
    speeds: Speeds | None = None,
) -> Plan:
    """Plan a merge of opened inputs from the catalog; reads no tensor data except indices of packed experts.

    With `request.reuse`, what stands in earlier snapshots (that about to be `replaced` among them) is not charged.
    With `speeds` steps are priced in seconds.
    """
    models = inputs.recipe.inputs()
    if inputs.intermediates:
        name = models[min(inputs.intermediates)].text
        message = "a budget does not reach into what another document makes"
        raise UnsupportedError.of("plan.intermediate", name, message, "merge that document first, into a snapshot")
    known = link.use(lambda catalog: _lookup_known(catalog, inputs))
    if known is None:
        known = _KnownFacts((None,) * len(models), ({},) * len(inputs.expert_models))
    described = zip(models, inputs.checkpoints, known.content_ids, strict=True)
    problem = PlanningProblem(
        operator=inputs.recipe.operator.name,
        recipe=inputs.recipe.source_text,
        seed=request.seed,
        block_elements=request.block_elements or _suitable_block(inputs, known),
        resolution=inputs.resolution,
        models=tuple(PlanningModel(model.text, checkpoint, identity) for model, checkpoint, identity in described),
        statistics=known.statistics,
        speeds=speeds,
        unread=find_unread(inputs, request.budget),
    )
    ranking = rank_blocks(problem, request.budget, request.policy, request.choices)
    earlier = EarlierSnapshots(LocalStore(), reuse_candidates(link, replaced) if request.reuse else ())
    ids = {model: identity or "" for model, identity in enumerate(known.content_ids)}
    plan = ReusingPlanner(
        ranking, inputs, lambda made: with_parameters(inputs, made).resolution.tasks, ids, earlier
    ).plan()
    plan = replace(plan, vocabulary=_vocabulary(inputs))
    paths = [reference_text(model) for model in models]
    return replace(plan, models=tuple(replace(m, path=path) for m, path in zip(plan.models, paths, strict=True)))


def _suitable_block(inputs: Inputs, known: _KnownFacts) -> int:
    """Choose larger blocks where all experts are packed and have no statistics: fewer partial pages are read."""
    if any(known.statistics):
        return DEFAULT_BLOCK_ELEMENTS
    experts = [inputs.checkpoints[model] for model in inputs.expert_models]
    are_packed = all(any(isinstance(t, Graded) for t in expert.tensors.values()) for expert in experts)
    return PACKED_BLOCK_ELEMENTS if experts and are_packed else DEFAULT_BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class _KnownFacts:
    """Known content ids by model, and statistics by expert and task."""

    content_ids: tuple[str | None, ...]
    statistics: tuple[Mapping[str, TensorStatistics], ...]


def _lookup_known(catalog: Catalog, inputs: Inputs) -> _KnownFacts:
    pairs = PairStatistics(catalog, inputs, (Evidence.EXACT, Evidence.PROBE))
    rows = [pairs.row(model) for model in range(len(inputs.checkpoints))]
    by_model: dict[int, dict[str, TensorStatistics]] = {model: {} for model in inputs.expert_models}
    for task in inputs.resolution.tasks:
        for slot, model in enumerate(task.expert_models):
            found = pairs.of(task, slot)
            if found is not None:
                by_model[model][task.name] = found
    return _KnownFacts(tuple(row.content_id if row else None for row in rows), tuple(by_model.values()))


def plan_recipe(recipe: Path, request: PlanRequest, home: Path) -> Plan:
    """Plan the recipe at a path."""
    store = LocalStore()
    inputs = open_inputs(recipe, store, request.allow_dropped, strictness=request.strictness)
    speeds = request.pricing.speeds(inputs, store, home, default_threads())
    with closing(CatalogLink(home, required=True)) as link:
        return make_plan(inputs, request, link, speeds=speeds)


def run_budgeted(
    recipe: Path,
    out: Path,
    request: PlanRequest,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Plan and run at once.

    Where another process replaces a snapshot in between, of which blocks were to be reused, it is planned again
    without reuse, unless something was read of the experts already.
    """
    store = LocalStore()
    inputs = open_inputs(recipe, store, request.allow_dropped, strictness=settings.strictness)
    speeds = request.pricing.speeds(inputs, store, settings.home, settings.engine.threads)
    planned = Usage({}, {})

    def attempt(wanted: PlanRequest) -> MergeReport:
        nonlocal planned
        with closing(CatalogLink(settings.home)) as link:
            plan = make_plan(inputs, wanted, link, out if settings.force else None, speeds)
            planned = store.ledger.usage()
            return publish_merge(with_parameters(inputs, plan), plan, out, settings, store, link, started, on_progress)

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
    store = LocalStore()
    inputs = _open_planned(plan, store)
    with closing(CatalogLink(settings.home)) as link:
        return publish_merge(with_parameters(inputs, plan), plan, out, settings, store, link, started, on_progress)


def read_plan(path: Path) -> Plan:
    """Read a stored plan.

    Raises:
        NotFoundError: there is none.
        CorruptError, UnsupportedError: as `parse_plan`.
    """
    return parse_plan(read_small(path, PLAN_BYTES), path)


def _open_planned(plan: Plan, store: LocalStore) -> Inputs:
    recipe = reload_recipe(plan.recipe, {model.model: Path(model.path) for model in plan.models})
    if [reference_text(model) for model in recipe.inputs()] != [model.path for model in plan.models]:
        raise NotFoundError.of("plan.models", "plan", "its models are not those of its recipe", "make the plan again")
    inputs = open_recipes((recipe,), store, ("*",), strictness=LENIENT)  # it was accepted when the plan was made
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
    """List the files that changed since the plan was made."""
    now = {file.name: (file.size_bytes, file.version, file.header_digest) for file in checkpoint.files}
    then = {file.name: (file.size_bytes, file.version, file.header_digest) for file in model.files}
    hint = "make the plan again (`mergepipe analyze`, then `mergepipe plan`)"
    return [
        Problem("plan.input-changed", f"{model.path}/{name}", "changed since the plan was made", hint)
        for name in sorted(now.keys() | then.keys())
        if now.get(name) != then.get(name)
    ]
