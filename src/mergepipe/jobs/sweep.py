"""Sweep budgets: merge one recipe in full and under each budget, and measure the loss of fidelity."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.outcome import private_outputs
from mergepipe.errors import NotFoundError, RecipeError
from mergepipe.jobs.diff import distance, norm
from mergepipe.jobs.evaluate import parse_evaluation
from mergepipe.jobs.merge import run_merge, run_plan
from mergepipe.jobs.plan import make_plan, plan_request
from mergepipe.options import SWEEP_BUDGETS, MergeOptions, SweepOptions, home_of
from mergepipe.planning.budget import BudgetRequest, Policy, ShareBudget, parse_budget
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import ByteProgress, Progress, ProgressCallback, SweepPoint, SweepReport
from mergepipe.runs.budget import blocks_by_level, counts_of, verdict_of
from mergepipe.runs.inputs import open_inputs, recipe_of
from mergepipe.runs.work import CatalogLink, MergeSettings, merge_settings
from mergepipe.storage import owned
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

if TYPE_CHECKING:
    from mergepipe.core.flags import Options


def sweep(
    recipe: str | Path | Mapping[str, object],
    budgets: Sequence[str] = SWEEP_BUDGETS,
    *,
    options: Options | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> SweepReport:
    """Merge in full and under each budget, and measure bytes, time, and what is lost; nothing is recorded.

    Each budget gives the bytes of the merge under it. What is lost is the distance from the full merge, with `random`
    as a second policy, but for samples, of which it tells nothing; with `evaluate` it is the loss too.

    Args:
        options: `SweepOptions`: how each budget is spent, what is measured, threads, memory, the home folder.
    """
    made = SweepOptions.of(options, fields)
    if not budgets:
        raise RecipeError.of("option.invalid", "--budgets", "none is given", "give some, such as 10%,50%")
    work = None if made.work is None else Path(made.work)
    if work is not None and not work.is_dir():
        raise NotFoundError.of("storage.not-found", work, "no such directory", "make it, or give another with --work")
    parsed = [(text.strip(), parse_budget(text, "--budgets")) for text in budgets]
    with private_outputs(), tempfile.TemporaryDirectory(prefix="mergepipe-sweep-", dir=work) as directory:
        return _swept(recipe_of(recipe), parsed, made, Path(directory), on_progress)


def _swept(
    recipe: Location | RecipeText,
    budgets: Sequence[tuple[str, BudgetRequest]],
    options: SweepOptions,
    directory: Path,
    on_progress: ProgressCallback | None,
) -> SweepReport:
    """Merge in full, then under each budget (a text, and what it says); at most two outputs lie there at a time."""
    request = plan_request("100%", options)  # each budget takes the place of this one
    settings = merge_settings(options.common(MergeOptions, catalog=False, evaluate=None))
    evaluation = None if options.evaluate is None else parse_evaluation(options.evaluate)
    store, link = Stores(settings=settings.engine.remote), CatalogLink(home_of(options.home), required=True)

    def begin(label: str, name: str) -> MergeSettings:
        def report(progress: Progress) -> None:
            if on_progress is not None:
                on_progress(replace(progress, phase=label))

        return replace(settings, out=directory / name, started=time.perf_counter(), on_progress=report)

    def loss_of(folder: Path) -> float | None:
        return None if evaluation is None else evaluation.loss_of(folder)

    def meter(label: str, *checkpoints: Checkpoint) -> Callable[[int], None]:
        total_bytes = sum(checkpoint.tensor_bytes for checkpoint in checkpoints)
        return ByteProgress(on_progress, f"{label}: measure", total_bytes).add

    inputs = open_inputs(recipe, store, options.allow_dropped, strictness=options.strictness)
    requests = [budget for _, budget in budgets]
    some = next((one for one in requests if not one.is_zero and one != ShareBudget(Fraction(1))), requests[0])
    first_plan = make_plan(store, inputs, replace(request, budget=some), link)  # decides the policy, or what is refused
    policies = [Policy(first_plan.policy)]
    if policies[0] not in (Policy.SAMPLE, Policy.RANDOM) and evaluation is None:
        policies.append(Policy.RANDOM)
    full_settings = begin("full merge", "full")
    full_report = run_merge(recipe, full_settings)
    full = open_checkpoint(store, Location.local(full_settings.out))
    changed_norm = distance(store, full, inputs.base, meter("full merge", full, inputs.base))
    full_norm = norm(store, full, meter("full merge", full))
    full_loss = loss_of(full_settings.out)

    def point(text: str, budget: BudgetRequest, policy: Policy) -> SweepPoint:
        """Merge under a budget; errors are told by the norms of what the full merge changes, and of itself."""
        label, error = f"{text} {policy}", None
        begun = begin(label, "budgeted")
        plan = make_plan(store, inputs, replace(request, budget=budget, policy=policy), link)
        try:
            report = run_plan(plan, begun)
            if policy is not Policy.SAMPLE:  # of which distances tell nothing
                merged = open_checkpoint(store, Location.local(begun.out))
                error = distance(store, merged, full, meter(label, merged, full))
            loss = loss_of(begun.out)
        finally:
            owned.remove_tree(begun.out, ignore_errors=True)
        shares = [error / size if error is not None and size > 0 else None for size in (changed_norm, full_norm)]
        expert_bytes = report.expert_bytes + report.analysis_bytes
        return SweepPoint(
            budget=text,
            policy=plan.policy,
            budget_bytes=plan.budget_bytes,
            planned_bytes=plan.planned_bytes,
            expert_bytes=expert_bytes,
            share=expert_bytes / max(plan.full_cost_bytes, 1),
            seconds=report.seconds,
            error=shares[0],
            flattering_error=shares[1],
            loss=loss,
            levels=blocks_by_level(counts_of(plan).level_EL.sum(axis=0)),
            unread=tuple(expert.model for expert in verdict_of(plan).experts if not expert.share),
        )

    return SweepReport(
        recipe=recipe.path if isinstance(recipe, RecipeText) else recipe,
        operator=inputs.recipe.operator.name,
        policy=policies[0].value,
        seed=options.seed,
        dtypes=tuple(sorted({entry.dtype.name for entry in full.tensors.values()})),
        full_cost_bytes=first_plan.full_cost_bytes,
        full_expert_bytes=full_report.expert_bytes + full_report.analysis_bytes,
        full_seconds=full_report.seconds,
        changed_norm=changed_norm,
        full_norm=full_norm,
        points=tuple(point(text, budget, policy) for text, budget in budgets for policy in policies),
        experts=tuple(inputs.recipe.inputs()[model].text for model in inputs.expert_models),
        recipe_notices=inputs.notices,
        full_loss=full_loss,
    )
