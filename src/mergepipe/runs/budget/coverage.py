"""Count what a plan covers: blocks read, shared and free per expert, and blocks that any expert contributes to."""

from __future__ import annotations

import numpy as np

from mergepipe.core.blocks import BlockGrid
from mergepipe.engine.tensor_work import FREE, source_of_blocks
from mergepipe.planning.plan import Plan
from mergepipe.snapshots.manifest import Coverage


def coverage_of(plan: Plan) -> Coverage:
    """Count the blocks of all planned tensors."""
    n_experts = sum(model.role == "expert" for model in plan.models)
    blocks = touched = 0
    read_E, shared_E, free_E = (np.zeros(n_experts, np.int64) for _ in range(3))
    for tensor in plan.tensors:
        n_blocks = BlockGrid(tensor.n_elements, plan.block_elements).n_blocks
        sources_EB = source_of_blocks(tensor, n_blocks)
        blocks += n_blocks
        touched += int((sources_EB >= 0).any(axis=0).sum())
        experts, own_S1 = list(tensor.models), np.arange(len(tensor.models))[:, None]
        read_E[experts] += (sources_EB == own_S1).sum(axis=1)
        shared_E[experts] += ((sources_EB >= 0) & (sources_EB != own_S1)).sum(axis=1)
        free_E[experts] += (sources_EB == FREE).sum(axis=1)
    counts = (tuple(int(n) for n in each_E) for each_E in (read_E, shared_E, free_E))
    return Coverage(blocks, touched, *counts)
