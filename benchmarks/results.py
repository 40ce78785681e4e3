"""What was measured, and its summary: one row per tool and operator."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.floor import FloorResult
from benchmarks.process import ProcessCost


@dataclass(frozen=True, slots=True)
class Run:
    """One merge by one tool, and the floor over the same inputs measured right before it."""

    tool: str
    operator: str
    input_bytes: int
    cost: ProcessCost
    floor: FloorResult

    @property
    def ratio(self) -> float:
        return self.cost.wall_seconds / self.floor.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the runs of one tool and operator.

    `ratio` is taken within each run, then its median; `steady_ratio` is the median time over the median of every floor
    of the whole benchmark with the same inputs, which a noisy disk moves less.
    """

    tool: str
    operator: str
    n_runs: int
    seconds: float
    fastest_seconds: float
    slowest_seconds: float
    floor_seconds: float
    ratio: float
    steady_ratio: float
    input_gb_per_second: float
    peak_rss_bytes: float
    peak_anonymous_bytes: float
    read_bytes: float
    written_bytes: float
    cpu_seconds: float


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Make one row per (tool, operator), in the order they were first run."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.tool, run.operator), []).append(run)
    floors: dict[int, list[float]] = {}
    for run in runs:
        floors.setdefault(run.input_bytes, []).append(run.floor.seconds)
    return [_row(group, statistics.median(floors[group[0].input_bytes])) for group in groups.values()]


def _row(runs: Sequence[Run], steady_floor_seconds: float) -> Row:
    seconds = [run.cost.wall_seconds for run in runs]
    median = statistics.median(seconds)
    return Row(
        tool=runs[0].tool,
        operator=runs[0].operator,
        n_runs=len(runs),
        seconds=median,
        fastest_seconds=min(seconds),
        slowest_seconds=max(seconds),
        floor_seconds=statistics.median(run.floor.seconds for run in runs),
        ratio=statistics.median(run.ratio for run in runs),
        steady_ratio=median / steady_floor_seconds,
        input_gb_per_second=runs[0].input_bytes / median / 1e9,
        peak_rss_bytes=max(run.cost.peak_rss_bytes for run in runs),
        peak_anonymous_bytes=max(run.cost.peak_anonymous_bytes for run in runs),
        read_bytes=statistics.median(run.cost.read_bytes for run in runs),
        written_bytes=statistics.median(run.cost.written_bytes for run in runs),
        cpu_seconds=statistics.median(run.cost.cpu_seconds for run in runs),
    )


COLUMNS = (
    "tool",
    "operator",
    "runs",
    "time s (min-max)",
    "floor s",
    "x floor",
    "x median floor",
    "input GB/s",
    "peak RSS MiB",
    "of it anonymous",
    "read GB",
    "written GB",
    "CPU s",
)


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of `COLUMNS`."""
    return (
        row.tool,
        row.operator,
        str(row.n_runs),
        f"{row.seconds:.2f} ({row.fastest_seconds:.2f}-{row.slowest_seconds:.2f})",
        f"{row.floor_seconds:.2f}",
        f"{row.ratio:.2f}",
        f"{row.steady_ratio:.2f}",
        f"{row.input_gb_per_second:.2f}",
        f"{row.peak_rss_bytes / 2**20:.0f}",
        f"{row.peak_anonymous_bytes / 2**20:.0f}",
        f"{row.read_bytes / 1e9:.2f}",
        f"{row.written_bytes / 1e9:.2f}",
        f"{row.cpu_seconds:.1f}",
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str


def this_machine() -> Machine:
    """Describe this machine, without its name."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_bytes / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def _processor() -> str:
    """The processor's name, and whether it lacks the instructions that packed experts are decoded with elsewhere."""
    fields = (line.partition(":") for line in _lines("/proc/cpuinfo"))
    told = {name.strip(): value.strip() for name, _, value in fields}
    name = told.get("model name", platform.machine())
    return name if "avx512_vbmi2" in told.get("flags", "").split() else f"{name} without AVX-512 VBMI2"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def to_markdown(rows: Sequence[Row], machine: Machine, title: str) -> str:
    """The table for docs/internals/benchmarks.md."""
    about = f"{title}; {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}"
    lines = [f"{about}, Python {machine.python}.", "", _markdown_line(COLUMNS), "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *(_markdown_line(cells(row)) for row in rows)]) + "\n"


def _markdown_line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def to_json(rows: Sequence[Row], runs: Sequence[Run], machine: Machine, title: str) -> str:
    """Everything that was measured, run by run."""
    content = {
        "title": title,
        "machine": asdict(machine),
        "rows": [asdict(row) for row in rows],
        "runs": [{**asdict(run), "ratio": run.ratio} for run in runs],
    }
    return json.dumps(content, indent=2) + "\n"
