"""The cuts that divide the deltas of one bf16 tensor into three bands of magnitude.

Format: `cuts` of the header, and "Levels", in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mergepipe.deltastore.codec.tiles.element_codes import Integers


@dataclass(frozen=True, slots=True)
class Bands:
    """Lower bounds of a tensor's three bands: positive magnitudes, descending."""

    cuts: tuple[float, float, float]

    def __post_init__(self) -> None:
        first, second, third = (np.float32(cut) for cut in self.cuts)
        if not (np.isfinite(first) and first >= second >= third > 0):
            raise ValueError(f"cuts must be positive, finite and descending, found {self.cuts}")

    @property
    def bits(self) -> Integers:
        """The cuts as float32 bit patterns (int32)."""
        return np.array(self.cuts, np.float32).view(np.int32)

    @property
    def limit(self) -> np.float32:
        """The largest float32 outside the bands: the predecessor of the third cut."""
        return np.float32(np.nextafter(np.float32(self.cuts[2]), np.float32(0)))
