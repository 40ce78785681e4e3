"""Translate a plan for the engine: runs of equal access per tensor, and known tensor-wide quantities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.engine.pipeline.segments import Run, full_access
from mergepipe.engine.reductions.known_quantities import NOTHING_KNOWN, KnownQuantities, NothingKnown
from mergepipe.operators.base import InnerProducts, MagnitudeCut, Reduced, ReductionRequest
from mergepipe.operators.statistics import NOTHING_KEPT, Cut
from mergepipe.planning.plan import Access, PlannedTensor
from mergepipe.recipes.resolve.tasks import MergeTask

OMITTED = -1
FREE = -2  # equal to the base: known without reading
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
        sources_EB = source_of_blocks(planned, grid.n_blocks)
        levels_EB = level_of_blocks(planned, grid.n_blocks)
        if grid.n_blocks == 0:
            yield Run(task_index, Span(0, 0), (), ())
            return
        begins_EB = (sources_EB[:, 1:] != sources_EB[:, :-1]) | (levels_EB[:, 1:] != levels_EB[:, :-1])
        changes = np.flatnonzero(begins_EB.any(axis=0)) + 1
        edges = [0, *changes.tolist(), grid.n_blocks]
        for first, last in pairwise(edges):
            column_E = sources_EB[:, first]
            present = tuple(np.flatnonzero(column_E >= 0).tolist())
            sources = tuple(int(column_E[e]) for e in present)
            free = tuple(np.flatnonzero(column_E == FREE).tolist())
            span = Span(grid.span(first).start, grid.span(last - 1).stop)
            levels = tuple((e, int(levels_EB[e, first])) for e in present if levels_EB[e, first])
            yield Run(task_index, span, present, sources, free, levels=levels)

    def factor(self, name: str) -> float:
        """Return what the merged delta of a tensor is multiplied by: of a sample 1 / its probability, else 1."""
        planned = self.tensors.get(name)
        return 1.0 if planned is None else planned.factor

    def known(self, name: str) -> KnownQuantities:
        """Return the tensor-wide quantities that the plan holds of a tensor."""
        planned = self.tensors.get(name)
        return NOTHING_KNOWN if planned is None else PlannedQuantities(planned)


@dataclass(frozen=True, slots=True)
class PlannedQuantities(NothingKnown):
    """The quantities that a plan holds of one tensor. Of experts that are not read nothing has to be known."""

    planned: PlannedTensor

    def unanswered(self, request: ReductionRequest) -> ReductionRequest | None:
        """Return a request for the experts that are read and whose quantities the plan lacks."""
        match request:
            case MagnitudeCut(kept_E):
                is_open_E = [cut is None for cut in self._cuts_E()]
                open_E = tuple(n_kept if is_open else 0 for n_kept, is_open in zip(kept_E, is_open_E, strict=True))
                return MagnitudeCut(open_E) if any(is_open_E) else None
            case InnerProducts():
                return None if None not in self._products_E() else request
            case _:  # a plan knows nothing of it
                return request

    def completed(self, reduced: Reduced) -> Reduced:
        """Join the reduced quantities with those that the plan holds, of all experts or of some."""
        cuts_E, products_E = self._cuts_E(), self._products_E()
        recorded = Reduced(
            cuts_E3=None if None in cuts_E else np.array(cuts_E, np.uint32),
            products_E3=None if None in products_E else np.array(products_E, np.float64),
        )
        if recorded.cuts_E3 is not None or recorded.products_E3 is not None:
            return reduced.joined(recorded)
        if reduced.cuts_E3 is None:
            return reduced
        joined_E = [
            cut if planned_cut is None else planned_cut
            for planned_cut, cut in zip(cuts_E, reduced.cuts_E3.tolist(), strict=True)
        ]
        return replace(reduced, cuts_E3=np.array(joined_E, np.uint32))

    def _cuts_E(self) -> list[Cut | None]:
        return [_cut(access) for access in self.planned.access]

    def _products_E(self) -> list[tuple[float, float, float] | None]:
        return [access.products if _is_read(access) else UNREAD_PRODUCTS for access in self.planned.access]


def _is_read(access: Access) -> bool:
    return bool(access.blocks or access.shared)


def _cut(access: Access) -> Cut | None:
    """Return the cut; any will do where nothing is read."""
    return NOTHING_KEPT if access.cut is None and not _is_read(access) else access.cut


def source_of_blocks(planned: PlannedTensor, n_blocks: int) -> NDArray[np.int32]:
    """Return per expert and block (E, B) the expert whose bytes serve it, or `OMITTED`, or `FREE`."""
    sources_EB = np.full((len(planned.access), n_blocks), OMITTED, np.int32)
    for e, access in enumerate(planned.access):
        for start, stop in access.blocks:
            sources_EB[e, start:stop] = e
        for start, stop in access.free:
            sources_EB[e, start:stop] = FREE
        for start, stop, source in access.shared:
            sources_EB[e, start:stop] = source
    return sources_EB


def level_of_blocks(planned: PlannedTensor, n_blocks: int) -> NDArray[np.int16]:
    """Return per expert and block (E, B) the level at which it is read, 0 where it is read unencoded or not at all."""
    levels_EB = np.zeros((len(planned.access), n_blocks), np.int16)
    for e, access in enumerate(planned.access):
        for start, stop, level in access.levels:
            levels_EB[e, start:stop] = level
    return levels_EB
