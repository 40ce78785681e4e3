"""Build the `MergeWork` of a merge from its tasks, its plan (if any) and its seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe.checkpoints.open_files import PinnedFile
from mergepipe.engine.access import PlannedAccess
from mergepipe.engine.work import MergeWork, OutputPlan
from mergepipe.planning.plan import Plan

ON_OMIT_RENORMALIZE = "renormalize"


def merge_work(
    operator: str,
    output: OutputPlan,
    plan: Plan | None,
    seed: int,
    content_ids: Mapping[int, str],
    files: Sequence[PinnedFile] = (),
) -> MergeWork:
    """Build the work of merging `output` by `plan`, or in full without one; a plan's seed overrides `seed`."""
    access = None
    if plan is not None:
        access = PlannedAccess({tensor.name: tensor for tensor in plan.tensors}, plan.block_elements)
    return MergeWork(
        output,
        operator,
        seed if plan is None else plan.seed,
        content_ids,
        tuple(files),
        access=access,
        renormalize=plan is not None and plan.on_omit == ON_OMIT_RENORMALIZE,
    )
