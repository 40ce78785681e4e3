"""A plan as the engine uses it: for each tensor, runs of blocks read alike, and the quantities that the plan holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.engine.known_quantities import NOTHING_KNOWN, ExpertQuantities, KnownQuantities
from mergepipe.engine.segments import Run, full_access
from mergepipe.operators.statistics import NOTHING_KEPT, Cut
from mergepipe.planning.plan import ALL, PlannedTensor
from mergepipe.recipes.tasks import MergeTask

OMITTED = 0
FREE = -1  # equal to the base: known without reading
UNREAD_PRODUCTS = (1.0, 0.0, 0.0)  # of an expert of which nothing is read: as if it were the base itself


@dataclass(frozen=True, slots=True)
class PlannedAccess:
    """The planned accesses by tensor name. Tensors without a plan are read in full."""

    tensors: Mapping[str, PlannedTensor]
    block_elements: int

    def runs_of(self, task_index: int, task: MergeTask) -> Iterable[Run]:
        """Return the runs of blocks for which the same experts are read, in order, covering the tensor."""
        planned = self.tensors.get(task.name)
        if planned is None:
            return full_access(task_index, task)
        return self._runs(task_index, planned)

    def _runs(self, task_index: int, planned: PlannedTensor) -> Iterator[Run]:
        grid = BlockGrid(planned.n_elements, self.block_elements)
        levels_EB = level_of_blocks(planned, grid.n_blocks)
        if grid.n_blocks == 0:
            yield Run(task_index, Span(0, 0), ())
            return
        changes = np.flatnonzero((levels_EB[:, 1:] != levels_EB[:, :-1]).any(axis=0)) + 1
        for first, last in pairwise([0, *changes.tolist(), grid.n_blocks]):
            level_E = levels_EB[:, first].tolist()
            present = tuple(e for e, level in enumerate(level_E) if level > 0)
            free = tuple(e for e, level in enumerate(level_E) if level == FREE)
            span = Span(grid.span(first).start, grid.span(last - 1).stop)
            levels = tuple((e, level_E[e]) for e in present if level_E[e] != ALL)
            yield Run(task_index, span, present, free, levels)

    def probability(self, name: str) -> float:
        """Return the probability with which blocks of a tensor were drawn; 1 where no sample is."""
        planned = self.tensors.get(name)
        return 1.0 if planned is None else planned.probability

    def known(self, name: str) -> KnownQuantities:
        """Return the tensor-wide quantities that the plan holds of a tensor; of experts that are not read any will do.

        Those count as if they were the base itself.
        """
        planned = self.tensors.get(name)
        if planned is None:
            return NOTHING_KNOWN
        products_E = planned.products or (None,) * len(planned.models)
        experts = []
        for access, cut, products in zip(planned.access, planned.cuts_E, products_E, strict=True):
            cut = NOTHING_KEPT if cut is None and not access.blocks else cut
            cuts: dict[int | None, Cut] = {} if cut is None else {None: cut}
            experts.append(ExpertQuantities(planned.n_elements, cuts, products if access.blocks else UNREAD_PRODUCTS))
        return KnownQuantities(tuple(experts))


def level_of_blocks(planned: PlannedTensor, n_blocks: int) -> NDArray[np.int16]:
    """Return per expert and block (E, B) the level at which it is read, or `OMITTED`, or `FREE`."""
    levels_RB = np.full((len(planned.reads), n_blocks), OMITTED, np.int16)
    for access, levels_B in zip(planned.reads, levels_RB, strict=True):
        for start, stop in access.blocks:
            levels_B[start:stop] = ALL
        for start, stop in access.free:
            levels_B[start:stop] = FREE
        for start, stop, level in access.levels:
            levels_B[start:stop] = level
    return levels_RB[list(planned.read_of)] if planned.read_of else np.tile(levels_RB, (len(planned.models), 1))
