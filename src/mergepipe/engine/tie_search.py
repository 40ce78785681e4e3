"""Complete cuts where elements are tied: find the last hash of those that reach a cut."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import ALL_TIES, TIE_RUN
from mergepipe.kernels.reduce import DeltaStretches, collect_ties
from mergepipe.operators.statistics import Cut, tie_key
from mergepipe.storage.ranges import KEPT_BYTES, scratch

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
        n_open = len(self._open)
        n_elements = deltas.n_elements
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
        place = self._places[rank]
        tie = self._ties.get(rank)
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
        self._low = 0
        self._high = ALL_TIES - 1
        self._n_lower = 0  # hashes below `_low`
        self._n = n
        self.answer: int | None = None
        self._look(wanted / n)

    def _look(self, share: float) -> None:
        """Begin a look at a bracket around `share` of the hashes from `_low` to `_high`."""
        n_runs = max(1.0, self._n / self._together)
        margin = BRACKET_SIGMAS * math.sqrt(max(share * (1.0 - share), 1.0 / n_runs) / n_runs)
        width = self._high - self._low
        first = int(max(0.0, share - margin) * width)
        last = math.ceil(min(1.0, share + margin) * width)
        self.bracket = self._low + first, self._low + last
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
            self._high = first - 1
            self._n = self.n_below - self._n_lower
            self._look(0.5)
        elif last < self._high:
            n_lower = self.n_below + n_inside
            self._n -= n_lower - self._n_lower
            self._low = last + 1
            self._n_lower = n_lower
            self._look(0.5)
        else:  # it is the largest of all hashes, which two elements share, 2^32 apart: both are left out
            self.answer = self._high
