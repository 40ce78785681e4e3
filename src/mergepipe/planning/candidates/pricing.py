"""Price reads for the planner: in bytes, or in expected seconds of reading and decoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import LeveledTensor
from mergepipe.storage.prices import NO_DECODING, DecodingPrices, Speeds


@dataclass(frozen=True, slots=True)
class Pricing:
    """The price of a byte and of decoding, in one unit; priced in bytes, decoding is free.

    `is_time`: the unit is a second.
    """

    price_of_byte: float = 1.0
    decoding: DecodingPrices = NO_DECODING
    threads: int = 1
    is_time: bool = False

    @classmethod
    def of(cls, speeds: Speeds | None) -> Pricing:
        """Price in seconds if speeds are given, else in bytes."""
        return cls() if speeds is None else cls(speeds.seconds_per_byte, speeds.decoding, speeds.threads, is_time=True)

    def of_decoding(self, source: LeveledTensor, level: int, stretches: int) -> NDArray[np.float64]:
        """Compute the seconds to decode each group of `stretches` encoded blocks at a level, with all threads."""
        n_C = source.decoding_seconds(level, self.decoding) / self.threads
        joined: NDArray[np.float64] = np.add.reduceat(n_C, np.arange(0, len(n_C), stretches))
        return joined


BY_BYTES = Pricing()
