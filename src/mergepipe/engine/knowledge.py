"""Tensor-wide quantities taken from statistics instead of being gathered from blocks again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mergepipe.engine.selection import NOTHING_KEPT_BITS
from mergepipe.operators.base import InnerProducts, MagnitudeCut, Reduced, ReductionRequest
from mergepipe.statistics import TensorStatistics, rank_of_density

StatisticsByTensor = Mapping[str, TensorStatistics]


def answer(name: str, request: ReductionRequest, statistics_E: Sequence[StatisticsByTensor]) -> Reduced | None:
    """What exact statistics of every expert's tensor say, equal to what a reduction would; None if any is lacking."""
    known = [of_expert.get(name) for of_expert in statistics_E]
    found = [each for each in known if each is not None]
    if len(found) < len(known):
        return None
    match request:
        case MagnitudeCut(kept_E):
            bits = [_cut(each, kept) for each, kept in zip(found, kept_E, strict=True)]
            return None if None in bits else Reduced(threshold_bits_E=np.array(bits, np.uint32))
        case InnerProducts():
            return Reduced(products_E3=np.array([each.products_3 for each in found]))


def _cut(statistics: TensorStatistics, kept: int) -> int | None:
    """The cut that keeps `kept` elements, if a known density keeps as many."""
    n = statistics.grid.n_elements
    if kept == 0:
        return NOTHING_KEPT_BITS
    if kept >= n:
        return 0
    for density, bits in zip(statistics.densities_D, statistics.threshold_bits_D, strict=True):
        if rank_of_density(float(density), n) == kept:
            return int(bits)
    return None
