"""Find the lowest level of each packed expert that gives the operator the same result."""

from __future__ import annotations

import numpy as np

from mergepipe.checkpoints.contract import as_leveled
from mergepipe.operators.base import NOTHING_REDUCED, MagnitudeCut, Operator, OperatorInput, Reduced
from mergepipe.recipes.tasks import Action, MergeTask


def sufficient_levels(operator: Operator, inputs: OperatorInput, task: MergeTask) -> tuple[tuple[int, int], ...]:
    """Return (expert, level) for experts of which a lower level gives the same result; the lowest such level.

    That is so for rules that keep nothing but the largest deltas of each expert, if a level has all of these.
    """
    if task.action is Action.COPY or all(as_leveled(source) is None for source in task.experts):
        return ()
    request = operator.reduction(inputs, NOTHING_REDUCED)
    if not isinstance(request, MagnitudeCut) or not _trims_only(operator, inputs):
        return ()
    levels = []
    for e, (source, n_kept) in enumerate(zip(map(as_leveled, task.experts), request.kept_E, strict=True)):
        if source is not None:
            level = source.exact_level(n_kept)
            if level < source.last_level:
                levels.append((e, level))
    return tuple(levels)


def _trims_only(operator: Operator, inputs: OperatorInput) -> bool:
    """Whether no value below the cuts matters, neither to other reductions."""
    reduced = Reduced(cuts_E3=np.zeros((len(inputs.experts), 3), np.uint32))
    return operator.influence(inputs, None).trims and operator.reduction(inputs, reduced) is None
