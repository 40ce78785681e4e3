"""Which elements of a block are coded alike: those whose base has a similar exponent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.loops import N_EXPONENTS, context_rows, count_exponents
from mergepipe.deltastore.parts import Parts, corrupt
from mergepipe.deltastore.rans import MAX_CONTEXTS, Halves, padded

_MIN_SHARE = 64
_MIN_ELEMENTS = 512
_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 4


@dataclass(frozen=True, slots=True)
class Contexts:
    """Context c holds the exponents from `lows[c]` up to below that of the context before it; the last low is 0."""

    lows: NDArray[np.uint8]

    @property
    def count(self) -> int:
        return len(self.lows)

    def rows(self, base: Halves) -> NDArray[np.uint8]:
        """The context of each element, padded."""
        of_exponent = np.empty(N_EXPONENTS, np.uint8)
        top = N_EXPONENTS
        for context, low in enumerate(self.lows):
            of_exponent[int(low) : top] = context
            top = int(low)
        rows = np.empty(padded(len(base)), np.uint8)
        context_rows(base, len(base), of_exponent, rows)
        return rows

    @classmethod
    def of(cls, base: Halves) -> Contexts:
        """Merge neighbouring exponents, from the largest down, until each context has enough elements."""
        counts = np.zeros(N_EXPONENTS, np.int64)
        stride = _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1
        count_exponents(np.ascontiguousarray(base[::stride]), counts)
        enough = max(len(base) // _MIN_SHARE, _MIN_ELEMENTS) // stride
        lows: list[int] = []
        gathered = 0
        for exponent in range(N_EXPONENTS - 1, 0, -1):
            gathered += int(counts[exponent])
            if gathered >= enough and len(lows) < MAX_CONTEXTS - 1:
                lows.append(exponent)
                gathered = 0
        return cls(np.array([*lows, 0], np.uint8))

    @classmethod
    def taken(cls, parts: Parts, where: str) -> Contexts:
        """Read what `stored` gives.

        Raises:
            CorruptError: it is no partition of the exponents.
        """
        count = int(parts.take(np.uint8, 1)[0])
        if not 1 <= count <= MAX_CONTEXTS:
            raise corrupt(where, f"{count} contexts; 1 to {MAX_CONTEXTS} are possible")
        lows = parts.take(np.uint8, count)
        if lows[-1] != 0 or (np.diff(lows.astype(np.int64)) >= 0).any():
            raise corrupt(where, "the contexts do not divide the exponents")
        return cls(lows)

    @property
    def stored(self) -> NDArray[np.uint8]:
        """One byte of count, then the lows."""
        return np.concatenate([np.array([self.count], np.uint8), self.lows])
