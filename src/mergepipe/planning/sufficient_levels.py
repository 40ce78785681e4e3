"""How much a rule needs to know of each expert, for experts of which less than all can be read."""

from __future__ import annotations

import numpy as np

from mergepipe.checkpoints.contract import Graded
from mergepipe.operators.base import NOTHING_REDUCED, MagnitudeCut, Operator, OperatorInput, Reduced
from mergepipe.recipes.resolve.tasks import Action, MergeTask


def sufficient_levels(operator: Operator, given: OperatorInput, task: MergeTask) -> tuple[tuple[int, int], ...]:
    """(expert, level) of the experts of which less than all gives the same result: the least such level.

    That is so for rules that keep nothing but the largest deltas of each expert, if a level has all of these.
    """
    if task.action is Action.COPY or not any(isinstance(source, Graded) for source in task.experts):
        return ()
    request = operator.reduction(given, NOTHING_REDUCED)
    if not isinstance(request, MagnitudeCut) or not _trims_only(operator, given):
        return ()
    found = []
    for e, (source, kept) in enumerate(zip(task.experts, request.kept_E, strict=True)):
        if isinstance(source, Graded):
            level = source.exact_level(kept)
            if level < source.last_level:
                found.append((e, level))
    return tuple(found)


def _trims_only(operator: Operator, given: OperatorInput) -> bool:
    """Whether nothing below the cuts matters, for other sums over the tensor neither."""
    known = Reduced(threshold_bits_E=np.zeros(len(given.experts), np.uint32))
    return operator.influence(given, None).trims and operator.reduction(given, known) is None
