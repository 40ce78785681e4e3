"""Compute exact order statistics of |delta| of one tensor, in a bracket that a sample suggests."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from mergepipe.engine.reductions.order_statistics import Place, RankSearch
from mergepipe.operators.base import RawBlock

BRACKET_ELEMENTS = 1 << 18  # a smaller tensor is not worth a bracket
SAMPLE_RUNS = 8
RUN_ELEMENTS = 4096
EDGES = 14
EDGE_BINS = 2  # from one edge to the next; a bin is 1/128 of a power of two


class Stage(Enum):
    """What the next look at the blocks is for."""

    EDGES = auto()  # counting from the edges of brackets on
    INTERVALS = auto()  # counting all of the bins between two edges
    HISTOGRAM = auto()  # counting all bins, as a bracket missed
    RANKS = auto()  # whatever `RankSearch` needs


@dataclass(frozen=True, slots=True)
class Interval:
    """The bins between two edges, and the place of a rank among the elements in them, from the largest on."""

    bins: range
    rank_inside: int


class BracketedRanks:
    """Finds the bit patterns of the k-th largest |delta| for some ranks k. Safe to feed from many threads.

    A sample of the first block suggests a bracket for each rank. The first look at the blocks counts the elements
    from each of its edges on, the second one all bit patterns between the two edges that enclose the rank. Both are
    vector code, while a histogram of all elements is not: that is made only where a bracket misses, by `RankSearch`,
    which also does the work where blocks cannot be looked at again in memory: after `survey`.

    Memory: see `RankSearch`, and 512 KiB a rank.
    """

    def __init__(self, ranks: Iterable[int], n_elements: int) -> None:
        self._search = RankSearch(ranks, n_elements)
        self._n_elements = n_elements
        self._stage = Stage.EDGES if n_elements >= BRACKET_ELEMENTS else Stage.RANKS
        self._edges_W: NDArray[np.uint16] | None = None
        self._from_edge_W = np.zeros(0, np.int64)
        self._intervals: dict[int, Interval] = {}
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether some rank is still unknown."""
        return self._search.is_open

    @property
    def places(self) -> dict[int, Place]:
        """The answers by rank, after `decide` returned True."""
        return self._search.places

    def survey(self, block: RawBlock, place: int) -> None:
        """Add a block of a sample."""
        self._stage = Stage.RANKS
        self._search.count_coarse(block, place)

    def narrow(self) -> None:
        """Narrow the search by the sample."""
        self._search.narrow()

    def accumulate(self, block: RawBlock, place: int) -> None:
        """Look at a block for the first time."""
        if self._stage is Stage.EDGES:
            self._count_from_edges(block, place)
        else:
            self._search.count_coarse(block, place)
            self._search.count_fine(block, place)

    def refine(self, block: RawBlock, place: int) -> None:
        """Look at a block once more."""
        if self._stage is Stage.HISTOGRAM:
            self._search.count_coarse(block, place)
        else:
            self._search.count_fine(block, place)

    def decide(self) -> bool:
        """Answer the ranks that are decided; return whether all are."""
        match self._stage:
            case Stage.EDGES:
                self._stage = self._enclose()
                return not self.is_open
            case Stage.INTERVALS:
                for rank, interval in self._intervals.items():
                    self._search.decide_inside(rank, interval.bins, interval.rank_inside)
                return True
            case _:
                self._stage = Stage.RANKS
                return self._search.decide()

    def _count_from_edges(self, block: RawBlock, place: int) -> None:
        from mergepipe.kernels.reduce import count_from_edges

        with self._lock:
            if self._edges_W is None:
                self._edges_W = self._suggest_edges(block, place)
                self._from_edge_W = np.zeros(len(self._edges_W), np.int64)
        counts_W = np.zeros(len(self._edges_W), np.int64)
        count_from_edges(
            block.raw, block.base_offset, block.base_code, int(block.offsets_E[place]), int(block.codes_E[place]),
            block.n_elements, self._edges_W, counts_W,
        )  # fmt: skip
        with self._lock:
            self._from_edge_W += counts_W

    def _suggest_edges(self, block: RawBlock, place: int) -> NDArray[np.uint16]:
        """Return rising edges around the bins that the ranks have in runs of a block; none of them is bin 0."""
        sample = RankSearch(self._search.open_ranks, self._n_elements)
        for start in range(0, block.n_elements, max(RUN_ELEMENTS, block.n_elements // SAMPLE_RUNS)):
            sample.count_coarse(block, place, range(start, min(start + RUN_ELEMENTS, block.n_elements)))
        edges: set[int] = set()
        for center in sample.expected_bins():
            first = center - EDGES * EDGE_BINS // 2
            edges.update(range(first, first + EDGES * EDGE_BINS, EDGE_BINS))
        return np.array(sorted(edge for edge in edges if 0 < edge < 1 << 15), np.uint16)

    def _enclose(self) -> Stage:
        """Find the interval of each open rank and watch its bins; where one is outside all, start with a histogram."""
        edges_W = np.zeros(0, np.uint16) if self._edges_W is None else self._edges_W
        for rank in self._search.open_ranks:
            enclosing = np.flatnonzero(self._from_edge_W >= rank)
            if not len(enclosing) or enclosing[-1] == len(edges_W) - 1:
                return Stage.HISTOGRAM
            w = int(enclosing[-1])
            bins = range(int(edges_W[w]), int(edges_W[w + 1]))
            if len(bins) > EDGE_BINS:  # between two brackets
                return Stage.HISTOGRAM
            self._intervals[rank] = Interval(bins, rank - int(self._from_edge_W[w + 1]))
        self._search.watch({b for interval in self._intervals.values() for b in interval.bins})
        return Stage.INTERVALS
