"""Tensor-wide quantities that a plan or statistics hold: requests for them are answered without looking at blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import InnerProducts, MagnitudeCut, Reduced, ReductionRequest
from mergepipe.operators.statistics import NOTHING_KEPT, Cut, TensorStatistics, rank_of_density
from mergepipe.planning.plan import Products


@dataclass(frozen=True, slots=True)
class ExpertQuantities:
    """The exact tensor-wide quantities of one expert's tensor that are known: magnitude cuts, and inner products.

    `cuts` are by the number of elements that reach them. A plan's is at None: the one that its rule wants.
    """

    n_elements: int
    cuts: Mapping[int | None, Cut]
    products: Products | None

    @classmethod
    def of(cls, statistics: TensorStatistics) -> ExpertQuantities:
        """Keep the quantities of exact statistics, without their blocks."""
        n_elements = statistics.grid.n_elements
        ranks = [rank_of_density(density, n_elements) for density in statistics.densities_D.tolist()]
        cuts: dict[int | None, Cut] = {}
        for rank, cut_3 in zip(ranks, statistics.cuts_D3.tolist(), strict=True):
            cuts.setdefault(rank, Cut(*cut_3))
        base, delta, mixed = statistics.products_3.tolist()
        return cls(n_elements, cuts, (base, delta, mixed))

    def cut(self, n_kept: int) -> Cut | None:
        """Return the cut that keeps `n_kept` elements, if it is known."""
        if n_kept == 0:
            return NOTHING_KEPT
        if n_kept >= self.n_elements:
            return Cut(0)
        return self.cuts.get(n_kept, self.cuts.get(None))


@dataclass(frozen=True, slots=True)
class KnownQuantities:
    """The quantities of all experts of one tensor that are known without looking at it; of no experts, nothing is.

    Law: what is known is equal to what a reduction would gather.
    """

    experts: tuple[ExpertQuantities, ...] = ()

    def answer(self, request: ReductionRequest) -> Reduced | None:
        """Answer a request if all of it is known."""
        match request:
            case MagnitudeCut(kept_E, dropped_E) if self.experts:
                lower_E3 = _all_cuts(self._cuts(kept_E))
                upper_E3 = _all_cuts(self._cuts(dropped_E)) if dropped_E else None
                if lower_E3 is None or (dropped_E and upper_E3 is None):
                    return None
                return Reduced(cuts_E3=lower_E3, upper_cuts_E3=upper_E3)
            case InnerProducts() if self.experts:
                products = [expert.products for expert in self.experts]
                return None if None in products else Reduced(products_E3=np.array(products, np.float64))
            case _:  # of several experts together, and by row, nothing is known
                return None

    def missing(self, request: ReductionRequest) -> ReductionRequest:
        """Return the part of a request that is still to be computed."""
        if not isinstance(request, MagnitudeCut) or request.dropped_E or not self.experts:
            return request
        pairs = zip(request.kept_E, self._cuts(request.kept_E), strict=True)
        return MagnitudeCut(tuple(n_kept if cut is None else 0 for n_kept, cut in pairs))

    def completed(self, request: ReductionRequest | None, gathered: Reduced) -> Reduced:
        """Return the answer to the whole request: what was gathered for its missing part, and the known rest."""
        if not isinstance(request, MagnitudeCut) or request.dropped_E or not self.experts or gathered.cuts_E3 is None:
            return gathered
        pairs = zip(self._cuts(request.kept_E), gathered.cuts_E3.tolist(), strict=True)
        return replace(gathered, cuts_E3=np.array([cut or found_3 for cut, found_3 in pairs], np.uint32))

    def _cuts(self, kept_E: Sequence[int]) -> list[Cut | None]:
        return [expert.cut(n_kept) for expert, n_kept in zip(self.experts, kept_E, strict=True)]


NOTHING_KNOWN = KnownQuantities()


def _all_cuts(cuts_E: Sequence[Cut | None]) -> NDArray[np.uint32] | None:
    return None if None in cuts_E else np.array(cuts_E, np.uint32).reshape(-1, 3)
