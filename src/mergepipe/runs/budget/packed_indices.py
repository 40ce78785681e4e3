"""Decide which packed experts' indices a budget can pay for; they are read before blocks are selected."""

from __future__ import annotations

from mergepipe.planning.budget import BudgetRequest
from mergepipe.runs.inputs.opened import Inputs


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
