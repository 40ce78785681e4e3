"""Decide which packed experts' indices a budget can pay for; they are read before blocks are selected."""

from __future__ import annotations

from mergepipe.checkpoints.contract import EncodedSide
from mergepipe.planning.budget import BudgetRequest
from mergepipe.runs.inputs.opened import Inputs


def find_unread(inputs: Inputs, budget: BudgetRequest) -> frozenset[int]:
    """Return the experts whose index does not fit the budget after the indices of the experts before them.

    Of a share the least that everything can cost is taken, since what it does cost is in the indices.
    """
    sides = [inputs.checkpoints[model].encoded for model in inputs.expert_models]
    limit_bytes = budget.limit_bytes(_least_full_cost(inputs, sides))
    used_bytes = sum(side.cost_bytes for side in sides if side is not None and side.is_read)
    unread = set()
    for e, side in enumerate(sides):
        if side is None or side.is_read:
            continue
        if used_bytes + side.cost_bytes <= limit_bytes:
            used_bytes += side.cost_bytes
        else:
            unread.add(e)
    return frozenset(unread)


def _least_full_cost(inputs: Inputs, sides: list[EncodedSide | None]) -> int:
    """Compute a lower bound on the cost of reading all experts that needs no index."""
    packed = {model for model, side in zip(inputs.expert_models, sides, strict=True) if side is not None}
    others = sum(
        source.nbytes
        for task in inputs.resolution.tasks
        for model, source in zip(task.expert_models, task.experts, strict=True)
        if model not in packed
    )
    return others + sum(side.least_bytes for side in sides if side is not None)
