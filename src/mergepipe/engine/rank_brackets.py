"""Find exact order statistics of |delta| and of scores of one tensor in brackets that a sample suggests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from mergepipe.engine.order_statistics import EDGE_BINS, RankSearch
from mergepipe.engine.tie_search import Place
from mergepipe.kernels.reduce import COARSE_BINS, DeltaStretches, collect_between
from mergepipe.operators.statistics import Cut
from mergepipe.storage.ranges import scratch

BRACKET_ELEMENTS = 1 << 18  # a smaller tensor is not worth a bracket
SAMPLE_RUNS = 8
RUN_ELEMENTS = 4096
EDGES = 14


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
        watched = set[int]()
        for bins, _ in self._intervals.values():
            watched.update(bins)
        self._search.watch(watched)
        return Stage.INTERVALS


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
            low = int((1.0 - share - MARGIN) * len(rising_N))
            high = int((1.0 - share + MARGIN) * len(rising_N))
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
            low = int(np.searchsorted(rising_N, bits, "left"))
            high = int(np.searchsorted(rising_N, bits, "right"))
            answers[rank] = Place(int(bits), n_larger + stop - high, high - low)
        return answers
