"""Build the `MergeWork` of a merge from its tasks, its plan (if any) and its seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe.engine.access import PlannedAccess
from mergepipe.engine.execute import MergeWork
from mergepipe.operators.registry import operator_named
from mergepipe.planning.plan import Plan
from mergepipe.recipes.resolve.tasks import MergeTask

ON_OMIT_RENORMALIZE = "renormalize"


def merge_work(
    operator: str, tasks: Sequence[MergeTask], plan: Plan | None, seed: int, content_ids: Mapping[int, str]
) -> MergeWork:
    """Build the work of merging `tasks` by `plan`, or in full without one; a plan's seed overrides `seed`."""
    access = None
    if plan is not None:
        access = PlannedAccess({tensor.name: tensor for tensor in plan.tensors}, plan.block_elements)
    return MergeWork(
        tuple(tasks),
        operator_named(operator),
        seed if plan is None else plan.seed,
        content_ids,
        access=access,
        renormalize=plan is not None and plan.on_omit == ON_OMIT_RENORMALIZE,
    )
