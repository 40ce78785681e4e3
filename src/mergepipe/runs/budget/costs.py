"""Costs that are known before a plan is made: of indices of packed experts, and of the experts of some tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from mergepipe.checkpoints.contract import Readable, TensorEntry, Unchanged, block_costs_bytes
from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.engine.segments import at_level
from mergepipe.planning.budget import BudgetRequest
from mergepipe.planning.plan import Access, Plan, PlannedTensor
from mergepipe.recipes.tasks import MergeTask
from mergepipe.runs.inputs import Inputs

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
