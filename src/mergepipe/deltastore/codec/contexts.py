"""Which elements of a block are coded alike: those whose base has a similar exponent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.rans import MAX_CONTEXTS, Halves
from mergepipe.deltastore.codec.symbols import N_EXPONENTS, choose_lows, context_rows, count_exponents
from mergepipe.kernels.compiled import Bytes

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

    def fill_rows(self, base: Halves, rows: Bytes) -> None:
        """Write the context of each element to `rows`, which is padded."""
        of_exponent = np.empty(N_EXPONENTS, np.uint8)
        top = N_EXPONENTS
        for context, low in enumerate(self.lows.tolist()):
            of_exponent[low:top] = context
            top = low
        context_rows(base, len(base), of_exponent, rows)

    @classmethod
    def of(cls, base: Halves) -> Contexts:
        """Merge neighbouring exponents, from the largest down, until each context has enough elements."""
        counts, lows = np.zeros(N_EXPONENTS, np.int64), np.empty(MAX_CONTEXTS, np.uint8)
        stride = _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1
        count_exponents(base, stride, counts)
        enough = max(len(base) // _MIN_SHARE, _MIN_ELEMENTS) // stride
        return cls(lows[: choose_lows(counts, enough, lows)])

    @property
    def stored(self) -> NDArray[np.uint8]:
        """One byte of count, then the lows."""
        return np.concatenate([np.array([self.count], np.uint8), self.lows])
