"""Tensor-wide quantities gathered from blocks: exact magnitude cuts by radix selection, and inner products.

A reduction sees every element of its tensor once by `accumulate`, from any thread and in any order, and is asked by
`finish` whether it is done. If not, it sees every element once more by `refine`. Where the tensor is not kept in
memory, `survey` shows it a sample first, so that one pass usually suffices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergepipe.engine.segments import GRAIN_ELEMENTS
from mergepipe.operators.base import InnerProducts, MagnitudeCut, RawBlock, Reduced, ReductionRequest

WINDOW_BINS = 8
NOTHING_KEPT_BITS = 0xFFFFFFFF


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
            return MagnitudeSelection(kept_E, n_elements)
        case InnerProducts():
            return InnerProductSums(n_elements, n_experts)


class MagnitudeSelection:
    """Exact bit pattern of the k-th largest |delta| per expert, by two-level radix selection on float32 bits.

    Level one counts the upper 15 magnitude bits, level two the lower 16 bits inside the bin that holds rank k. A survey
    lets level two run along in a window of bins around the expected one. Memory: 256 KiB and 512 KiB per expert, or
    4 MiB per expert with a window.
    """

    def __init__(self, kept_E: tuple[int, ...], n_elements: int) -> None:
        from mergepipe.kernels.reduce import COARSE_BINS

        self._kept_E = kept_E
        self._n_elements = n_elements
        self._coarse_EB = np.zeros((len(kept_E), COARSE_BINS), np.int64)
        self._first_bin_E = [0] * len(kept_E)
        self._fine_EWB: list[NDArray[np.int64] | None] = [None] * len(kept_E)
        self._threshold_E: list[int | None] = [self._trivial(kept) for kept in kept_E]
        self._locks = [threading.Lock() for _ in kept_E]

    def _trivial(self, kept: int) -> int | None:
        if kept == 0:
            return NOTHING_KEPT_BITS
        return 0 if kept >= self._n_elements else None

    def _open(self, block: RawBlock) -> Iterator[tuple[int, int]]:
        """Experts still to be decided, as (expert, place in the block), starting at a different one for each block."""
        present = block.present_E
        shift = block.first_element // GRAIN_ELEMENTS
        for i in range(len(present)):
            place = (i + shift) % len(present)
            if self._threshold_E[int(present[place])] is None:
                yield int(present[place]), place

    def survey(self, block: RawBlock) -> None:
        self._count_coarse(block)

    def narrow(self) -> None:
        for e, kept in enumerate(self._kept_E):
            if self._threshold_E[e] is None:
                seen = int(self._coarse_EB[e].sum())
                expected = max(1, round(kept * seen / self._n_elements))
                center, _ = _bin_of_rank(self._coarse_EB[e], expected)
                self._watch(e, max(0, center - WINDOW_BINS // 2), WINDOW_BINS)
        self._coarse_EB[:] = 0

    def accumulate(self, block: RawBlock) -> None:
        self._count_coarse(block)
        self._count_fine(block)

    def refine(self, block: RawBlock) -> None:
        self._count_fine(block)

    def finish(self) -> bool:
        decided = [self._decide(e) for e in range(len(self._kept_E))]  # each one, so that all open ones start refining
        return all(decided)

    def result(self) -> Reduced:
        return Reduced(threshold_bits_E=np.array(self._threshold_E, np.uint32))

    def _decide(self, e: int) -> bool:
        if self._threshold_E[e] is not None:
            return True
        bin_index, rank_inside = _bin_of_rank(self._coarse_EB[e], self._kept_E[e])
        fine_WB = self._fine_EWB[e]
        row = bin_index - self._first_bin_E[e]
        if fine_WB is None or not 0 <= row < len(fine_WB):
            self._watch(e, bin_index, 1)
            return False
        fine_B = fine_WB[row]
        fine_B[0] = self._coarse_EB[e][bin_index] - fine_B[1:].sum()
        low_bits, _ = _bin_of_rank(fine_B, rank_inside)
        self._threshold_E[e] = (bin_index << 16) | low_bits
        self._fine_EWB[e] = None
        return True

    def _watch(self, e: int, first_bin: int, n_bins: int) -> None:
        from mergepipe.kernels.reduce import FINE_BINS

        self._first_bin_E[e] = first_bin
        self._fine_EWB[e] = np.zeros((n_bins, FINE_BINS), np.int64)

    def _count_coarse(self, block: RawBlock) -> None:
        from mergepipe.kernels.reduce import count_magnitudes

        for e, place in self._open(block):
            with self._locks[e]:
                count_magnitudes(
                    block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]),
                    int(block.codes_E[place]), block.n_elements, self._coarse_EB[e],
                )  # fmt: skip

    def _count_fine(self, block: RawBlock) -> None:
        from mergepipe.kernels.reduce import count_fine

        for e, place in self._open(block):
            fine_WB = self._fine_EWB[e]
            if fine_WB is None:
                continue
            with self._locks[e]:
                count_fine(
                    block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]),
                    int(block.codes_E[place]), block.n_elements, self._first_bin_E[e], fine_WB,
                )  # fmt: skip


def _bin_of_rank(counts_B: NDArray[np.int64], rank: int) -> tuple[int, int]:
    """Bin that holds the `rank`-th largest element (1-based) of a histogram, and its rank from the top inside it."""
    from_top = np.cumsum(counts_B[::-1])
    index = int(np.searchsorted(from_top, rank))
    above = int(from_top[index - 1]) if index else 0
    return len(counts_B) - 1 - index, rank - above


class InnerProductSums:
    """<base, base>, <expert, expert>, <base, expert> in float64, the same however the tensor is cut for reading.

    Memory: 24 bytes per expert and 16 Ki elements.
    """

    def __init__(self, n_elements: int, n_experts: int) -> None:
        n_cells = -(-n_elements // GRAIN_ELEMENTS)
        self._cells_EC3 = np.zeros((n_experts, n_cells, 3), np.float64)

    def survey(self, block: RawBlock) -> None:
        """Nothing to learn from a sample."""

    def narrow(self) -> None:
        """Nothing to narrow."""

    def accumulate(self, block: RawBlock) -> None:
        from mergepipe.kernels.reduce import add_inner_products

        first_cell = block.first_element // GRAIN_ELEMENTS
        for place, e in enumerate(block.present_E):
            add_inner_products(
                block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]),
                int(block.codes_E[place]), block.n_elements, GRAIN_ELEMENTS, self._cells_EC3[e, first_cell:],
            )  # fmt: skip

    def finish(self) -> bool:
        return True

    def refine(self, block: RawBlock) -> None:
        raise AssertionError("inner products need one pass")

    def result(self) -> Reduced:
        return Reduced(products_E3=self._cells_EC3.sum(axis=1))
