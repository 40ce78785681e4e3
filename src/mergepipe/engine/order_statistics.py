"""Compute exact cuts of |delta| of one tensor by two-level radix selection on float32 bits."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mergepipe.engine.tie_search import Place, TieSearch
from mergepipe.kernels.reduce import (
    CHUNK,
    COARSE_BINS,
    DeltaStretches,
    Watched,
    count_magnitudes,
    count_watched,
    find_rank,
    move_counts,
)
from mergepipe.operators.statistics import NOTHING_KEPT_BITS, Cut

WINDOW_BINS = 8
EDGE_BINS = 2  # from one edge to the next; a bin is 1/128 of a power of two


class RankSearch:
    """Finds the cuts that the k largest |delta| reach, for some ranks k. Safe to feed from many threads.

    Level one counts the upper 15 magnitude bits, level two the lower 16 bits in the bins that hold a wanted rank. A
    sample, if one is shown first, lets level two run along in a window of bins around the expected ones. The bit
    pattern of a non-negative float32 orders as its value does; NaN sorts above infinity. Where elements at a cut are
    tied, one more look decides, unless only bits are asked for and `orders_ties` is False.

    Memory: 320 KiB, 256 KiB per watched bin, and what `TieSearch` takes.
    """

    def __init__(self, ranks: Iterable[int], n_elements: int, *, orders_ties: bool = True) -> None:
        self._n_elements = n_elements
        self._orders_ties = orders_ties
        self._ties: TieSearch | None = None
        self._answers: dict[int, Place | None] = {rank: self._trivial(rank) for rank in ranks}
        self._watched: Watched | None = None
        self._lock = threading.Lock()

    @cached_property
    def _coarse_B(self) -> NDArray[np.int64]:
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
        """Whether some cut is still unknown."""
        return None in self._answers.values() or (self._ties is not None and self._ties.is_open)

    @property
    def open_ranks(self) -> list[int]:
        """The ranks of which not even the bits are known."""
        return [rank for rank, answer in self._answers.items() if answer is None]

    @property
    def places(self) -> dict[int, Place]:
        """The magnitudes at the ranks that are known."""
        return {rank: place for rank, place in self._answers.items() if place is not None}

    def cut(self, rank: int) -> Cut:
        """The cut that exactly `rank` elements reach, after `decide` returned True."""
        return Cut(self.places[rank].bits) if self._ties is None else self._ties.cut(rank)

    def histogram(self) -> NDArray[np.int64]:
        """Return the counts by upper magnitude bits, after `decide`."""
        return self._coarse_B

    def move_counts(self, counts_B: NDArray[np.int32]) -> None:
        """Add a block's coarse histogram, computed elsewhere, and clear it."""
        with self._lock:
            move_counts(counts_B, self._coarse_B)

    def count_coarse(self, deltas: DeltaStretches) -> None:
        """Add the coarse histogram of some stretches."""
        with self._lock:
            count_magnitudes(deltas, self._coarse_B)

    def count_fine(self, deltas: DeltaStretches) -> None:
        """Add what is watched of some stretches, or look at their ties."""
        if self._ties is not None:
            self._ties.count(deltas)
        elif self._watched is not None:
            with self._lock:
                count_watched(deltas, self._watched)

    def narrow(self, n_edges: int = 0) -> None:
        """Treat the counts so far as a sample: watch around the bins expected of the ranks, and restart."""
        self.watch_around(self.expected_bins(), n_edges)
        self._coarse_B[:] = 0

    def watch_around(self, centers: Iterable[int], n_edges: int) -> None:
        """Watch some bins and those around them, and so many edges around each, `EDGE_BINS` apart.

        With them there is one at bin 1: below it are the zeros, which most deltas may be.
        """
        bins = set[int]()
        edges = {1} if n_edges else set[int]()
        for center in centers:
            bins.update(range(center - WINDOW_BINS // 2, center + WINDOW_BINS // 2))
            first = center - n_edges * EDGE_BINS // 2
            edges.update(range(first, first + n_edges * EDGE_BINS, EDGE_BINS))
        self.watch(bins.intersection(range(COARSE_BINS)), edges.intersection(range(1, COARSE_BINS)))

    def expected_bins(self) -> list[int]:
        """Return the bins of the open ranks, if the elements counted so far are like the others."""
        seen = int(self._coarse_B.sum())
        ranks = [max(1, round(rank * seen / self._n_elements)) for rank in self.open_ranks] if seen else []
        return [find_rank(self._coarse_B, rank)[0] for rank in ranks]

    def watch(self, bins: set[int], edges: Iterable[int] = ()) -> None:
        """Have `count_fine` count the elements of some bins, and those from edges on."""
        self._watched = Watched.of(bins, edges) if bins else None

    @property
    def edges(self) -> tuple[NDArray[np.uint16], NDArray[np.int64]] | None:
        """The edges that are watched, rising, and how many elements reach each; None while nothing is watched."""
        return None if self._watched is None else (self._watched.edges_W, self._watched.from_edge_W)

    def answer(self, rank: int, place: Place) -> None:
        """Answer a rank that was found otherwise."""
        self._answers[rank] = place

    def decide_inside(self, rank: int, bins: range, rank_inside: int) -> bool:
        """Answer a rank, that of the `rank_inside`-th largest element of some bins, if they were always watched.

        Bin 0, of zeros and of what hardly differs, is asked for alone: what was not shown is in it.
        """
        if self._watched is None or (rows := self._watched.rows_of(bins)) is None:
            return False
        totals_R = self._watched.totals_R[rows.start : rows.stop]
        if bins.start == 0:
            totals_R[0] = self._n_elements - (rank - rank_inside)
        index, above = find_rank(totals_R, rank_inside)
        total = int(totals_R[index])
        self._answers[rank] = _place_in_bin(rank, bins[index], self._watched, rows[index], total, rank_inside - above)
        return True

    def decide(self, fine: NDArray[np.uint32] | None = None) -> bool:
        """Answer the ranks that are decided, or watch the bins that they need; return whether all cuts are known.

        `fine`, where they are known, are the magnitudes of all elements with nonzero lower 16 bits, rising: with the
        coarse counts they decide every rank.
        """
        if self._ties is not None:
            return self.settle()
        self._coarse_B[0] += self._n_elements - self._coarse_B.sum()  # what was not shown equals the base
        missing: set[int] = set()
        for rank in self.open_ranks:
            bin_index, above = find_rank(self._coarse_B, rank)
            rows = None if self._watched is None else self._watched.rows_of(range(bin_index, bin_index + 1))
            total = int(self._coarse_B[bin_index])
            if fine is not None:
                self._answers[rank] = _place_among(rank, fine, bin_index, total, rank - above)
            elif rows is None or self._watched is None:
                missing.add(bin_index)
            else:
                self._answers[rank] = _place_in_bin(rank, bin_index, self._watched, rows.start, total, rank - above)
        self.watch(missing)
        return self.settle()

    def settle(self) -> bool:
        """Return whether all cuts are known; once all ranks are, the next look is at what is tied."""
        if not self.open_ranks and self._orders_ties:
            if self._ties is None:
                self._ties = TieSearch(self.places, self._n_elements)
            else:
                self._ties.decide()
        return not self.is_open


def _place_among(rank: int, fine: NDArray[np.uint32], bin_index: int, total: int, rank_inside: int) -> Place:
    """Return the place of a bin's `rank_inside`-th largest element; those of the `total` not fine are its edge."""
    edges = np.array([bin_index << 16, (bin_index + 1) << 16], np.uint32)
    first, stop = np.searchsorted(fine, edges).tolist()
    if rank_inside > stop - first:
        return Place(bin_index << 16, rank - rank_inside + stop - first, total - (stop - first))
    bits = fine[stop - rank_inside]
    low = int(np.searchsorted(fine, bits, "left"))
    high = int(np.searchsorted(fine, bits, "right"))
    return Place(int(bits), rank - rank_inside + stop - high, high - low)


def _place_in_bin(rank: int, bin_index: int, watched: Watched, row: int, total: int, rank_inside: int) -> Place:
    """Return the place of a bin's `rank_inside`-th largest element from counts by its 16 low bits.

    Low bits 0 are left out by the kernel: theirs is what the others lack of the total.
    """
    filled = np.flatnonzero(watched.filled_RC[row])
    counted = watched.counts_RB[row].reshape(-1, CHUNK)[filled].ravel()
    index, above = find_rank(np.concatenate(([0], counted)), rank_inside)
    n_larger = rank - rank_inside + above
    if not index:
        return Place(bin_index << 16, n_larger, total - above)
    chunk, place = divmod(index - 1, CHUNK)
    low = int(filled[chunk]) * CHUNK + place
    return Place((bin_index << 16) | low, n_larger, int(counted[index - 1]))
