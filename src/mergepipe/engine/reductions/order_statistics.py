"""Compute exact cuts of |delta| of one tensor: by two-level radix selection on float32 bits, then by hash in ties."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import ALL_TIES, DELTA_FLAG, ITEMSIZE_BY_KERNEL_CODE
from mergepipe.operators.base import RawBlock
from mergepipe.operators.statistics import NOTHING_KEPT_BITS, Cut, tie_key

WINDOW_BINS = 8
FINE_CHUNKS = 256
BRACKET_SIGMAS = 10
FEW_TIES = 1 << 12  # are all collected


@dataclass(frozen=True, slots=True)
class Place:
    """The magnitude at a rank, as float32 bits, and how many elements of the tensor are larger, and are equal to it."""

    bits: int
    n_larger: int = 0
    n_equal: int = 0

    @property
    def key(self) -> int:
        """The key of the hashes that order the equal ones."""
        return tie_key(self.bits, self.n_larger, self.n_equal)

    def is_tied_at(self, rank: int) -> bool:
        """Whether an element of that magnitude is among the `rank` largest and another is not; zeros do not matter."""
        return bool(self.bits) and rank - self.n_larger < self.n_equal


class RankSearch:
    """Finds the bit patterns of the k-th largest |delta| for some ranks k. Safe to feed from many threads.

    Level one counts the upper 15 magnitude bits, level two the lower 16 bits in the bins that hold a wanted rank. A
    sample, if one is shown first, lets level two run along in a window of bins around the expected ones. The bit
    pattern of a non-negative float32 orders as its value does; NaN sorts above infinity.

    Memory: 320 KiB, and 256 KiB per watched bin.
    """

    def __init__(self, ranks: Iterable[int], n_elements: int) -> None:
        self._n_elements = n_elements
        self._answers: dict[int, Place | None] = {rank: self._trivial(rank) for rank in ranks}
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

    def _trivial(self, rank: int) -> Place | None:
        if rank == 0:
            return Place(NOTHING_KEPT_BITS)
        return Place(0) if rank >= self._n_elements else None

    @property
    def is_open(self) -> bool:
        """Whether some rank is still unknown."""
        return None in self._answers.values()

    @property
    def open_ranks(self) -> list[int]:
        """The ranks that are still unknown."""
        return [rank for rank, answer in self._answers.items() if answer is None]

    @property
    def places(self) -> dict[int, Place]:
        """The answers by rank.

        Raises:
            ValueError: some are not decided.
        """
        if self.is_open:
            raise ValueError(f"ranks {self.open_ranks} are not decided")
        return {rank: place for rank, place in self._answers.items() if place is not None}

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

    def answer(self, rank: int, place: Place) -> None:
        """Answer a rank that was found otherwise."""
        self._answers[rank] = place

    def decide_inside(self, rank: int, bins: range, rank_inside: int) -> None:
        """Answer a rank that is the `rank_inside`-th largest element of some bins, watched from the start."""
        assert self._fine_RB is not None
        assert self._row_of_bin_B is not None
        rows = self._row_of_bin_B[bins.start : bins.stop]
        index, inside = _FromTop(self._totals_R[rows]).bin_of_rank(rank_inside)
        total = int(self._totals_R[rows[index]])
        self._answers[rank] = _place_in_bin(rank, bins[index], self._fine_RB[rows[index]], total, inside)

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
            total = int(self._coarse_B[bin_index])
            if fine is not None:
                self._answers[rank] = _place_among(rank, fine, bin_index, total, rank_inside)
            elif row < 0 or self._fine_RB is None:
                missing.add(bin_index)
            else:
                self._answers[rank] = _place_in_bin(rank, bin_index, self._fine_RB[row], total, rank_inside)
        self.watch(missing)
        return not missing


def _place_among(rank: int, fine: NDArray[np.uint32], bin_index: int, total: int, rank_inside: int) -> Place:
    """Return the place of a bin's `rank_inside`-th largest element; those of the `total` not fine are its edge."""
    edges = np.array([bin_index << 16, (bin_index + 1) << 16], np.uint32)
    first, stop = np.searchsorted(fine, edges).tolist()
    if rank_inside > stop - first:
        return Place(bin_index << 16, rank - rank_inside + stop - first, total - (stop - first))
    bits = fine[stop - rank_inside]
    low, high = (int(np.searchsorted(fine, bits, side)) for side in ("left", "right"))
    return Place(int(bits), rank - rank_inside + stop - high, high - low)


class _FromTop:
    """A histogram's cumulative counts from the top: finds the bin of a rank in logarithmic time."""

    def __init__(self, counts_B: NDArray[np.int64]) -> None:
        self._from_top_B = np.cumsum(counts_B[::-1])

    def bin_of_rank(self, rank: int) -> tuple[int, int]:
        """Find the bin of the `rank`-th largest element (1-based), and the element's rank inside it."""
        index = int(np.searchsorted(self._from_top_B, rank))
        above = int(self._from_top_B[index - 1]) if index else 0
        return len(self._from_top_B) - 1 - index, rank - above


def _place_in_bin(rank: int, bin_index: int, counts_B: NDArray[np.int32], total: int, rank_inside: int) -> Place:
    """Return the place of a bin's `rank_inside`-th largest element from counts by its 16 low bits, first by 8 of them.

    Low bits 0 are left out by the kernel: theirs is what the others lack of the total.
    """
    from mergepipe.kernels.reduce import chunk_sums

    sums_C = np.empty(FINE_CHUNKS, np.int64)
    chunk_sums(counts_B, sums_C)
    zeros = total - int(sums_C.sum())
    sums_C[0] += zeros
    chunk, inside = _FromTop(sums_C).bin_of_rank(rank_inside)
    fine_C = counts_B.reshape(FINE_CHUNKS, -1)[chunk].astype(np.int64)
    if chunk == 0:
        fine_C[0] += zeros
    low, among_equal = _FromTop(fine_C).bin_of_rank(inside)
    return Place((bin_index << 16) | chunk * len(fine_C) | low, rank - among_equal, int(fine_C[low]))


class TieSearch:
    """Completes the cuts at some ranks: where elements at one are tied, finds the last hash of those that reach it.

    One look at the tensor's elements is enough unless positions were chosen to defy the hash, then 32 are. Safe to feed
    from many threads. Memory: 4 bytes for the about 10 standard deviations of hashes around each wanted one, 50 MiB at
    most.
    """

    def __init__(self, places: Mapping[int, Place]) -> None:
        self._places = places
        tied = {rank: place for rank, place in places.items() if place.is_tied_at(rank)}
        self._ties = {rank: _Tie(rank - place.n_larger, place.n_equal) for rank, place in sorted(tied.items())}
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether some last hash is still unknown."""
        return any(tie.answer is None for tie in self._ties.values())

    def count(self, block: RawBlock, place: int) -> None:
        """Look at a block of deltas."""
        from mergepipe.kernels.reduce import collect_ties

        brackets_R4, hashes_RN, counts_R2 = self._work_arrays(block.n_elements)
        collect_ties(
            block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]), int(block.codes_E[place]),
            block.first_element, block.n_elements, brackets_R4, hashes_RN, counts_R2,
        )  # fmt: skip
        self._add(hashes_RN, counts_R2)

    def count_scores(self, scores_N: NDArray[np.float32], first_element: int) -> None:
        """Look at scores instead of deltas."""
        from mergepipe.kernels.reduce import collect_tied_scores

        brackets_R4, hashes_RN, counts_R2 = self._work_arrays(len(scores_N))
        collect_tied_scores(scores_N, first_element, brackets_R4, hashes_RN, counts_R2)
        self._add(hashes_RN, counts_R2)

    def decide(self) -> bool:
        """Whether all cuts are known after a look at every element; if not, another one is needed."""
        for _, tie in self._open_ties():
            tie.decide()
        return not self.is_open

    def cut(self, rank: int) -> Cut:
        """The cut that exactly `rank` elements reach."""
        place, tie = self._places[rank], self._ties.get(rank)
        if tie is None:
            return Cut(place.bits)
        if tie.answer is None:
            raise ValueError(f"rank {rank} is not decided")
        return Cut(place.bits, place.key, tie.answer)

    def _open_ties(self) -> list[tuple[int, _Tie]]:
        return [(rank, tie) for rank, tie in self._ties.items() if tie.answer is None]

    def _work_arrays(self, n_elements: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]]:
        places = [(self._places[rank], tie) for rank, tie in self._open_ties()]
        brackets_R4 = np.array([(place.bits, place.key, *tie.bracket) for place, tie in places], np.uint32)
        hashes_RN = np.empty((len(places), n_elements), np.uint32)  # hardly any of it is touched
        return brackets_R4, hashes_RN, np.zeros((len(places), 2), np.int64)

    def _add(self, hashes_RN: NDArray[np.uint32], counts_R2: NDArray[np.int64]) -> None:
        with self._lock:
            for r, (_, tie) in enumerate(self._open_ties()):
                tie.n_below += int(counts_R2[r, 0])
                tie.collected.append(hashes_RN[r, : counts_R2[r, 1]].copy())


class _Tie:
    """The search for the `wanted`-th smallest of `n` different hashes, which are spread evenly, in brackets."""

    def __init__(self, wanted: int, n: int) -> None:
        self._wanted = wanted
        self._low, self._high, self._n_lower, self._n = 0, ALL_TIES - 1, 0, n
        self.answer: int | None = None
        self._look(wanted / n)

    def _look(self, share: float) -> None:
        """Begin a look at a bracket around `share` of the hashes from `_low` to `_high`."""
        margin = BRACKET_SIGMAS * math.sqrt(max(share * (1.0 - share), 1.0 / self._n) / self._n)
        width = self._high - self._low
        first, last = max(0.0, share - margin) * width, min(1.0, share + margin) * width
        is_few = self._n <= FEW_TIES
        self.bracket = (self._low, self._high) if is_few else (self._low + int(first), self._low + math.ceil(last))
        self.n_below = 0
        self.collected: list[NDArray[np.uint32]] = []

    def decide(self) -> None:
        """Find the answer in what was collected; else look into the half of the hashes that it must be in."""
        n_inside = sum(map(len, self.collected))
        first, last = self.bracket
        if self.n_below < self._wanted <= self.n_below + n_inside:
            place = self._wanted - self.n_below - 1
            self.answer = int(np.partition(np.concatenate(self.collected), place)[place])
            self.collected = []
        elif self._wanted <= self.n_below:
            self._high, self._n = first - 1, self.n_below - self._n_lower
            self._look(0.5)
        elif last < self._high:
            self._n -= self.n_below + n_inside - self._n_lower
            self._low, self._n_lower = last + 1, self.n_below + n_inside
            self._look(0.5)
        else:  # it is the largest of all hashes, which two elements share, 2^32 apart: both are left out
            self.answer = self._high
