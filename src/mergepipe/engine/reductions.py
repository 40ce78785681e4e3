"""Tensor-wide quantities gathered from blocks: magnitude cuts and inner products.

A reduction sees every element of its tensor once by `accumulate`, from any thread and in any order, and is asked by
`finish` whether it is done. If not, it sees every element once more by `refine`. Where the tensor is not kept in
memory, `survey` shows it a sample first, so that one pass usually suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergepipe.blocks import GRAIN_ELEMENTS
from mergepipe.engine.selection import RankSearch
from mergepipe.operators.base import InnerProducts, MagnitudeCut, RawBlock, Reduced, ReductionRequest


class Reduction(Protocol):
    """One tensor-wide quantity under construction."""

    def survey(self, block: RawBlock) -> None:
        """Look at a sample block, before any `accumulate`."""
        ...

    def narrow(self) -> None:
        """Use what the survey saw."""
        ...

    def accumulate(self, block: RawBlock) -> None:
        """Take in a block; every element exactly once."""
        ...

    def finish(self) -> bool:
        """Whether the result is known; if not, every block must be shown to `refine`, then `finish` be asked again."""
        ...

    def refine(self, block: RawBlock) -> None:
        """Take in a block a second time."""
        ...

    def result(self) -> Reduced:
        """The answer, once `finish` said True."""
        ...


def make_reduction(request: ReductionRequest, n_elements: int, n_experts: int) -> Reduction:
    """The reduction that answers `request`."""
    match request:
        case MagnitudeCut(kept_E):
            return MagnitudeCuts(kept_E, n_elements)
        case InnerProducts():
            return InnerProductSums(n_elements, n_experts)


class MagnitudeCuts:
    """Per expert the exact magnitude of the `kept_E[e]`-th largest |delta|. Memory: see `RankSearch`, per expert."""

    def __init__(self, kept_E: Sequence[int], n_elements: int) -> None:
        self._kept_E = tuple(kept_E)
        self._search_E = [RankSearch((kept,), n_elements) for kept in kept_E]

    def _each(self, block: RawBlock, step: Callable[[RankSearch, RawBlock, int], None]) -> None:
        """Do a step for every open expert, starting at a different one for each block: threads seldom meet."""
        shift = block.first_element // GRAIN_ELEMENTS
        n = len(block.present_E)
        for i in range(n):
            place = (i + shift) % n
            search = self._search_E[int(block.present_E[place])]
            if search.is_open:
                step(search, block, place)

    def survey(self, block: RawBlock) -> None:
        self._each(block, RankSearch.count_coarse)

    def narrow(self) -> None:
        for search in self._search_E:
            search.narrow()

    def accumulate(self, block: RawBlock) -> None:
        self._each(block, RankSearch.count_coarse)
        self._each(block, RankSearch.count_fine)

    def refine(self, block: RawBlock) -> None:
        self._each(block, RankSearch.count_fine)

    def finish(self) -> bool:
        decided = [search.decide() for search in self._search_E]  # each one, so that all open ones start refining
        return all(decided)

    def result(self) -> Reduced:
        bits = [search.threshold_bits(kept) for search, kept in zip(self._search_E, self._kept_E, strict=True)]
        return Reduced(threshold_bits_E=np.array(bits, np.uint32))


class InnerProductSums:
    """<base, base>, <delta, delta>, <base, delta> in float64, the same however the tensor is cut for reading.

    Memory: 8 bytes per 16 Ki elements, and 16 per expert and 16 Ki elements.
    """

    def __init__(self, n_elements: int, n_experts: int) -> None:
        n_cells = -(-n_elements // GRAIN_ELEMENTS)
        self._base_C = np.zeros(n_cells, np.float64)
        self._cells_EC2 = np.zeros((n_experts, n_cells, 2), np.float64)

    def survey(self, block: RawBlock) -> None:
        """Nothing to learn from a sample."""

    def narrow(self) -> None:
        """Nothing to narrow."""

    def accumulate(self, block: RawBlock) -> None:
        from mergepipe.kernels.summary import sum_products, sum_squares

        first_cell = block.first_element // GRAIN_ELEMENTS
        sum_squares(block.raw, block.base_offset, block.base_code, block.n_elements, self._base_C[first_cell:])
        for place, e in enumerate(block.present_E):
            sum_products(
                block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]),
                int(block.codes_E[place]), block.n_elements, self._cells_EC2[e, first_cell:],
            )  # fmt: skip

    def finish(self) -> bool:
        return True

    def refine(self, block: RawBlock) -> None:
        raise AssertionError("inner products need one pass")

    def result(self) -> Reduced:
        return Reduced(products_E3=join_products(self._base_C, self._cells_EC2))


def join_products(base_C: NDArray[np.float64], cells_EC2: NDArray[np.float64]) -> NDArray[np.float64]:
    """Totals over cells: per expert <base, base>, <delta, delta>, <base, delta>."""
    products_E3 = np.empty((len(cells_EC2), 3), np.float64)
    products_E3[:, 0] = base_C.sum()
    products_E3[:, 1:] = cells_EC2.sum(axis=1)
    return products_E3
