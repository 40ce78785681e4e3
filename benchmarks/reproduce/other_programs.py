"""How many processors other programs used while something of ours ran: the kernel's counters less our own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; not idle, not waiting for a disk


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds since some moment: by the clock, of all busy processors, and of this process and its ended children."""

    wall: float
    busy: float
    ours: float

    @classmethod
    def read(cls) -> Clocks:
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        return cls(time.monotonic(), busy_seconds(Path("/proc/stat").read_text()), ours)


def busy_seconds(stat: str, ticks_per_second: int = os.sysconf("SC_CLK_TCK")) -> float:
    """Return the seconds that all processors were busy, from the text of /proc/stat."""
    columns = stat.partition("\n")[0].split()[1:]
    return sum(int(columns[number]) for number in _BUSY_COLUMNS) / ticks_per_second


def processors_of_others(before: Clocks, after: Clocks) -> float:
    """Return the mean number of processors that other programs used in between; counters round, so at least 0."""
    wall = after.wall - before.wall
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, others / wall) if wall > 0 else 0.0
