"""The bands of magnitude into which the deltas of one bf16 tensor are put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.loops import FIRST_REST_CODE, N_CODES, Integers

_BAND_CODES = range(1, FIRST_REST_CODE)


@dataclass(frozen=True, slots=True)
class Bands:
    """Where the three bands of a tensor begin: positive magnitudes, descending."""

    cuts: tuple[float, float, float]

    def __post_init__(self) -> None:
        first, second, third = (np.float32(cut) for cut in self.cuts)
        if not (np.isfinite(first) and first >= second >= third > 0):
            raise ValueError(f"not descending positive cuts: {self.cuts}")

    @property
    def bits(self) -> Integers:
        return np.array(self.cuts, np.float32).view(np.int32)

    @property
    def limit(self) -> np.float32:
        """The largest magnitude outside the bands: one place below where the third begins."""
        return np.float32(np.nextafter(np.float32(self.cuts[2]), np.float32(0)))

    @property
    def signed(self) -> NDArray[np.float32]:
        """Where a band begins, by code; 0 for cells."""
        table = np.zeros(N_CODES, np.float32)
        for code in _BAND_CODES:
            # Codes 1, 2 are the first band (largest deltas), 3, 4 the second, 5, 6 the third; up, then down.
            cut = self.cuts[(code - 1) // 2]
            table[code] = cut if code % 2 else -cut
        return table
