"""Compute exact order statistics of |delta| of one tensor, by two-level radix selection on float32 bits."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DELTA_FLAG, ITEMSIZE_BY_KERNEL_CODE
from mergepipe.operators.base import RawBlock

WINDOW_BINS = 8
FINE_CHUNKS = 256
NOTHING_KEPT_BITS = 0xFFFFFFFF


class RankSearch:
    """Finds the bit patterns of the k-th largest |delta| for some ranks k. Safe to feed from many threads.

    Level one counts the upper 15 magnitude bits, level two the lower 16 bits in the bins that hold a wanted rank. A
    sample, if one is shown first, lets level two run along in a window of bins around the expected ones. The bit
    pattern of a non-negative float32 orders as its value does; NaN sorts above infinity.

    Memory: 320 KiB, and 256 KiB per watched bin.
    """

    def __init__(self, ranks: Iterable[int], n_elements: int) -> None:
        self._n_elements = n_elements
        self._answers: dict[int, int | None] = {rank: self._trivial(rank) for rank in ranks}
        self._bin_R = np.empty(0, np.uint32)
        self._row_of_bin_B: NDArray[np.int16] | None = None
        self._fine_RB: NDArray[np.int32] | None = None
        self._totals_R = np.empty(0, np.int64)
        self._lock = threading.Lock()

    @cached_property
    def _coarse_B(self) -> NDArray[np.int64]:
        from mergepipe.kernels.reduce import COARSE_BINS

        return np.zeros(COARSE_BINS, np.int64)

    def seek(self, rank: int) -> None:
        """Look for one more rank, before `decide`."""
        self._answers[rank] = self._trivial(rank)

    def _trivial(self, rank: int) -> int | None:
        if rank == 0:
            return NOTHING_KEPT_BITS
        return 0 if rank >= self._n_elements else None

    @property
    def is_open(self) -> bool:
        """Whether some rank is still unknown."""
        return None in self._answers.values()

    @property
    def open_ranks(self) -> list[int]:
        """The ranks that are still unknown."""
        return [rank for rank, answer in self._answers.items() if answer is None]

    def threshold_bits(self, rank: int) -> int:
        """The answer for a rank; all elements whose bits reach it are among the `rank` largest, ties included."""
        answer = self._answers[rank]
        if answer is None:
            raise ValueError(f"rank {rank} is not decided")
        return answer

    def histogram(self) -> NDArray[np.int64]:
        """Return the counts by upper magnitude bits, after `decide`."""
        return self._coarse_B

    def move_counts(self, counts_B: NDArray[np.int64]) -> None:
        """Add a block's coarse histogram, computed elsewhere, and clear it."""
        from mergepipe.kernels.reduce import move_counts

        with self._lock:
            move_counts(counts_B, self._coarse_B)

    def count_coarse(self, block: RawBlock, place: int, elements: range | None = None) -> None:
        """Add the coarse histogram of a block, or of some elements of it."""
        from mergepipe.kernels.reduce import count_magnitudes

        shown, code = elements or range(block.n_elements), int(block.codes_E[place])
        base_offset = block.base_offset + shown.start * ITEMSIZE_BY_KERNEL_CODE[block.base_code]
        offset = int(block.offsets_E[place]) + shown.start * ITEMSIZE_BY_KERNEL_CODE[code & ~DELTA_FLAG]
        with self._lock:
            count_magnitudes(block.raw, base_offset, block.base_code, offset, code, len(shown), self._coarse_B)

    def count_fine(self, block: RawBlock, place: int) -> None:
        """Add the watched bins of a block."""
        from mergepipe.kernels.reduce import count_fine

        if self._fine_RB is None or self._row_of_bin_B is None:
            return
        with self._lock:
            count_fine(
                block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]),
                int(block.codes_E[place]), block.n_elements, self._bin_R, self._row_of_bin_B, self._fine_RB,
                self._totals_R,
            )  # fmt: skip

    def count_coarse_scores(self, scores_N: NDArray[np.float32]) -> None:
        """Add the coarse histogram of scores instead of deltas."""
        from mergepipe.kernels.reduce import count_bits

        with self._lock:
            count_bits(scores_N.view(np.uint32), len(scores_N), self._coarse_B)

    def count_fine_scores(self, scores_N: NDArray[np.float32]) -> None:
        """Add the watched bins of scores instead of deltas."""
        from mergepipe.kernels.reduce import count_fine_scores

        if self._fine_RB is not None and self._row_of_bin_B is not None:
            with self._lock:
                count_fine_scores(scores_N, self._bin_R, self._row_of_bin_B, self._fine_RB, self._totals_R)

    def narrow(self) -> None:
        """Treat the counts so far as a sample: watch the bins around the ranks' expected ones and restart."""
        bins: set[int] = set()
        for center in self.expected_bins():
            bins.update(range(max(0, center - WINDOW_BINS // 2), center + WINDOW_BINS // 2))
        self.watch(bins)
        self._coarse_B[:] = 0

    def expected_bins(self) -> list[int]:
        """Return the bins of the open ranks, if the elements counted so far are like the others."""
        seen = int(self._coarse_B.sum())
        from_top = _FromTop(self._coarse_B)
        ranks = self.open_ranks if seen else []
        return [from_top.bin_of_rank(max(1, round(rank * seen / self._n_elements)))[0] for rank in ranks]

    def watch(self, bins: set[int]) -> None:
        """Have `count_fine` count the elements of some bins."""
        self._row_of_bin_B = self._fine_RB = None
        self._bin_R = np.array(sorted(bins), np.uint32)
        self._totals_R = np.zeros(len(bins), np.int64)
        if bins:
            from mergepipe.kernels.reduce import COARSE_BINS, FINE_BINS

            self._row_of_bin_B = np.full(COARSE_BINS, -1, np.int16)
            self._row_of_bin_B[self._bin_R] = np.arange(len(bins))
            self._fine_RB = np.zeros((len(bins), FINE_BINS), np.int32)

    def answer(self, rank: int, bits: int) -> None:
        """Answer a rank that was found otherwise."""
        self._answers[rank] = bits

    def decide_inside(self, rank: int, bins: range, rank_inside: int) -> None:
        """Answer a rank that is the `rank_inside`-th largest element of some bins, watched from the start."""
        assert self._fine_RB is not None
        assert self._row_of_bin_B is not None
        rows = self._row_of_bin_B[bins.start : bins.stop]
        index, inside = _FromTop(self._totals_R[rows]).bin_of_rank(rank_inside)
        low = _fine_bin_of_rank(self._fine_RB[rows[index]], int(self._totals_R[rows[index]]), inside)
        self._answers[rank] = (bins[index] << 16) | low

    def decide(self, fine: NDArray[np.uint32] | None = None) -> bool:
        """Answer the ranks that are decided; if any is left, watch the bins it needs and return False.

        `fine`, where they are known, are the magnitudes of all elements with nonzero lower 16 bits, rising: with the
        coarse counts they decide every rank.
        """
        self._coarse_B[0] += self._n_elements - self._coarse_B.sum()  # what was not shown equals the base
        missing: set[int] = set()
        from_top = _FromTop(self._coarse_B)
        for rank in self.open_ranks:
            bin_index, rank_inside = from_top.bin_of_rank(rank)
            row = -1 if self._row_of_bin_B is None else int(self._row_of_bin_B[bin_index])
            if fine is not None:
                self._answers[rank] = _rank_in_bin(fine, bin_index, rank_inside)
            elif row < 0 or self._fine_RB is None:
                missing.add(bin_index)
            else:
                self._answers[rank] = (bin_index << 16) | self._low_bits(row, bin_index, rank_inside)
        self.watch(missing)
        return not missing

    def _low_bits(self, row: int, bin_index: int, rank_inside: int) -> int:
        assert self._fine_RB is not None
        return _fine_bin_of_rank(self._fine_RB[row], int(self._coarse_B[bin_index]), rank_inside)


def _rank_in_bin(fine: NDArray[np.uint32], bin_index: int, rank_inside: int) -> int:
    """Return the bits of the `rank_inside`-th largest element of a bin: below the fine ones lower bits are zero."""
    edges = np.array([bin_index << 16, (bin_index + 1) << 16], np.uint32)
    first, stop = np.searchsorted(fine, edges).tolist()
    return int(fine[stop - rank_inside]) if rank_inside <= stop - first else bin_index << 16


class _FromTop:
    """A histogram's cumulative counts from the top: finds the bin of a rank in logarithmic time."""

    def __init__(self, counts_B: NDArray[np.int64]) -> None:
        self._from_top_B = np.cumsum(counts_B[::-1])

    def bin_of_rank(self, rank: int) -> tuple[int, int]:
        """Find the bin of the `rank`-th largest element (1-based), and the element's rank inside it."""
        index = int(np.searchsorted(self._from_top_B, rank))
        above = int(self._from_top_B[index - 1]) if index else 0
        return len(self._from_top_B) - 1 - index, rank - above


def _fine_bin_of_rank(counts_B: NDArray[np.int32], total: int, rank: int) -> int:
    """Return the bin like `_FromTop.bin_of_rank`, for `total` elements by 16 low bits: by the upper 8, then the lower.

    Bin 0 is left out by the kernel: it holds what the others lack of the total.
    """
    from mergepipe.kernels.reduce import chunk_sums

    sums_C = np.empty(FINE_CHUNKS, np.int64)
    chunk_sums(counts_B, sums_C)
    zeros = total - int(sums_C.sum())
    sums_C[0] += zeros
    chunk, inside = _FromTop(sums_C).bin_of_rank(rank)
    fine_C = counts_B.reshape(FINE_CHUNKS, -1)[chunk].astype(np.int64)
    if chunk == 0:
        fine_C[0] += zeros
    return chunk * len(fine_C) + _FromTop(fine_C).bin_of_rank(inside)[0]
