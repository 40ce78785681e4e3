"""What a budget can pay for before there is a plan, what a plan covers, and what is missing of each expert."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Readable, TensorEntry, Unchanged, block_costs_bytes
from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.core.units import format_bytes
from mergepipe.engine.planned_access import FREE, OMITTED, level_of_blocks
from mergepipe.engine.segments import at_level
from mergepipe.errors import REPOSITORY
from mergepipe.planning.budget import BudgetRequest
from mergepipe.planning.candidates import REASON_MISSING
from mergepipe.planning.plan import ALL, NOTHING_READ, UNSPENT, Access, Plan, PlannedTensor
from mergepipe.recipes.tasks import MergeTask
from mergepipe.reports import WHOLE, BudgetVerdict, ExpertCoverage, read_share
from mergepipe.runs.inputs import Inputs
from mergepipe.snapshots.manifest import Coverage

# --- decide which packed experts' indices a budget can pay for; they are read before blocks are selected ---


def find_unread(inputs: Inputs, budget: BudgetRequest) -> frozenset[int]:
    """Return the experts whose index does not fit the budget after the indices of the experts before them.

    Of a share the least that everything can cost is taken, since what it does cost is in the indices.
    """
    indices = [inputs.checkpoints[model].encoded for model in inputs.expert_models]
    packed = {model for model, index in zip(inputs.expert_models, indices, strict=True) if index is not None}
    unindexed_bytes = sum(
        source.nbytes
        for task in inputs.resolution.tasks
        for model, source in zip(task.expert_models, task.experts, strict=True)
        if model not in packed
    )
    least_bytes = unindexed_bytes + sum(index.least_bytes for index in indices if index is not None)
    limit_bytes = budget.limit_bytes(least_bytes)
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
    levelled = ((at_level(source, level), spans_of_level) for level, spans_of_level in spans.items())
    return sum(part.cost_bytes(span) for part, blocks in levelled for span in (blocks[:1] if part.is_unit else blocks))


# --- count what a plan covers: blocks that any expert contributes to, and those of each expert by level ---


NAMES = ("largest", WHOLE)
"""Which deltas of a block are read at a level of a packed tensor, from 1 on."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of some tensors: all, those that any expert contributes to, and how many each expert has at each level.

    `level_EL` counts from the level `FREE` on; the last is that of blocks that are read unencoded.
    """

    blocks: int
    touched: int
    level_EL: NDArray[np.int64]

    @property
    def free_E(self) -> NDArray[np.int64]:
        """By expert, blocks that equal the base's."""
        return self.level_EL[:, 0]

    @property
    def omitted_E(self) -> NDArray[np.int64]:
        """By expert, blocks that are left out."""
        return self.level_EL[:, OMITTED - FREE]

    @property
    def read_E(self) -> NDArray[np.int64]:
        """By expert, blocks that are read, at any level."""
        read_E: NDArray[np.int64] = self.level_EL[:, OMITTED - FREE + 1 :].sum(axis=1)
        return read_E

    @property
    def in_part_E(self) -> NDArray[np.int64]:
        """By expert, blocks of which not everything is read."""
        in_part_E: NDArray[np.int64] = self.level_EL[:, OMITTED - FREE + 1 : -1].sum(axis=1)
        return in_part_E


def count_blocks(tensors: Iterable[PlannedTensor], block_elements: int, n_experts: int) -> BlockCounts:
    """Count the blocks of planned tensors."""
    blocks = touched = 0
    n_levels = ALL - FREE + 1
    level_EL = np.zeros((n_experts, n_levels), np.int64)
    for tensor in tensors:
        n_blocks = BlockGrid(tensor.n_elements, block_elements).n_blocks
        levels_EB = level_of_blocks(tensor, n_blocks)
        blocks += n_blocks
        touched += int((levels_EB > OMITTED).any(axis=0).sum())
        of_expert_E = n_levels * np.array(tensor.models, np.int64) - FREE
        level_EL += np.bincount((levels_EB + of_expert_E[:, None]).ravel(), None, level_EL.size).reshape(level_EL.shape)
    return BlockCounts(blocks, touched, level_EL)


def counts_of(plan: Plan) -> BlockCounts:
    """Count the blocks of all tensors of a plan."""
    return count_blocks(plan.tensors, plan.block_elements, sum(model.role == "expert" for model in plan.models))


def coverage_of(plan: Plan) -> Coverage:
    """Return what a manifest records of a plan's blocks."""
    counts = counts_of(plan)
    return Coverage(counts.blocks, counts.touched, tuple(counts.read_E.tolist()), tuple(counts.free_E.tolist()))


def level_name(level: int) -> str:
    """Return the display name of a level below the last."""
    return NAMES[level - 1] if 0 < level < len(NAMES) else str(level)


def blocks_by_level(level_L: NDArray[np.int64]) -> tuple[tuple[str, int], ...]:
    """Return the counts of blocks by level, lowest first; `whole` are those read unencoded."""
    in_part_L, whole_L = np.split(level_L[OMITTED - FREE + 1 :], [len(NAMES) - 1])
    counts = (*in_part_L.tolist(), int(whole_L.sum()))
    return tuple((name, count) for name, count in zip(NAMES, counts, strict=True) if count)


# --- say of a budgeted merge what it reads and what is missing of each expert, and which command would tell more ---


_PAGE = f"{REPOSITORY}/blob/main/docs/benchmarks/rules.md"
MEASURED_SAMPLES = f"35 % to 72 % in single draws, at 10 % of the bytes of raw experts ({_PAGE})"
MEASURED_ORDERS = f"-33 % to 42 %, at 10 % of the bytes of raw experts ({_PAGE})"
"""What merges under a budget kept of a gain in the measurements of a page: samples, and blocks in an order."""
_ADVISED = {REASON_MISSING: "some tensors have no statistics, and their reads are spread evenly"}


def verdict_of(plan: Plan) -> BudgetVerdict:
    """Say of a plan what it reads, and what is missing of whom."""
    unspent = [fallback for fallback in plan.fallbacks if fallback.decision.endswith(UNSPENT)]
    counts = counts_of(plan)
    experts = sorted(_coverage(plan, counts), key=lambda expert: expert.share)
    sampling = plan.sampling
    return BudgetVerdict(
        policy=plan.policy,
        is_full=_is_full(plan, counts),
        planned_bytes=plan.planned_bytes,
        full_bytes=plan.full_cost_bytes,
        experts=tuple(experts),
        unread=tuple(fallback.where for fallback in plan.fallbacks if fallback.decision == NOTHING_READ),
        measured=MEASURED_ORDERS if sampling is None else MEASURED_SAMPLES,
        most_factor=1 / sampling.least_probability if sampling is not None and sampling.least_probability else 1.0,
        unspent_bytes=plan.budget_bytes - plan.planned_bytes if unspent else 0,
        unspent_reason=unspent[0].reason if unspent else "",
        bound=plan.bound,
    )


def _coverage(plan: Plan, counts: BlockCounts) -> Iterator[ExpertCoverage]:
    """Yield for each expert the share of its bytes that is read, and of blocks that are approximate."""
    experts = [model for model in plan.models if model.role == "expert"]
    numbers = zip(counts.read_E.tolist(), counts.omitted_E.tolist(), counts.in_part_E.tolist(), strict=True)
    for model, (read, omitted, in_part) in zip(experts, numbers, strict=True):
        share = read_share(
            read, omitted, model.planned_bytes - model.side_bytes, model.full_cost_bytes - model.side_bytes
        )
        yield ExpertCoverage(model.model, share, in_part / max(1, read + omitted))


def _is_full(plan: Plan, counts: BlockCounts) -> bool:
    """Tell whether a plan is the full merge: every block at its highest level, with the recipe's parameters."""
    return not (plan.adjustments or counts.omitted_E.any() or counts.in_part_E.any())


def analysis_advice(plan: Plan) -> tuple[str, ...]:
    """Name the command that would make a plan exact, and what it reads; nothing where all is known or all is read."""
    reasons = {fallback.where: fallback.reason for fallback in plan.fallbacks if fallback.reason in _ADVISED}
    experts = [model for model in plan.models if model.role == "expert" and f"expert '{model.model}'" in reasons]
    bases = [model for model in plan.models if model.role == "base"]
    if not experts or not bases or _is_full(plan, counts_of(plan)):
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
