"""The bands of magnitude into which the deltas of one bf16 tensor are put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mergepipe.deltastore.codec.symbols import Integers


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
