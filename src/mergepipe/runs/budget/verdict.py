"""Say of a budgeted merge what it reads and what is missing of each expert, and which command would tell more."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from mergepipe.core.blocks import BlockGrid
from mergepipe.core.units import format_bytes
from mergepipe.engine.tensor_work import FREE, OMITTED, level_of_blocks
from mergepipe.planning.candidates import REASON_MISSING
from mergepipe.planning.plan import NOTHING_READ, UNSPENT, Access, Plan
from mergepipe.reports import WHOLE, BudgetVerdict, ExpertCoverage
from mergepipe.snapshots.manifest import Coverage

# --- count what a plan covers: blocks read and free per expert, and blocks that any expert contributes to ---


def coverage_of(plan: Plan) -> Coverage:
    """Count the blocks of all planned tensors."""
    n_experts = sum(model.role == "expert" for model in plan.models)
    blocks = touched = 0
    read_E, free_E = (np.zeros(n_experts, np.int64) for _ in range(2))
    for tensor in plan.tensors:
        n_blocks = BlockGrid(tensor.n_elements, plan.block_elements).n_blocks
        levels_EB = level_of_blocks(tensor, n_blocks)
        blocks += n_blocks
        touched += int((levels_EB > OMITTED).any(axis=0).sum())
        experts = list(tensor.models)
        read_E[experts] += (levels_EB > OMITTED).sum(axis=1)
        free_E[experts] += (levels_EB == FREE).sum(axis=1)
    return Coverage(blocks, touched, tuple(read_E.tolist()), tuple(free_E.tolist()))


# --- count the blocks that a plan reads at each level ---


NAMES = ("largest", WHOLE)
"""Which deltas of a block are read at a level of a packed tensor, from 1 on."""


def level_name(level: int) -> str:
    """Return the display name of a level below the last."""
    return NAMES[level - 1] if 0 < level < len(NAMES) else str(level)


def blocks_by_level(accesses: Iterable[Access]) -> tuple[tuple[str, int], ...]:
    """Count blocks by level, lowest first; `whole` are those read unencoded."""
    blocks = Counter[str]()
    for access in accesses:
        blocks[WHOLE] += access.n_blocks
        for start, stop, level in access.levels:
            blocks[level_name(level)] += stop - start
            blocks[WHOLE] -= stop - start
    return tuple((name, blocks[name]) for name in NAMES if blocks[name])


# --- say of a budgeted merge what it reads and what is missing of each expert, and which command would tell more ---


MEASURED_SAMPLES, MEASURED_ORDERS = "docs/benchmarks/sampling.md", "docs/benchmarks/trained.md"
"""The pages with what merges under a budget kept of a gain: of samples, and of blocks in an order."""
_ADVISED = {REASON_MISSING: "nothing is known of tensors, and what is read of them is spread evenly"}


def verdict_of(plan: Plan) -> BudgetVerdict:
    """Say of a plan what it reads, and what is missing of whom."""
    unspent = [fallback for fallback in plan.fallbacks if fallback.decision.endswith(UNSPENT)]
    return BudgetVerdict(
        policy=plan.policy,
        is_full=_is_full(plan),
        planned_bytes=plan.planned_bytes,
        full_bytes=plan.full_cost_bytes,
        experts=tuple(sorted(_coverage(plan, coverage_of(plan)), key=lambda expert: expert.share)),
        unread=tuple(fallback.where for fallback in plan.fallbacks if fallback.decision == NOTHING_READ),
        measured=MEASURED_ORDERS if plan.sampling is None else MEASURED_SAMPLES,
        unspent_bytes=plan.budget_bytes - plan.planned_bytes if unspent else 0,
        unspent_reason=unspent[0].reason if unspent else "",
    )


def _coverage(plan: Plan, coverage: Coverage) -> Iterator[ExpertCoverage]:
    """Yield for each expert the share of the blocks that it changes that is in the merge, as far as that is known."""
    models = [model.model for model in plan.models if model.role == "expert"]
    planned, rough = ([0] * len(models) for _ in range(2))
    for tensor in plan.tensors:
        for e, access in zip(tensor.models, tensor.access, strict=True):
            planned[e] += -(-tensor.n_elements // plan.block_elements)
            rough[e] += sum(stop - start for start, stop, _ in access.levels)
    for e, model in enumerate(models):
        changed = planned[e] - coverage.free[e]
        shares = (coverage.read[e] / changed, rough[e] / changed) if changed else (1.0, 0.0)
        yield ExpertCoverage(model, *shares)


def _is_full(plan: Plan) -> bool:
    """Tell whether a plan is the full merge: every block at its highest level, with the recipe's parameters."""
    is_whole = all(expert.share == 1 and not expert.rough for expert in _coverage(plan, coverage_of(plan)))
    return is_whole and not plan.adjustments


def analysis_advice(plan: Plan) -> tuple[str, ...]:
    """Name the command that would make a plan exact, and what it reads; nothing where all is known or all is read."""
    reasons = {fallback.where: fallback.reason for fallback in plan.fallbacks if fallback.reason in _ADVISED}
    experts = [model for model in plan.models if model.role == "expert" and f"expert '{model.model}'" in reasons]
    bases = [model for model in plan.models if model.role == "base"]
    if not experts or not bases or _is_full(plan):
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
