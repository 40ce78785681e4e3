"""Plans: made from a recipe, the catalog and a budget; stored, read back, and run against unchanged inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.budget_request import BudgetRequest
from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import Evidence, ModelRow
from mergepipe.errors import ConflictError, NotFoundError, Problem
from mergepipe.plan import Plan, PlannedModel
from mergepipe.plan_reading import parse_plan
from mergepipe.planner.planning import plan_merge
from mergepipe.planner.problem import PlanningModel, PlanningProblem, PlanOptions, Policy
from mergepipe.readers.base import Checkpoint
from mergepipe.readers.hf import open_checkpoint
from mergepipe.recipe.load import reload_recipe
from mergepipe.recipe.resolve import Action, MergeTask, Resolution, TensorParameters, resolve
from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.statistics import TensorStatistics
from mergepipe.storage.local import LocalStore, os_error
from mergepipe.workflows.merging import Inputs, MergeSettings, open_inputs, publish_merge
from mergepipe.workflows.recording import CatalogLink

MAX_PLAN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is asked for."""

    budget: BudgetRequest
    policy: Policy
    options: PlanOptions
    block_elements: int


def make_plan(inputs: Inputs, request: PlanRequest, link: CatalogLink, seed: int) -> Plan:
    """Plan a merge of opened inputs from what the catalog knows; reads no tensor data."""
    known = link.use(lambda catalog: _what_is_known(catalog, inputs))
    if known is None:
        known = _Known(None, (None,) * len(inputs.experts), ({},) * len(inputs.experts))
    recipe = inputs.recipe
    experts = zip(recipe.experts(), inputs.experts, known.content_ids, strict=True)
    problem = PlanningProblem(
        operator=recipe.operator.name,
        recipe=recipe.source_text,
        seed=seed,
        block_elements=request.block_elements,
        resolution=inputs.resolution,
        base=PlanningModel(recipe.anchor().text, inputs.base, known.base_content_id),
        experts=tuple(PlanningModel(model.text, checkpoint, identity) for model, checkpoint, identity in experts),
        statistics=known.statistics,
    )
    plan = plan_merge(problem, request.budget, request.policy, request.options)
    paths = [recipe.anchor().path, *(model.path for model in recipe.experts())]
    models = tuple(replace(model, path=str(path)) for model, path in zip(plan.models, paths, strict=True))
    return replace(plan, models=models)


@dataclass(frozen=True, slots=True)
class _Known:
    base_content_id: str | None
    content_ids: tuple[str | None, ...]
    statistics: tuple[dict[str, TensorStatistics], ...]


def _what_is_known(catalog: Catalog, inputs: Inputs) -> _Known:
    base_row = catalog.model_for(inputs.base)
    rows = [catalog.model_for(expert) for expert in inputs.experts]
    return _Known(
        base_row.content_id if base_row else None,
        tuple(row.content_id if row else None for row in rows),
        tuple(_statistics(catalog, row, base_row) for row in rows),
    )


def _statistics(catalog: Catalog, row: ModelRow | None, base_row: ModelRow | None) -> dict[str, TensorStatistics]:
    if row is None or base_row is None:
        return {}
    return dict(catalog.statistics(row, base_row, accept=(Evidence.EXACT, Evidence.PROBE)))


def plan_recipe(recipe: Path, request: PlanRequest, home: Path, seed: int) -> Plan:
    """Plan the recipe at a path."""
    inputs = open_inputs(recipe, LocalStore())
    with closing(CatalogLink(home, required=True)) as link:
        return make_plan(inputs, request, link, seed)


def run_budgeted(
    recipe: Path,
    out: Path,
    request: PlanRequest,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Plan and run at once."""
    store = LocalStore()
    inputs = open_inputs(recipe, store)
    with closing(CatalogLink(settings.home)) as link:
        plan = make_plan(inputs, request, link, settings.seed)
        return publish_merge(_with_parameters(inputs, plan), plan, out, settings, store, link, started, on_progress)


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
        return publish_merge(_with_parameters(inputs, plan), plan, out, settings, store, link, started, on_progress)


def read_plan(path: Path) -> Plan:
    """Read a stored plan.

    Raises:
        NotFoundError: there is none.
        CorruptError, UnsupportedError: as `parse_plan`.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise os_error(error, path, "reading the plan") from error
    return parse_plan(raw, path)


def _open_planned(plan: Plan, store: LocalStore) -> Inputs:
    recipe = reload_recipe(plan.recipe, {model.model: Path(model.path) for model in plan.models})
    checkpoints = [open_checkpoint(store, Path(model.path)) for model in plan.models]
    problems = [p for model, found in zip(plan.models, checkpoints, strict=True) for p in _changes(model, found)]
    if problems:
        raise ConflictError(*problems)
    base, experts = checkpoints[0], tuple(checkpoints[1:])
    if [model.path for model in recipe.experts()] != [Path(model.path) for model in plan.models[1:]]:
        raise NotFoundError.of("plan.models", "plan", "its models are not those of its recipe", "make the plan again")
    return Inputs(recipe, base, experts, resolve(recipe, base, experts))


def _changes(model: PlannedModel, found: Checkpoint) -> Sequence[Problem]:
    """Files that are not what the plan was made from."""
    now = {file.name: (file.size_bytes, file.mtime_ns, file.header_digest) for file in found.files}
    then = {file.name: (file.size_bytes, file.mtime_ns, file.header_digest) for file in model.files}
    hint = "make the plan again (`mergepipe analyze`, then `mergepipe plan`)"
    return [
        Problem("plan.input-changed", f"{model.path}/{name}", "changed since the plan was made", hint)
        for name in sorted(now.keys() | then.keys())
        if now.get(name) != then.get(name)
    ]


def _with_parameters(inputs: Inputs, plan: Plan) -> Inputs:
    """The inputs with the plan's parameters in force: a plan may have adjusted them."""
    planned = {tensor.name: tensor for tensor in plan.tensors}

    def adjusted(task: MergeTask) -> MergeTask:
        tensor = planned.get(task.name)
        if tensor is None or task.action is not Action.MERGE:
            return task
        return replace(task, parameters=TensorParameters(tensor.globals, tensor.anchor, tensor.experts))

    resolution = inputs.resolution
    return replace(inputs, resolution=Resolution(tuple(map(adjusted, resolution.tasks)), resolution.dropped))
