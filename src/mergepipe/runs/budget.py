"""What a budget can pay for before there is a plan, what a plan covers, and what is missing of each expert."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mergepipe.checkpoints.contract import Readable, TensorEntry, Unchanged, block_costs_bytes
from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.core.units import format_bytes
from mergepipe.engine.segments import at_level
from mergepipe.engine.tensor_work import FREE, OMITTED, level_of_blocks
from mergepipe.planning.budget import BudgetRequest
from mergepipe.planning.candidates import REASON_MISSING
from mergepipe.planning.plan import NOTHING_READ, UNSPENT, Access, Plan, PlannedTensor
from mergepipe.recipes.tasks import MergeTask
from mergepipe.reports import WHOLE, BudgetVerdict, ExpertCoverage
from mergepipe.runs.inputs import Inputs
from mergepipe.snapshots.manifest import Coverage

# --- decide which packed experts' indices a budget can pay for; they are read before blocks are selected ---


def find_unread(inputs: Inputs, budget: BudgetRequest) -> frozenset[int]:
    """Return the experts whose index does not fit the budget after the indices of the experts before them.

    Of a share the least that everything can cost is taken, since what it does cost is in the indices.
    """
    indices = [inputs.checkpoints[model].encoded for model in inputs.expert_models]
    limit_bytes = budget.limit_bytes(least_full_cost(inputs))
    used_bytes = sum(index.cost_bytes for index in indices if index is not None and index.is_read)
    unread = set()
    for e, index in enumerate(indices):
        if index is None or index.is_read:
            continue
        if used_bytes + index.cost_bytes <= limit_bytes:
            used_bytes += index.cost_bytes
        else:
            unread.add(e)
    return frozenset(unread)


def least_full_cost(inputs: Inputs) -> int:
    """Compute a lower bound on the cost of reading all experts that needs no index."""
    indices = [inputs.checkpoints[model].encoded for model in inputs.expert_models]
    packed = {model for model, index in zip(inputs.expert_models, indices, strict=True) if index is not None}
    unindexed_bytes = sum(
        source.nbytes
        for task in inputs.resolution.tasks
        for model, source in zip(task.expert_models, task.experts, strict=True)
        if model not in packed
    )
    return unindexed_bytes + sum(index.least_bytes for index in indices if index is not None)


# --- sum what a plan charges for reading the experts of some tensors ---


def planned_cost(plan: Plan, tasks: Sequence[MergeTask]) -> int:
    """Sum the planned cost of reading the experts of some tasks, block by block."""
    planned = {tensor.name: tensor for tensor in plan.tensors}
    return sum(_tensor_cost(plan, planned[task.name], task) for task in tasks if task.name in planned)


def _tensor_cost(plan: Plan, planned: PlannedTensor, task: MergeTask) -> int:
    grid = BlockGrid(planned.n_elements, plan.block_elements)
    cost = 0
    for source, access in zip(task.experts, planned.access, strict=True):
        if isinstance(source, TensorEntry):
            cost += _entry_cost(source, access.blocks, grid)
        elif not isinstance(source, Unchanged):
            cost += _encoded_cost(source, access, grid)
    return cost


def _entry_cost(entry: TensorEntry, runs: Sequence[tuple[int, int]], grid: BlockGrid) -> int:
    blocks_B = np.concatenate([np.zeros(0, np.int64), *(np.arange(start, stop) for start, stop in runs)])
    first_B = blocks_B * grid.block_elements
    n_B = np.minimum(grid.block_elements, grid.n_elements - first_B)
    offset, itemsize, granularity = (
        np.asarray(number, np.int64) for number in (entry.offset, entry.dtype.itemsize, entry.granularity_bytes)
    )
    return int(block_costs_bytes(offset, itemsize, first_B, n_B, granularity).sum())


def _encoded_cost(source: Readable, access: Access, grid: BlockGrid) -> int:
    levels = {block: level for start, stop, level in access.levels for block in range(start, stop)}
    spans = defaultdict[int, list[Span]](list)
    for start, stop in access.blocks:
        for block in range(start, stop):
            spans[levels.get(block, 0)].append(grid.span(block))
    return sum(_source_cost(at_level(source, level), spans_of_level) for level, spans_of_level in spans.items())


def _source_cost(source: Readable, spans: Sequence[Span]) -> int:
    return sum(source.cost_bytes(span) for span in (spans[:1] if source.is_unit else spans))


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


MEASURED_SAMPLES, MEASURED_ORDERS = "docs/benchmarks/rules.md", "docs/benchmarks/trained.md"
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
