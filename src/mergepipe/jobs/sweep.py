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
from mergepipe.jobs.plan import PlanRequest, make_plan, plan_request
from mergepipe.options import SWEEP_BUDGETS, OutputOptions, SweepOptions, home_of
from mergepipe.planning.budget import BudgetRequest, Policy, ShareBudget, parse_budget
from mergepipe.planning.plan import Plan
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import ByteProgress, Progress, ProgressCallback, SweepPoint, SweepReport
from mergepipe.runs.budget import blocks_by_level, counts_of, verdict_of
from mergepipe.runs.inputs import Inputs, open_inputs, recipe_of
from mergepipe.runs.work import CatalogLink, MergeSettings, run_settings
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
        return _Sweep(recipe_of(recipe), made, Path(directory), on_progress).run(parsed)


class _Sweep:
    """One sweep in its temporary directory."""

    def __init__(
        self,
        recipe: Location | RecipeText,
        options: SweepOptions,
        directory: Path,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._recipe = recipe
        self._request = plan_request("100%", options)  # each budget takes the place of this one
        self._settings = replace(
            run_settings(options.common(OutputOptions, catalog=False), options.seed),
            allow_dropped=options.allow_dropped, strictness=self._request.strictness,
        )  # fmt: skip
        self._home = home_of(options.home)
        self._evaluation = None if options.evaluate is None else parse_evaluation(options.evaluate)
        self._directory = directory
        self._on_progress = on_progress
        self._store = Stores(settings=self._settings.engine.remote)

    def run(self, budgets: Sequence[tuple[str, BudgetRequest]]) -> SweepReport:
        """Merge in full, then under each budget, which is a text and what it says."""
        inputs = open_inputs(
            self._recipe, self._store, self._request.allow_dropped, strictness=self._request.strictness
        )
        requests = [request for _, request in budgets] or [self._request.budget]
        some = next((one for one in requests if not one.is_zero and one != ShareBudget(Fraction(1))), requests[0])
        plan = self._plan(inputs, replace(self._request, budget=some))  # decides the policy, or what is refused
        policy = Policy(plan.policy)
        policies = [policy]
        if policy not in (Policy.SAMPLE, Policy.RANDOM) and self._evaluation is None:
            policies.append(Policy.RANDOM)
        settings = self._settings_of("full merge", "full")
        report = run_merge(self._recipe, settings)
        full = open_checkpoint(self._store, Location.local(settings.out))
        changed_norm = self._distance("full merge", full, inputs.base)
        full_norm = norm(self._store, full, self._meter("full merge", full))
        full_loss = self._loss(settings.out)
        return SweepReport(
            recipe=self._recipe.path if isinstance(self._recipe, RecipeText) else self._recipe,
            operator=inputs.recipe.operator.name,
            policy=policy.value,
            seed=self._settings.seed,
            dtypes=tuple(sorted({entry.dtype.name for entry in full.tensors.values()})),
            full_cost_bytes=plan.full_cost_bytes,
            full_expert_bytes=report.expert_bytes + report.analysis_bytes,
            full_seconds=report.seconds,
            changed_norm=changed_norm,
            full_norm=full_norm,
            points=tuple(
                self._point(inputs, full, (changed_norm, full_norm), text, replace(self._request, budget=b, policy=p))
                for text, b in budgets
                for p in policies
            ),
            experts=tuple(inputs.recipe.inputs()[model].text for model in inputs.expert_models),
            recipe_notices=inputs.notices,
            full_loss=full_loss,
        )

    def _plan(self, inputs: Inputs, request: PlanRequest) -> Plan:
        return make_plan(self._store, inputs, request, CatalogLink(self._home, required=True))

    def _point(
        self, inputs: Inputs, full: Checkpoint, norms: tuple[float, float], budget: str, request: PlanRequest
    ) -> SweepPoint:
        """Merge as is requested; errors are told by the norms of what the full merge changes, and of itself."""
        label = f"{budget} {request.policy}"
        settings = self._settings_of(label, "budgeted")
        plan = self._plan(inputs, request)
        try:
            report, error = run_plan(plan, settings), None
            if request.policy is not Policy.SAMPLE:  # of which distances tell nothing
                merged = open_checkpoint(self._store, Location.local(settings.out))
                error = self._distance(label, merged, full)
            loss = self._loss(settings.out)
        finally:
            owned.remove_tree(settings.out, ignore_errors=True)
        shares = [error / size if error is not None and size > 0 else None for size in norms]
        expert_bytes = report.expert_bytes + report.analysis_bytes
        return SweepPoint(
            budget=budget,
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

    def _loss(self, folder: Path) -> float | None:
        return None if self._evaluation is None else self._evaluation.loss_of(folder)

    def _settings_of(self, label: str, name: str) -> MergeSettings:
        """Return the settings of a merge that begins now, and of which progress tells by a label."""

        def report(progress: Progress) -> None:
            if self._on_progress is not None:
                self._on_progress(replace(progress, phase=label))

        return replace(self._settings, out=self._directory / name, started=time.perf_counter(), on_progress=report)

    def _distance(self, label: str, a: Checkpoint, b: Checkpoint) -> float:
        return distance(self._store, a, b, self._meter(label, a, b))

    def _meter(self, label: str, *checkpoints: Checkpoint) -> Callable[[int], None]:
        total_bytes = sum(checkpoint.tensor_bytes for checkpoint in checkpoints)
        return ByteProgress(self._on_progress, f"{label}: measure", total_bytes).add
