"""Merge and run as users call them: a run in full, under a budget, to a target loss, or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergepipe.core.flags import public_call
from mergepipe.errors import RecipeError
from mergepipe.jobs.merge_run import run_budgeted, run_merge, run_plan
from mergepipe.options import ExecutorName, MergeOptions, OutputOptions, RunOptions
from mergepipe.planning.plan import Plan
from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.runs.inputs import recipe_of
from mergepipe.runs.merge_settings import merge_settings
from mergepipe.runs.stored_plan import read_plan


@public_call(MergeOptions)
def merge(
    recipe: str | Path | Mapping[str, object],
    out: str | Path,
    *,
    options: OutputOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> MergeReport:
    """Merge the models of a recipe and publish the result at `out`, complete or not at all.

    `out` is a folder, one file (its name ends in .safetensors or .gguf, and its record is a folder next to it), a
    prefix of a bucket (`s3://bucket/prefix`, `gs://`, `az://`), which must hold nothing yet, or a repository of the Hub
    (`hf://org/name`). Without a `budget` all experts are read in full. With one, a plan is made and run. With a
    `target_loss` budgets are tried until it is met; `tried` of the report has the bytes and the loss of each.

    Args:
        options: what is merged and how; the fields of `MergeOptions` are keywords, too: `budget="25%"`, `seed=7`.
    """
    made = MergeOptions.of(options, fields)
    source, settings = recipe_of(recipe), merge_settings(made, out, on_progress)
    on_cluster = made.executor == ExecutorName.RAY
    if made.budget is None and made.target_loss is None and not on_cluster:
        return run_merge(source, settings)
    from mergepipe.jobs.evaluate import TARGET_BUDGETS, merge_to_target, parse_evaluation
    from mergepipe.jobs.plan import plan_request

    first_budget = made.budget if made.target_loss is None else TARGET_BUDGETS[0]
    request = plan_request(first_budget, made, everything=first_budget is None)
    if made.target_loss is not None and made.evaluate is not None:
        if settings.destination is not None:
            message, hint = "evaluates each merge in a folder of this machine", "merge into a folder"
            raise RecipeError.of("option.conflict", "--target-loss", message, hint)
        return merge_to_target(source, request, settings, parse_evaluation(made.evaluate), made.target_loss)
    if on_cluster:
        from mergepipe.jobs.merge_on_ray import run_merge_on_ray

        return run_merge_on_ray(source, request, made, settings)
    return run_budgeted(source, request, settings)


@public_call(OutputOptions)
def run(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> MergeReport:
    """Run a plan, given or stored, and publish the result at `out`; refused if an input changed since it was made.

    Args:
        options: `OutputOptions`: threads, memory and the catalog, and what is written how.
    """
    made, decided = OutputOptions.of(options, fields), read_plan(plan)
    settings = merge_settings(made.common(MergeOptions, seed=decided.seed), out, on_progress)
    if made.executor == ExecutorName.RAY:
        from mergepipe.jobs.merge_on_ray import run_plan_on_ray

        return run_plan_on_ray(decided, made, settings)
    return run_plan(decided, settings)
