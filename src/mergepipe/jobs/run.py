"""Run plans: a stored one against unchanged inputs, or one that is made for the merge at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mergepipe.jobs.plan import PlanRequest, make_plan
from mergepipe.planning.plan import Plan
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.runs.inputs.opened import open_inputs, with_parameters
from mergepipe.runs.inputs.planned import open_planned
from mergepipe.runs.merge_run import MergeSettings, publish_merge
from mergepipe.runs.progress import Resume
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.runs.stored_plan import plan_key, stored_plan
from mergepipe.snapshots.manifest import Manifest
from mergepipe.snapshots.staging import staging_directory
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


def run_budgeted(
    recipe: Location | RecipeText,
    out: Path,
    request: PlanRequest,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
    before_publish: Callable[[Manifest, Path], None] | None = None,
) -> MergeReport:
    """Plan and run at once; an unfinished merge of this very request is resumed with the plan it was begun with."""
    store = Stores(settings=settings.engine.remote)
    inputs = open_inputs(
        recipe, store, request.allow_dropped, strictness=settings.strictness,
        keeps_absolute_paths=settings.absolute_paths,
    )  # fmt: skip
    settings.base_model_ids.check_names(inputs.leaf_models)
    key = plan_key(inputs, repr(request))
    follows = settings.resume in (Resume.AUTO, Resume.REQUIRED)
    plan = stored_plan(staging_directory(out.absolute()), key) if follows else None
    with closing(CatalogLink(settings.home)) as link:
        if plan is None:
            plan = make_plan(store, inputs, request, link)
        merged, keyed = with_parameters(inputs, plan), replace(settings, plan_key=key)
        return publish_merge(merged, plan, out, keyed, store, link, started, on_progress, before_publish)


def run_plan(
    plan: Plan, out: Path, settings: MergeSettings, *, started: float, on_progress: ProgressCallback | None
) -> MergeReport:
    """Run a stored plan against the inputs it was made for."""
    store = Stores(settings=settings.engine.remote)
    with closing(CatalogLink(settings.home)) as link:
        inputs = open_planned(plan, store, link)
        settings.base_model_ids.check_names(inputs.leaf_models)
        return publish_merge(with_parameters(inputs, plan), plan, out, settings, store, link, started, on_progress)
