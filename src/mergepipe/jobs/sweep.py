"""Sweep budgets: merge one recipe in full and under each budget, and measure the loss of fidelity."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.outcome import private_outputs
from mergepipe.errors import NotFoundError
from mergepipe.jobs.diff import distance, norm
from mergepipe.jobs.evaluate import parse_evaluation
from mergepipe.jobs.merge import run_merge, run_plan
from mergepipe.jobs.plan import PlanRequest, make_plan, plan_request
from mergepipe.options import OutputOptions, SweepOptions, home_of
from mergepipe.planning.budget import BudgetRequest, Policy, ShareBudget, parse_budget
from mergepipe.planning.plan import Plan
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import ByteProgress, MergeReport, Progress, ProgressCallback, SweepPoint, SweepReport
from mergepipe.runs.budget import blocks_by_level, counts_of, verdict_of
from mergepipe.runs.inputs import Inputs, open_inputs
from mergepipe.runs.work import CatalogLink, MergeSettings, run_settings
from mergepipe.storage import owned
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


@dataclass(frozen=True, slots=True)
class SweepBudget:
    """A budget as the user wrote it, and its parsed value."""

    text: str
    request: BudgetRequest


@dataclass(frozen=True, slots=True)
class _Reference:
    """The full merge that all budgeted merges are compared with."""

    full: Checkpoint
    report: MergeReport
    changed_norm: float
    full_norm: float
    loss: float | None


def run_sweep(
    recipe: Location | RecipeText, budgets: Sequence[str], options: SweepOptions, on_progress: ProgressCallback | None
) -> SweepReport:
    """Merge in full once, then under each budget; see `api.sweep`.

    Where distances tell something, and no command measures a loss, each budget is planned by `random`, too.

    Every budget is planned as a merge under it is. At most two outputs lie
    on the disk at a time, under `options.work` (default: where temporary files go); nothing is left behind or recorded.
    """
    work = None if options.work is None else Path(options.work)
    if work is not None and not work.is_dir():
        raise NotFoundError.of("storage.not-found", work, "no such directory", "make it, or give another with --work")
    parsed = [SweepBudget(text.strip(), parse_budget(text, "--budgets")) for text in budgets]
    with private_outputs(), tempfile.TemporaryDirectory(prefix="mergepipe-sweep-", dir=work) as directory:
        return _Sweep(recipe, parsed, options, Path(directory), on_progress).run()


class _Sweep:
    """One sweep in its temporary directory."""

    def __init__(
        self,
        recipe: Location | RecipeText,
        budgets: Sequence[SweepBudget],
        options: SweepOptions,
        directory: Path,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._recipe = recipe
        self._budgets = budgets
        self._request = plan_request("100%", options)  # each budget takes the place of this one
        self._settings = replace(
            run_settings(options.common(OutputOptions, catalog=False), options.seed),
            allow_dropped=options.allow_dropped, strictness=self._request.strictness,
        )  # fmt: skip
        self._home = home_of(options.home)
        self._evaluation = None if options.evaluate is None else parse_evaluation(options.evaluate)
        self._measures_error = True
        self._directory = directory
        self._on_progress = on_progress
        self._store = Stores(settings=self._settings.engine.remote)

    def run(self) -> SweepReport:
        inputs = open_inputs(
            self._recipe, self._store, self._request.allow_dropped, strictness=self._request.strictness
        )
        plan = self._plan(inputs, replace(self._request, budget=self._some_budget()))  # refuses what cannot be planned
        policy = Policy(plan.policy)
        self._measures_error = policy is not Policy.SAMPLE
        reference = self._full_merge(inputs)
        compares = self._measures_error and self._evaluation is None
        policies = list(dict.fromkeys((policy, *([Policy.RANDOM] if compares else []))))
        points = tuple(
            self._point(inputs, reference, budget, policy) for budget in self._budgets for policy in policies
        )

        return SweepReport(
            recipe=self._recipe.path if isinstance(self._recipe, RecipeText) else self._recipe,
            operator=inputs.recipe.operator.name,
            policy=policy.value,
            seed=self._settings.seed,
            dtypes=tuple(sorted({entry.dtype.name for entry in reference.full.tensors.values()})),
            full_cost_bytes=plan.full_cost_bytes,
            full_expert_bytes=reference.report.expert_bytes + reference.report.analysis_bytes,
            full_seconds=reference.report.seconds,
            changed_norm=reference.changed_norm,
            full_norm=reference.full_norm,
            points=points,
            experts=tuple(inputs.recipe.inputs()[model].text for model in inputs.expert_models),
            recipe_notices=inputs.notices,
            full_loss=reference.loss,
        )

    def _some_budget(self) -> BudgetRequest:
        """Return a budget of the sweep that decides its policy: some of the experts, where there is one."""
        budgets = [budget.request for budget in self._budgets] or [self._request.budget]
        return next((one for one in budgets if not one.is_zero and one != ShareBudget(Fraction(1))), budgets[0])

    def _plan(self, inputs: Inputs, request: PlanRequest) -> Plan:
        with closing(CatalogLink(self._home, required=True)) as link:
            return make_plan(self._store, inputs, request, link)

    def _full_merge(self, inputs: Inputs) -> _Reference:
        settings = self._settings_of("full merge", "full")
        report, out = run_merge(self._recipe, settings), settings.out
        full = open_checkpoint(self._store, Location.local(out))
        changed = distance(self._store, full, inputs.base, self._meter("full merge: measure", full, inputs.base))
        size = norm(self._store, full, self._meter("full merge: measure", full))
        return _Reference(full, report, changed, size, self._loss(out))

    def _loss(self, folder: Path) -> float | None:
        return None if self._evaluation is None else self._evaluation.loss_of(folder)

    def _point(self, inputs: Inputs, reference: _Reference, budget: SweepBudget, policy: Policy) -> SweepPoint:
        label = f"{budget.text} {policy.value}"
        settings = self._settings_of(label, "budgeted")
        plan = self._plan(inputs, replace(self._request, budget=budget.request, policy=policy))
        try:
            report = run_plan(plan, settings)
            error, loss = self._error(label, settings.out, reference.full), self._loss(settings.out)
        finally:
            owned.remove_tree(settings.out, ignore_errors=True)
        return SweepPoint(
            budget=budget.text,
            policy=policy.value,
            budget_bytes=plan.budget_bytes,
            planned_bytes=plan.planned_bytes,
            expert_bytes=report.expert_bytes + report.analysis_bytes,
            share=(report.expert_bytes + report.analysis_bytes) / max(plan.full_cost_bytes, 1),
            seconds=report.seconds,
            error=_share(error, reference.changed_norm),
            flattering_error=_share(error, reference.full_norm),
            loss=loss,
            levels=blocks_by_level(counts_of(plan).level_EL.sum(axis=0)),
            unread=tuple(expert.model for expert in verdict_of(plan).experts if not expert.share),
        )

    def _error(self, label: str, out: Path, full: Checkpoint) -> float | None:
        if not self._measures_error:
            return None
        merged = open_checkpoint(self._store, Location.local(out))
        return distance(self._store, merged, full, self._meter(f"{label}: measure", merged, full))

    def _settings_of(self, label: str, name: str) -> MergeSettings:
        """Return the settings of a merge that begins now, and of which progress tells by a label."""

        def report(progress: Progress) -> None:
            if self._on_progress is not None:
                self._on_progress(replace(progress, phase=label))

        return replace(self._settings, out=self._directory / name, started=time.perf_counter(), on_progress=report)

    def _meter(self, label: str, *checkpoints: Checkpoint) -> Callable[[int], None]:
        return ByteProgress(self._on_progress, label, sum(checkpoint.tensor_bytes for checkpoint in checkpoints)).add


def _share(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole > 0 else None
