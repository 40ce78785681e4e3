"""Compute exact cuts of |delta| and of scores of one tensor: by radix selection, or in brackets of a sample."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import ALL_TIES, TIE_RUN
from mergepipe.kernels.reduce import (
    CHUNK,
    COARSE_BINS,
    DeltaStretches,
    Watched,
    collect_between,
    collect_ties,
    count_magnitudes,
    count_watched,
    find_rank,
    move_counts,
)
from mergepipe.operators.statistics import NOTHING_KEPT_BITS, Cut, tie_key
from mergepipe.storage.ranges import KEPT_BYTES, scratch

# --- compute exact cuts of |delta| of one tensor ---
# by two-level radix selection on float32 bits, then by hash in ties


WINDOW_BINS = 8
TIES_ROOM = KEPT_BYTES // 4  # hashes of a block that are usually enough, as many as `scratch` keeps
BRACKET_SIGMAS = 4


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
        bins, edges = set[int](), set[int]()
        for center in centers:
            bins.update(range(center - WINDOW_BINS // 2, center + WINDOW_BINS // 2))
            first = center - n_edges * EDGE_BINS // 2
            edges.update(range(first, first + n_edges * EDGE_BINS, EDGE_BINS), (1,) if n_edges else ())
        self.watch({b for b in bins if 0 <= b < COARSE_BINS}, {edge for edge in edges if 0 < edge < COARSE_BINS})

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
        total, row = int(totals_R[index]), rows[index]
        self._answers[rank] = _place_in_bin(rank, bins[index], self._watched, row, total, rank_inside - above)
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
    low, high = (int(np.searchsorted(fine, bits, side)) for side in ("left", "right"))
    return Place(int(bits), rank - rank_inside + stop - high, high - low)


def _place_in_bin(rank: int, bin_index: int, watched: Watched, row: int, total: int, rank_inside: int) -> Place:
    """Return the place of a bin's `rank_inside`-th largest element from counts by its 16 low bits.

    Low bits 0 are left out by the kernel: theirs is what the others lack of the total.
    """
    filled = np.flatnonzero(watched.filled_RC[row])
    counted = watched.counts_RB[row].reshape(-1, CHUNK)[filled].ravel()
    index, above = find_rank(np.concatenate(([0], counted)), rank_inside)
    low = int(filled[(index - 1) // CHUNK]) * CHUNK + (index - 1) % CHUNK if index else 0
    n_equal = int(counted[index - 1]) if index else total - above
    return Place((bin_index << 16) | low, rank - rank_inside + above, n_equal)


class TieSearch:
    """Completes the cuts at some ranks: where elements at one are tied, finds the last hash of those that reach it.

    One look at the tensor's elements is enough unless positions were chosen to defy the hash, then 32 are. Safe to feed
    from many threads. Memory: 4 bytes for each hash within at most 4 standard deviations of a wanted one: 3 MiB where
    100 million elements are equal.
    """

    def __init__(self, places: Mapping[int, Place], n_elements: int) -> None:
        self._places = places
        self._ties = {
            rank: _Tie(rank - place.n_larger, place.n_equal, n_elements)
            for rank, place in sorted(places.items())
            if place.bits and rank - place.n_larger < place.n_equal  # some are among the largest; zeros do not matter
        }
        self._lock = threading.Lock()
        self._begin_look()

    def _begin_look(self) -> None:
        """Look for the ties that are open in their brackets."""
        self._open = [(self._places[rank], tie) for rank, tie in self._ties.items() if tie.answer is None]
        self._brackets_R4 = np.array([(place.bits, place.key, *tie.bracket) for place, tie in self._open], np.uint32)

    @property
    def is_open(self) -> bool:
        """Whether some last hash is still unknown."""
        return bool(self._open)

    def count(self, deltas: DeltaStretches) -> None:
        """Look at some stretches."""
        n_open, n_elements = len(self._open), deltas.n_elements
        for room in (min(TIES_ROOM // n_open, n_elements), n_elements):
            hashes_RN = scratch("hashes", n_open * room, np.uint32).reshape(n_open, room)
            counts_R2 = np.zeros((n_open, 2), np.int64)
            collect_ties(deltas, self._brackets_R4, hashes_RN, counts_R2)
            counts = counts_R2.tolist()
            if all(n_inside <= room for _, n_inside in counts):
                break
        with self._lock:
            for (_, tie), (n_below, n_inside), hashes_N in zip(self._open, counts, hashes_RN, strict=True):
                tie.n_below += n_below
                tie.collected.append(hashes_N[:n_inside].copy())

    def decide(self) -> None:
        """Decide what can be after a look at every element; if some tie is open then, another one is needed."""
        for _, tie in self._open:
            tie.decide()
        self._begin_look()

    def cut(self, rank: int) -> Cut:
        """The cut that exactly `rank` elements reach."""
        place, tie = self._places[rank], self._ties.get(rank)
        if tie is None:
            return Cut(place.bits)
        if tie.answer is None:
            raise ValueError(f"rank {rank} is not decided")
        return Cut(place.bits, place.key, tie.answer)


class _Tie:
    """The search for the `wanted`-th smallest of `n` different hashes, which are spread evenly, in brackets."""

    def __init__(self, wanted: int, n: int, n_elements: int) -> None:
        self._wanted = wanted
        self._together = min(TIE_RUN, 1.0 + 2.0 * TIE_RUN * n / n_elements)  # equal ones a run, were all on a half
        self._low, self._high, self._n_lower, self._n = 0, ALL_TIES - 1, 0, n
        self.answer: int | None = None
        self._look(wanted / n)

    def _look(self, share: float) -> None:
        """Begin a look at a bracket around `share` of the hashes from `_low` to `_high`."""
        n_runs = max(1.0, self._n / self._together)
        margin = BRACKET_SIGMAS * math.sqrt(max(share * (1.0 - share), 1.0 / n_runs) / n_runs)
        width = self._high - self._low
        first, last = max(0.0, share - margin) * width, min(1.0, share + margin) * width
        self.bracket = self._low + int(first), self._low + math.ceil(last)
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


# --- compute exact order statistics of |delta| of one tensor, in a bracket that a sample suggests ---


BRACKET_ELEMENTS = 1 << 18  # a smaller tensor is not worth a bracket
SAMPLE_RUNS = 8
RUN_ELEMENTS = 4096
EDGES = 14
EDGE_BINS = 2  # from one edge to the next; a bin is 1/128 of a power of two


class Stage(Enum):
    """The purpose of the next pass over the blocks."""

    EDGES = auto()  # counting from the edges of brackets on, and finely in their middle
    INTERVALS = auto()  # counting all of the bins between two edges
    HISTOGRAM = auto()  # counting all bins, as a bracket missed
    RANKS = auto()  # whatever `RankSearch` needs


class BracketedRanks:
    """Finds the cuts that the k largest |delta| reach, for some ranks k. Safe to feed from many threads.

    A sample suggests a bracket for each rank: runs of what is seen first, or what `survey` is shown. The first look at
    the blocks counts the elements from each of its edges on, and all bit patterns in its middle; only a rank that lies
    between other edges needs a second one, of the bit patterns there. Both are vector code, while a histogram of all
    elements is not: that is made only where a bracket misses, by `RankSearch`.

    Memory: see `RankSearch`, and 256 KiB for each of `WINDOW_BINS` a rank.
    """

    def __init__(self, ranks: Iterable[int], n_elements: int) -> None:
        self._search = RankSearch(ranks, n_elements)
        self._n_elements = n_elements
        self._stage = Stage.EDGES if n_elements >= BRACKET_ELEMENTS else Stage.RANKS
        self._intervals: dict[int, tuple[range, int]] = {}  # by rank: bins between edges, its place in them from above
        self._is_shown = False
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether some cut is still unknown."""
        return self._search.is_open

    def cut(self, rank: int) -> Cut:
        """The cut that exactly `rank` elements reach, after `decide` returned True."""
        return self._search.cut(rank)

    def survey(self, deltas: DeltaStretches) -> None:
        """Add stretches of a sample."""
        self._search.count_coarse(deltas.runs(SAMPLE_RUNS, RUN_ELEMENTS))

    def narrow(self) -> None:
        """Narrow the search by the sample."""
        self._search.narrow(EDGES if self._stage is Stage.EDGES else 0)

    def accumulate(self, deltas: DeltaStretches) -> None:
        """Look at stretches for the first time."""
        self._is_shown = True
        if self._stage is Stage.EDGES:
            with self._lock:
                if self._search.edges is None:
                    self._suggest_edges(deltas)
        else:
            self._search.count_coarse(deltas)
        self._search.count_fine(deltas)

    def refine(self, deltas: DeltaStretches) -> None:
        """Look at stretches once more."""
        if self._stage is Stage.HISTOGRAM:
            self._search.count_coarse(deltas)
        else:
            self._search.count_fine(deltas)

    def decide(self) -> bool:
        """Answer the ranks that are decided; return whether all cuts are known."""
        if not self._is_shown:  # all deltas are zero
            for rank in self._search.open_ranks:
                self._search.answer(rank, Place(0, 0, self._n_elements))
            return self._search.settle()
        match self._stage:
            case Stage.EDGES:
                self._stage = self._enclose()
            case Stage.INTERVALS:
                for rank, (bins, rank_inside) in self._intervals.items():
                    self._search.decide_inside(rank, bins, rank_inside)
                self._intervals.clear()
            case _:
                self._stage = Stage.RANKS
                return self._search.decide()
        return self._search.settle()

    def _suggest_edges(self, deltas: DeltaStretches) -> None:
        """Watch around the bins that the ranks have in runs of some stretches."""
        sample = RankSearch(self._search.open_ranks, self._n_elements)
        sample._coarse_B = scratch("sample", COARSE_BINS, np.int64)
        sample._coarse_B[:] = 0
        sample.count_coarse(deltas.runs(SAMPLE_RUNS, RUN_ELEMENTS))
        self._search.watch_around(sample.expected_bins(), EDGES)

    def _enclose(self) -> Stage:
        """Find each open rank in the interval between two edges, or watch its bins; a histogram if it is in none."""
        if self._search.edges is None:
            return Stage.HISTOGRAM
        bins_W, reached_W = self._search.edges
        for rank in self._search.open_ranks:
            above = int(np.count_nonzero(reached_W >= rank))  # the edge above the rank's interval
            if above == len(bins_W):
                return Stage.HISTOGRAM
            bins = range(int(bins_W[above - 1]) if above else 0, int(bins_W[above]))
            if len(bins) > EDGE_BINS:  # outside the brackets
                return Stage.HISTOGRAM
            rank_inside = rank - int(reached_W[above])
            if not self._search.decide_inside(rank, bins, rank_inside):
                self._intervals[rank] = bins, rank_inside
        self._search.watch({b for bins, _ in self._intervals.values() for b in bins})
        return Stage.INTERVALS


# --- compute exact order statistics of the scores of one tensor in one look, in brackets that a sample suggests ---


SCORE_SAMPLE_RUNS = 16
SCORE_RUN_ELEMENTS = 1024
MARGIN = 0.03  # of all elements, on both sides of a rank
MOST_COLLECTED = 1 << 24  # elements, of 4 bytes
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_BEYOND = 0x7FFFFFFF  # the bits above all scores, undefined ones included


class BracketedScores:
    """Counts the scores above brackets around ranks and collects those inside. Safe to feed from many threads.

    Scores that are not shown are zero. Memory: 4 bytes a collected score, 64 MiB at most.
    """

    def __init__(self) -> None:
        self._edges_W = np.zeros(0, np.uint32)
        self._from_edge_W = np.zeros(0, np.int64)
        self._collected: list[NDArray[np.uint32]] = []
        self._n_collected = 0
        self._lock = threading.Lock()

    @property
    def is_placed(self) -> bool:
        """Whether the brackets are known."""
        return len(self._edges_W) > 0

    def place(self, scores_N: NDArray[np.float32], shares: Sequence[float], share_of_nonzero: float | None) -> None:
        """Place brackets around the ranks of some shares, or of a share of the scores other than zero, by a sample."""
        step = max(SCORE_RUN_ELEMENTS, len(scores_N) // SCORE_SAMPLE_RUNS)
        runs = [scores_N[start : start + SCORE_RUN_ELEMENTS] for start in range(0, len(scores_N), step)]
        rising_N = np.sort(np.concatenate(runs).view(np.uint32) & _MAGNITUDE)
        if share_of_nonzero is not None:
            shares = [share_of_nonzero * np.count_nonzero(rising_N) / len(rising_N)]
        edges: list[int] = []
        for share in sorted(shares, reverse=True):
            low, high = (int((1.0 - share + margin) * len(rising_N)) for margin in (-MARGIN, MARGIN))
            first = max(1, int(rising_N[low])) if low >= 0 else 1  # no zeros are collected
            last = max(first, int(rising_N[high])) + 1 if high < len(rising_N) else _BEYOND
            if edges and first <= edges[-1]:
                edges[-1] = last
            else:
                edges += [first, last]
        self._edges_W = np.array(edges, np.uint32)
        self._from_edge_W = np.zeros(len(edges), np.int64)

    def accumulate(self, scores_N: NDArray[np.float32]) -> None:
        """Look at some scores, which are overwritten."""
        counts_W = np.zeros(len(self._edges_W), np.int64)
        n_inside = int(collect_between(scores_N, self._edges_W, counts_W))
        with self._lock:
            self._from_edge_W += counts_W
            self._n_collected += n_inside
            if self._n_collected <= MOST_COLLECTED:
                self._collected.append(scores_N[:n_inside].view(np.uint32).copy())

    def answers(self, ranks: Iterable[int]) -> dict[int, Place] | None:
        """Return the place of the score of each rank, the largest being 1; None where one is outside the brackets."""
        if self._n_collected > MOST_COLLECTED or not self.is_placed:
            return None
        rising_N = np.sort(np.concatenate(self._collected))
        answers = {}
        for rank in ranks:
            w = int(np.count_nonzero(self._from_edge_W >= rank)) - 1  # the last edge that the score reaches
            if w < 0 and self._edges_W[0] == 1:
                answers[rank] = Place(0)  # all that is not zero was counted
                continue
            if w < 0 or w % 2:
                return None
            n_larger = int(self._from_edge_W[w + 1])
            stop = int(np.searchsorted(rising_N, self._edges_W[w + 1]))
            bits = rising_N[stop - (rank - n_larger)]
            low, high = (int(np.searchsorted(rising_N, bits, side)) for side in ("left", "right"))
            answers[rank] = Place(int(bits), n_larger + stop - high, high - low)
        return answers
