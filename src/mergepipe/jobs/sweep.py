"""Sweep budgets: merge one recipe in full and under each budget, and measure what the budgets lose."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.flags import public_call, several
from mergepipe.core.outcome import private_outputs
from mergepipe.errors import NotFoundError, RecipeError
from mergepipe.jobs.diff import distance, norm
from mergepipe.jobs.evaluate import parse_evaluation
from mergepipe.jobs.merge_run import run_merge, run_plan
from mergepipe.jobs.plan import make_plan, plan_request
from mergepipe.options import SWEEP_BUDGETS, MergeOptions, SweepOptions, home_of
from mergepipe.planning.budget import BudgetRequest, Policy, ShareBudget, number_text, parse_budget
from mergepipe.planning.plan import Plan
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import ByteProgress, Progress, ProgressCallback, SweepPoint, SweepReport
from mergepipe.runs.budget import blocks_by_level, counts_of, verdict_of
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import open_inputs, recipe_of
from mergepipe.runs.merge_settings import MergeSettings, settings_without_output
from mergepipe.snapshots.staging import temporary_folder
from mergepipe.storage import owned
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import output_place
from mergepipe.storage.stores import Stores

if TYPE_CHECKING:
    from mergepipe.core.flags import Options


@public_call(SweepOptions)
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
    as a second policy; for samples it says nothing, and is left out. With `evaluate` the loss is measured too.

    Args:
        options: `SweepOptions`: how each budget is spent, what is measured, threads, memory, the home folder.
    """
    made = SweepOptions.of(options, fields)
    budgets = several(budgets)
    if not budgets:
        raise RecipeError.of("option.invalid", "--budgets", "none is given", "give some, such as 10%,50%")
    work = None if made.work is None else output_place(made.work).local_path
    if work is not None and not work.is_dir():
        raise NotFoundError.of("storage.not-found", work, "no such directory", "make it, or give another with --work")
    parsed = [(number_text(budget).strip(), parse_budget(budget, "--budgets")) for budget in budgets]
    with private_outputs(), temporary_folder("sweep", work) as directory:
        return _Sweep(recipe_of(recipe), made, directory, on_progress).report(parsed)


@dataclass(frozen=True, slots=True)
class _FullMerge:
    """The merge that budgets are compared with: the opened output, and the norms of it and of what it changes."""

    checkpoint: Checkpoint
    expert_bytes: int
    seconds: float
    norm: float
    changed_norm: float
    loss: float | None


class _Sweep:
    """Merges one recipe in full, then under each budget; at most two outputs lie in the folder at a time."""

    def __init__(
        self,
        recipe: Location | RecipeText,
        options: SweepOptions,
        directory: Path,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._recipe = recipe
        self._options = options
        self._directory = directory
        self._on_progress = on_progress
        self._request = plan_request("100%", options)  # each budget takes the place of this one
        self._settings = settings_without_output(options.common(MergeOptions, catalog=False, evaluate=None))
        self._evaluation = None if options.evaluate is None else parse_evaluation(options.evaluate)
        self._store = Stores(self._settings.engine.connections)
        self._link = CatalogLink(home_of(options.home), required=True)
        self._inputs = open_inputs(recipe, self._store, options)

    def report(self, budgets: Sequence[tuple[str, BudgetRequest]]) -> SweepReport:
        """Make all merges; each budget is its text, and what it says."""
        inputs = self._inputs
        first_plan = self._first_plan([budget for _, budget in budgets])
        policies = [Policy(first_plan.policy)]
        if policies[0] not in (Policy.SAMPLE, Policy.RANDOM) and self._evaluation is None:
            policies.append(Policy.RANDOM)
        full = self._full_merge()
        return SweepReport(
            recipe=self._recipe.path if isinstance(self._recipe, RecipeText) else self._recipe,
            operator=inputs.recipe.operator.name,
            policy=policies[0].value,
            seed=self._options.seed,
            dtypes=tuple(sorted({entry.dtype.name for entry in full.checkpoint.tensors.values()})),
            full_cost_bytes=first_plan.full_cost_bytes,
            full_expert_bytes=full.expert_bytes,
            full_seconds=full.seconds,
            changed_norm=full.changed_norm,
            full_norm=full.norm,
            points=tuple(self._point(full, text, budget, policy) for text, budget in budgets for policy in policies),
            experts=tuple(inputs.recipe.inputs()[model].text for model in inputs.expert_models),
            recipe_notices=inputs.notices,
            full_loss=full.loss,
        )

    def _first_plan(self, budgets: Sequence[BudgetRequest]) -> Plan:
        """Plan under a budget that samples, if there is one: this decides the policy, or what is refused."""
        everything = ShareBudget(Fraction(1))
        samples = (budget for budget in budgets if not budget.is_zero and budget != everything)
        return self._plan(next(samples, budgets[0]), self._request.policy)

    def _plan(self, budget: BudgetRequest, policy: Policy | None) -> Plan:
        request = replace(self._request, budget=budget, policy=policy)
        return make_plan(self._store, self._inputs, request, self._link)

    def _full_merge(self) -> _FullMerge:
        label = "full merge"
        settings = self._started(label, "full")
        report = run_merge(self._recipe, settings)
        full = open_checkpoint(self._store, Location.local(settings.out))
        base = self._inputs.base
        changed_norm = distance(self._store, full, base, self._meter(label, full, base))
        full_norm = norm(self._store, full, self._meter(label, full))
        expert_bytes = report.expert_bytes + report.analysis_bytes
        return _FullMerge(full, expert_bytes, report.seconds, full_norm, changed_norm, self._loss(settings.out))

    def _point(self, full: _FullMerge, text: str, budget: BudgetRequest, policy: Policy) -> SweepPoint:
        """Merge under a budget; errors are given relative to the norms of the full merge's change, and of itself."""
        label = f"{text} {policy}"
        settings = self._started(label, "budgeted")
        plan = self._plan(budget, policy)
        error = None
        try:
            report = run_plan(plan, settings)
            if policy is not Policy.SAMPLE:  # the distance of a sample says nothing
                merged = open_checkpoint(self._store, Location.local(settings.out))
                meter = self._meter(label, merged, full.checkpoint)
                error = distance(self._store, merged, full.checkpoint, meter)
            loss = self._loss(settings.out)
        finally:
            owned.remove_tree(settings.out, ignore_errors=True)
        expert_bytes = report.expert_bytes + report.analysis_bytes
        return SweepPoint(
            budget=text,
            policy=plan.policy,
            budget_bytes=plan.budget_bytes,
            planned_bytes=plan.planned_bytes,
            expert_bytes=expert_bytes,
            share=expert_bytes / max(full.expert_bytes, 1),
            seconds=report.seconds,
            error=_ratio(error, full.changed_norm),
            flattering_error=_ratio(error, full.norm),
            loss=loss,
            levels=blocks_by_level(counts_of(plan).level_EL.sum(axis=0)),
            unread=tuple(expert.model for expert in verdict_of(plan).experts if not expert.share),
        )

    def _started(self, label: str, name: str) -> MergeSettings:
        """Return the settings of a merge into the folder `name`, whose progress is reported under a label."""

        def report(progress: Progress) -> None:
            if self._on_progress is not None:
                self._on_progress(replace(progress, phase=label))

        out = self._directory / name
        return replace(self._settings, out=out, started=time.perf_counter(), on_progress=report)

    def _loss(self, folder: Path) -> float | None:
        return None if self._evaluation is None else self._evaluation.loss_of(folder)

    def _meter(self, label: str, *checkpoints: Checkpoint) -> Callable[[int], None]:
        total_bytes = sum(checkpoint.tensor_bytes for checkpoint in checkpoints)
        return ByteProgress(self._on_progress, f"{label}: measure", total_bytes).add


def _ratio(error: float | None, norm_of_it: float) -> float | None:
    return error / norm_of_it if error is not None and norm_of_it > 0 else None
