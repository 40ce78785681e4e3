"""Answer requests for tensor-wide quantities from what is on record instead of reading blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import InnerProducts, MagnitudeBand, MagnitudeCut, Reduced, ReductionRequest
from mergepipe.operators.statistics import NOTHING_KEPT, Cut, TensorStatistics, rank_of_density


class KnownQuantities(Protocol):
    """The tensor-wide quantities of one tensor that are known without reading it."""

    def answer(self, request: ReductionRequest) -> Reduced | None:
        """Answer a request, equal to what a reduction would give; None if any of it must be gathered."""
        ...

    def unanswered(self, request: ReductionRequest) -> ReductionRequest | None:
        """Return the part of a request that must be gathered."""
        ...

    def completed(self, reduced: Reduced) -> Reduced:
        """Join gathered quantities with the known ones."""
        ...


class NothingKnown:
    """Base of what knows little: all of a request is gathered."""

    __slots__ = ()

    def answer(self, request: ReductionRequest) -> Reduced | None:
        """Know nothing."""
        return None

    def unanswered(self, request: ReductionRequest) -> ReductionRequest | None:
        """Return all of the request."""
        return request

    def completed(self, reduced: Reduced) -> Reduced:
        """Return what was gathered."""
        return reduced


NOTHING_KNOWN = NothingKnown()


@dataclass(frozen=True, slots=True)
class ExpertQuantities:
    """The exact tensor-wide quantities of one expert's tensor: magnitude cuts by density, and inner products."""

    n_elements: int
    cuts: tuple[tuple[float, Cut], ...]  # by density
    products: tuple[float, float, float]

    @classmethod
    def of(cls, statistics: TensorStatistics) -> ExpertQuantities:
        """Keep the quantities of exact statistics, without their blocks."""
        cuts = zip(statistics.densities_D.tolist(), starmap(Cut, statistics.cuts_D3.tolist()), strict=True)
        base, delta, mixed = statistics.products_3.tolist()
        return cls(statistics.grid.n_elements, tuple(cuts), (base, delta, mixed))

    def cut(self, n_kept: int) -> Cut | None:
        """Return the cut that keeps `n_kept` elements, if a recorded density keeps as many."""
        if n_kept == 0:
            return NOTHING_KEPT
        if n_kept >= self.n_elements:
            return Cut(0)
        for density, cut in self.cuts:
            if rank_of_density(density, self.n_elements) == n_kept:
                return cut
        return None


@dataclass(frozen=True, slots=True)
class RecordedQuantities(NothingKnown):
    """The quantities on record of all experts of one tensor."""

    experts: tuple[ExpertQuantities, ...]

    def answer(self, request: ReductionRequest) -> Reduced | None:
        """Answer a request if every expert has what it asks for."""
        match request:
            case MagnitudeCut(kept_E):
                cuts_E3 = self._cuts(kept_E)
                return None if cuts_E3 is None else Reduced(cuts_E3=cuts_E3)
            case MagnitudeBand(kept_E, dropped_E):
                lower_E3, upper_E3 = self._cuts(kept_E), self._cuts(dropped_E)
                return None if lower_E3 is None or upper_E3 is None else Reduced(lower_E3, upper_cuts_E3=upper_E3)
            case InnerProducts():
                return Reduced(products_E3=np.array([expert.products for expert in self.experts]))
            case _:  # of several experts together, and by row, nothing is on record
                return None

    def _cuts(self, kept_E: Sequence[int]) -> NDArray[np.uint32] | None:
        cuts = [expert.cut(n_kept) for expert, n_kept in zip(self.experts, kept_E, strict=True)]
        return None if None in cuts else np.array(cuts, np.uint32)
