"""Divide the exponents of a base block into contexts, whose elements share symbol frequencies.

Format: "Contexts", and the first parts of HEAD, in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.entropy.rans import MAX_CONTEXTS, Bits16
from mergepipe.deltastore.codec.tiles.element_codes import (
    BF16_MANTISSA_BITS,
    N_EXPONENTS,
    choose_context_bounds,
    count_exponents,
    fill_contexts,
)
from mergepipe.kernels.compilation.compiled import Bytes

_MIN_SHARE = 64
_MIN_ELEMENTS = 512
_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 4


@dataclass(frozen=True, slots=True)
class Contexts:
    """Context c covers base exponents from `lows[c]` up to below `lows[c - 1]`; the last low is 0."""

    lows: NDArray[np.uint8]
    mantissa_bits: int = BF16_MANTISSA_BITS

    @property
    def count(self) -> int:
        return len(self.lows)

    def fill_rows(self, base: Bits16, contexts: Bytes) -> None:
        """Write the context of each element to `contexts`, whose length is padded."""
        context_of_exponent = np.empty(N_EXPONENTS, np.uint8)
        upper = N_EXPONENTS
        for context, low in enumerate(self.lows.tolist()):
            context_of_exponent[low:upper] = context
            upper = low
        fill_contexts(base, self.mantissa_bits, len(base), context_of_exponent, contexts)

    @classmethod
    def of(cls, base: Bits16, mantissa_bits: int = BF16_MANTISSA_BITS) -> Contexts:
        """Choose contexts for a base block so that each, from the largest exponents down, has enough elements."""
        counts, lows = np.zeros(N_EXPONENTS, np.int64), np.empty(MAX_CONTEXTS, np.uint8)
        stride = _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1
        count_exponents(base, mantissa_bits, stride, counts)
        enough = max(len(base) // _MIN_SHARE, _MIN_ELEMENTS) // stride
        return cls(lows[: choose_context_bounds(counts, enough, lows)], mantissa_bits)

    @property
    def stored(self) -> NDArray[np.uint8]:
        """The bytes as stored: one byte of count, then the lows."""
        return np.concatenate([np.array([self.count], np.uint8), self.lows])
