"""A part of `make reproduce`: what it needs, what it measures and the page that it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.reproduce.pages import Page
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace


@dataclass(frozen=True, slots=True)
class Needs:
    """The disk that a part takes while it runs, and about how long it takes on two quiet cores."""

    disk_bytes: int
    minutes: float

    def __str__(self) -> str:
        return f"{self.disk_bytes / 1e9:.1f} GB of disk, about {max(1, round(self.minutes))} min"


@dataclass(frozen=True, slots=True)
class Part:
    """One experiment. `measure` adds to the results what they lack; `page` is a pure function of them.

    `tells_beginnings`: its page can be made of results that were not measured to the end.
    """

    name: str
    summary: str
    needs: Callable[[Size], Needs]
    measure: Callable[[Workplace, Size, Results], None]
    page: Callable[[Results], Page]
    tells_beginnings: bool = False
