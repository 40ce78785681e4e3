"""Judge a budgeted merge in words and numbers: what it loses, what of each expert is in it, what more would bring."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mergepipe.core.units import format_bytes
from mergepipe.planning.candidates.known_statistics import REASON_MISSING
from mergepipe.planning.plan import NOTHING_READ, Plan
from mergepipe.planning.plan_assembly import SAMPLED
from mergepipe.reports import BudgetVerdict, ExpertCoverage
from mergepipe.runs.budget.coverage import coverage_of
from mergepipe.snapshots.manifest import Coverage

CLOSE_ERROR = 0.25
PARTIAL_ERROR = 0.75
SCALE = (
    (CLOSE_ERROR, "close to the full merge: at 0.2 three retrieval tasks could not tell them apart"),
    (PARTIAL_ERROR, "a part of the merge: at 0.7 three quarters of its gain were kept"),
    (float("inf"), "little of the merge: an error of 1 is that of the base"),
)
_ADVISED = {
    SAMPLED: "the plan is made from estimates",
    REASON_MISSING: "nothing is known of tensors, and what is read of them is spread evenly",
}
NOT_STATED = "none is stated of a sample: it is right on average, and far from the full merge in each draw"
UNKNOWN = "not known: nothing is known of some experts"


def meaning_of(error: float | None) -> str:
    """Say what an expected error means, on the scale of what was measured."""
    return UNKNOWN if error is None else next(text for limit, text in SCALE if error <= limit)


def verdict_of(plan: Plan) -> BudgetVerdict:
    """Judge a plan, from what it records."""
    coverage, outlook = coverage_of(plan), plan.outlook
    experts = [model.model for model in plan.models if model.role == "expert"]
    shares = _shares(plan, coverage)
    is_full = _is_full(plan, shares)
    error = 0.0 if is_full else None if outlook is None else outlook.expected_error
    return BudgetVerdict(
        expected_error=error,
        is_least=outlook is not None and outlook.is_least and not is_full,
        meaning=NOT_STATED if plan.sampling is not None and not is_full else meaning_of(error),
        experts=tuple(ExpertCoverage(model, share) for model, share in zip(experts, shares, strict=True)),
        unread=tuple(fallback.where for fallback in plan.fallbacks if fallback.decision == NOTHING_READ),
        full_bytes=plan.full_cost_bytes,
        larger_budget_bytes=None if outlook is None else outlook.larger_budget_bytes,
        larger_expected_error=None if outlook is None else outlook.larger_expected_error,
    )


def _shares(plan: Plan, coverage: Coverage) -> list[float]:
    """Return for each expert the share of its blocks that is in the merge."""
    planned = [0] * len(coverage.read)
    for tensor in plan.tensors:
        for e in tensor.models:
            planned[e] += -(-tensor.n_elements // plan.block_elements)
    covered = zip(coverage.read, coverage.shared, coverage.free, strict=True)
    return [sum(counts) / n if n else 1.0 for counts, n in zip(covered, planned, strict=True)]


def _is_full(plan: Plan, shares: Sequence[float]) -> bool:
    """Tell whether a plan is the full merge: every block at its highest level, with the recipe's parameters."""
    has_levels = any(access.levels for tensor in plan.tensors for access in tensor.access)
    return min(shares, default=1.0) == 1.0 and not has_levels and not plan.adjustments


def analysis_advice(plan: Plan) -> tuple[str, ...]:
    """Name the command that would make a plan exact, and what it reads; nothing where all is known or all is read."""
    reasons = {fallback.where: fallback.reason for fallback in plan.fallbacks if fallback.reason in _ADVISED}
    experts = [model for model in plan.models if model.role == "expert" and f"expert '{model.model}'" in reasons]
    bases = [model for model in plan.models if model.role == "base"]
    if not experts or not bases or _is_full(plan, _shares(plan, coverage_of(plan))):
        return ()
    command = " ".join(["mergepipe analyze", *(shlex.quote(model.path) for model in (bases[0], *experts))])
    nbytes = bases[0].full_cost_bytes + sum(model.full_cost_bytes for model in experts)
    reason = "; ".join(text for reason, text in _ADVISED.items() if reason in reasons.values())
    return (
        f"{reason}: `{command}` reads {format_bytes(nbytes)} once{_payoff(plan, nbytes)}, and makes later plans exact",
    )


def _payoff(plan: Plan, nbytes: int) -> str:
    """Say how many merges save `nbytes` by not reading all of the experts; nothing where none does."""
    saved_bytes = plan.full_cost_bytes - plan.planned_bytes
    if saved_bytes <= 0:
        return ""
    merges = -(-nbytes // saved_bytes)
    return f" (what {merges} merge{'s' * (merges > 1)} under this budget save{'s' * (merges == 1)})"
