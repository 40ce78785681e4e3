"""Answer requests for tensor-wide quantities from statistics instead of reading blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mergepipe.engine.order_statistics import NOTHING_KEPT_BITS
from mergepipe.operators.base import InnerProducts, MagnitudeBand, MagnitudeCut, Reduced, ReductionRequest
from mergepipe.operators.statistics import TensorStatistics, rank_of_density


def answer(request: ReductionRequest, statistics_E: Sequence[TensorStatistics | None]) -> Reduced | None:
    """Answer a request from exact statistics of every expert, equal to a reduction; None if any is missing."""
    found = [each for each in statistics_E if each is not None]
    if len(found) < len(statistics_E):
        return None
    match request:
        case MagnitudeCut(kept_E):
            cuts_E = _cuts(found, kept_E)
            return None if cuts_E is None else Reduced(threshold_bits_E=cuts_E)
        case MagnitudeBand(kept_E, dropped_E):
            lower_E, upper_E = _cuts(found, kept_E), _cuts(found, dropped_E)
            return None if lower_E is None or upper_E is None else Reduced(lower_E, upper_bits_E=upper_E)
        case InnerProducts():
            return Reduced(products_E3=np.array([each.products_3 for each in found]))
        case _:  # of several experts together, and by row, nothing is on record
            return None


def _cuts(found: Sequence[TensorStatistics], kept_E: Sequence[int]) -> NDArray[np.uint32] | None:
    bits = [_cut(each, kept) for each, kept in zip(found, kept_E, strict=True)]
    return None if None in bits else np.array(bits, np.uint32)


def _cut(statistics: TensorStatistics, kept: int) -> int | None:
    """Return the cut that keeps `kept` elements, if a recorded density keeps as many."""
    n = statistics.grid.n_elements
    if kept == 0:
        return NOTHING_KEPT_BITS
    if kept >= n:
        return 0
    for density, bits in zip(statistics.densities_D, statistics.threshold_bits_D, strict=True):
        if rank_of_density(float(density), n) == kept:
            return int(bits)
    return None
