"""The touch map of a snapshot: the blocks of each tensor that its experts contribute to, from its manifest alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, BlockGrid, element_count
from mergepipe.engine.planned_access import OMITTED, level_of_blocks
from mergepipe.planning.plan import Access, PlannedTensor, format_runs
from mergepipe.recipes.tasks import Action
from mergepipe.reports import BlockUse, TensorUse
from mergepipe.runs.stored_plan import plan_of
from mergepipe.snapshots.manifest import Manifest, changing_adapters


def full_merge_tensors(manifest: Manifest) -> tuple[PlannedTensor, ...]:
    """List the tensors of a full merge as if they were planned: every block of every expert, on the default grid."""
    n_experts = sum(source.is_expert for source in manifest.inputs)
    experts = tuple(range(n_experts))
    tensors = []
    for tensor in manifest.tensors:
        adapters = changing_adapters(tensor.reason)
        if tensor.action != Action.MERGE.value and adapters is None:
            continue
        n_elements = element_count(tensor.shape)
        n_blocks = BlockGrid(n_elements, DEFAULT_BLOCK_ELEMENTS).n_blocks
        blocks = ((0, n_blocks),) if n_blocks else ()
        accesses = [Access(blocks)] * n_experts
        if adapters is not None:  # of a snapshot with adapters folded in: the others leave the base as it is
            accesses = [Access(blocks) if expert in adapters else Access(free=blocks) for expert in experts]
        reads = tuple(dict.fromkeys(accesses))
        read_of = tuple(reads.index(access) for access in accesses)
        tensors.append(PlannedTensor(tensor.name, n_elements, 0, experts, reads, read_of))
    return tuple(tensors)


def runs_text(is_in_B: NDArray[np.bool_]) -> str:
    """Format the blocks that are in a set as runs."""
    edges = np.flatnonzero(np.diff(is_in_B, prepend=False, append=False)).tolist()
    return format_runs(tuple(zip(edges[::2], edges[1::2], strict=True)))


Counts = Callable[[int, str], bool]
"""Whether an expert, by its index among those of the manifest, is asked for in the tensor of that name."""


def touched_tensors(manifest: Manifest, pattern: str, counts: Counts) -> tuple[TensorUse, ...]:
    """Return the tensors whose names match a shell pattern and that experts contribute blocks to."""
    plan = plan_of(manifest, "the manifest's plan")
    tensors = full_merge_tensors(manifest) if plan is None else plan.tensors
    block_elements = DEFAULT_BLOCK_ELEMENTS if plan is None else plan.block_elements
    experts = [source.model for source in manifest.inputs if source.is_expert]
    uses = (
        _touched(tensor, BlockGrid(tensor.n_elements, block_elements).n_blocks, experts, counts)
        for tensor in tensors
        if fnmatchcase(tensor.name, pattern)
    )
    return tuple(use for use in uses if use.uses)


def _touched(tensor: PlannedTensor, n_blocks: int, experts: Sequence[str], counts: Counts) -> TensorUse:
    levels_EB = level_of_blocks(tensor, n_blocks)
    is_read_EB = levels_EB > OMITTED
    is_asked_E = np.array([counts(e, tensor.name) for e in tensor.models], np.bool_)
    uses = tuple(
        BlockUse(experts[e], "read", runs_text(is_read_B), "")
        for e, is_asked, is_read_B in zip(tensor.models, is_asked_E.tolist(), is_read_EB, strict=True)
        if is_asked and is_read_B.any()
    )
    touched_B = np.any(is_read_EB[is_asked_E], axis=0)
    return TensorUse(tensor.name, n_blocks, runs_text(np.asarray(touched_B)), uses)
