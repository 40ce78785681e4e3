"""The cost model of reading: bytes, or seconds from the measured speeds of storage and of decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_NANOSECONDS = 1e9
_MOST_LEVELS = 16


class Price(StrEnum):
    """The unit in which the planner compares the cost of reads. A budget is a number of bytes, whatever the unit."""

    BYTES = "bytes"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class DecodingPrices:
    """Nanoseconds of one thread to decode an element, by the kind of its block, at each level from 1 on."""

    nanoseconds: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        for kind, by_level in self.nanoseconds.items():
            if not 0 < len(by_level) <= _MOST_LEVELS or not all(0 <= value < math.inf for value in by_level):
                raise ValueError(f"{kind}: not decoding times of its levels: {by_level}")

    def seconds(self, kind: str, level: int) -> float:
        """Return the seconds to decode one element of a kind of block; 0 for an unknown kind or level 0."""
        by_level = self.nanoseconds.get(kind)
        return by_level[min(level, len(by_level)) - 1] / _NANOSECONDS if by_level and level else 0.0


NO_DECODING = DecodingPrices({})


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of reading and decoding experts: storage bytes per second, decoding on one of `threads` threads.

    `source` describes where the numbers are from.
    """

    storage_bytes_per_second: float
    decoding: DecodingPrices
    threads: int
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.storage_bytes_per_second < math.inf:
            raise ValueError(f"not a speed of storage: {self.storage_bytes_per_second}")
        if self.threads < 1:
            raise ValueError(f"{self.threads} threads")

    @property
    def seconds_per_byte(self) -> float:
        return 1.0 / self.storage_bytes_per_second


@dataclass(frozen=True, slots=True)
class Duration:
    """Expected seconds of a plan, by part; reading and decoding overlap.

    The merge takes at least as long as the longer of the two.
    """

    reading_seconds: float
    decoding_seconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.reading_seconds < math.inf and 0 <= self.decoding_seconds < math.inf):
            raise ValueError(f"not a duration: {self.reading_seconds} and {self.decoding_seconds} s")


def three_digits(value: float) -> float:
    """Round to three significant digits, the precision of estimates."""
    return float(f"{value:.3g}")


def two_digits(value: float) -> float:
    """Round to two significant digits, so that repeated measurements hardly differ."""
    return float(f"{value:.2g}")
