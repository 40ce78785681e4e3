"""Compute exact order statistics of the scores of one tensor in one look, in brackets that a sample suggests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mergepipe.engine.reductions.order_statistics import Place

SAMPLE_RUNS = 16
RUN_ELEMENTS = 1024
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
        step = max(RUN_ELEMENTS, len(scores_N) // SAMPLE_RUNS)
        runs = [scores_N[start : start + RUN_ELEMENTS] for start in range(0, len(scores_N), step)]
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
        from mergepipe.kernels.reduce import collect_between

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
