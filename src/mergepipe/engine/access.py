"""Translate a plan for the engine: runs of equal access per tensor, and known tensor-wide quantities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.engine.order_statistics import NOTHING_KEPT_BITS
from mergepipe.engine.segments import Run, full_access
from mergepipe.operators.base import InnerProducts, MagnitudeCut, Reduced, ReductionRequest
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

    def known(self, name: str) -> Reduced | None:
        """Return the plan's tensor-wide quantities, if an operator needs no others."""
        planned = self.tensors.get(name)
        if planned is None:
            return None
        bits = [self._bits(planned, e) for e in range(len(planned.access))]
        products = [self._products(access) for access in planned.access]
        all_bits = None if None in bits else np.array(bits, np.uint32)
        all_products = None if None in products else np.array(products, np.float64)
        if all_bits is None and all_products is None:
            return None
        return Reduced(threshold_bits_E=all_bits, products_E3=all_products)

    def _bits(self, planned: PlannedTensor, e: int) -> int | None:
        access = planned.access[e]
        if access.threshold_bits is None and not access.blocks and not access.shared:
            return NOTHING_KEPT_BITS  # nothing of it is read: any cut will do
        return access.threshold_bits

    def _products(self, access: Access) -> tuple[float, float, float] | None:
        is_read = bool(access.blocks or access.shared)
        return access.products if is_read else UNREAD_PRODUCTS

    def request(self, name: str, wanted: ReductionRequest | None) -> ReductionRequest | None:
        """Return what is left to be reduced: nothing that the plan knows, nothing of experts that are not read."""
        planned = self.tensors.get(name)
        if planned is None or wanted is None:
            return wanted
        match wanted:
            case MagnitudeCut(kept_E):
                open_E = [self._bits(planned, e) is None for e in range(len(kept_E))]
                left_E = tuple(kept if is_open else 0 for kept, is_open in zip(kept_E, open_E, strict=True))
                return MagnitudeCut(left_E) if any(open_E) else None
            case InnerProducts():
                return None if all(self._products(access) for access in planned.access) else wanted
            case _:  # a plan knows nothing of it
                return wanted

    def completed(self, name: str, reduced: Reduced) -> Reduced:
        """Join the reduced quantities with those that the plan knows."""
        planned = self.tensors.get(name)
        if planned is None:
            return reduced
        known = self.known(name)
        if known is not None:
            return reduced.joined(known)
        if reduced.threshold_bits_E is None:
            return reduced
        bits_E = reduced.threshold_bits_E.copy()
        for e in range(len(planned.access)):
            known_bits = self._bits(planned, e)
            if known_bits is not None:
                bits_E[e] = known_bits
        return replace(reduced, threshold_bits_E=bits_E)


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
