"""What reading costs: bytes, or seconds from the speeds of storage and of decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_NANOSECONDS = 1e9
_MOST_LEVELS = 16


class Price(StrEnum):
    """What a step towards the full merge is divided by. A budget is a number of bytes, whatever the price."""

    BYTES = "bytes"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class DecodingPrices:
    """Nanoseconds of one thread to decode an element, by the kind of its block, at each level from 1 on."""

    nanoseconds: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        for kind, each in self.nanoseconds.items():
            if not 0 < len(each) <= _MOST_LEVELS or not all(0 <= value < math.inf for value in each):
                raise ValueError(f"{kind}: not what decoding takes at its levels: {each}")

    def seconds(self, kind: str, level: int) -> float:
        """To decode one element of a kind of block at a level; 0 for a kind that is not known, or level 0."""
        each = self.nanoseconds.get(kind)
        return each[min(level, len(each)) - 1] / _NANOSECONDS if each and level else 0.0


NO_DECODING = DecodingPrices({})


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast experts are read and decoded: bytes a second of storage, decoding on one of `threads` threads.

    `source` says in words where the numbers are from.
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
    """Seconds expected of a plan, by part. Reading and decoding overlap: neither is shorter than the merge."""

    reading_seconds: float
    decoding_seconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.reading_seconds < math.inf and 0 <= self.decoding_seconds < math.inf):
            raise ValueError(f"not a duration: {self.reading_seconds} and {self.decoding_seconds} s")


def three_digits(value: float) -> float:
    """The value rounded to three significant digits: what is expected is not known better."""
    return float(f"{value:.3g}")


def two_digits(value: float) -> float:
    """The value rounded to two significant digits, so that what is measured anew hardly changes."""
    return float(f"{value:.2g}")
