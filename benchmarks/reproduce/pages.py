"""Pages of docs/benchmarks as values: text, tables and figures made of stored results, and what they say of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.reproduce.results import DEFAULT_ANEW, Entry, Results

ERROR_TEXT = "Error: `‖M_A - M_full‖ / ‖M_full - M_0‖`."
COST_HEADER = ("s", "CPU s", "x floor", "RSS MiB")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a figure: its label and its points; `spread` is half the length of error bars, if there are any."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    spread: tuple[float, ...] = ()
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot: `name` is that of its file, without a suffix."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False

    @property
    def digest(self) -> str:
        """Identify what is drawn: it stands in the drawing, so that a stale one is noticed."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def markdown(self) -> str:
        return f"![{self.title}]({self.name}.svg)"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [_line(self.header), "|" + "---|" * len(self.header), *map(_line, self.rows)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its first paragraph says what the results mean for a user."""

    title: str
    meaning: str
    body: tuple[str | Table | Figure, ...]

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(piece for piece in self.body if isinstance(piece, Figure))

    def markdown(self, results: Results, command: str) -> str:
        """Write the page; `command` measures it again."""
        pieces = [piece if isinstance(piece, str) else piece.markdown() for piece in self.body]
        return "\n\n".join([f"# {self.title}", self.meaning, *pieces, _provenance(results, command)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _provenance(results: Results, command: str) -> str:
    others, loads = results.others, results.loads
    busy = (
        f"other programs used {median(others):.1f} (at most {max(others):.1f})"
        if others
        else f"load average {median(loads):.1f} (largest {max(loads):.1f})"
    )
    warning = " The machine was busy: compare bytes, errors and processor seconds."
    beginning = "" if results.is_complete else " **Not completely measured**: the same command resumes it."
    numbers = f"results/{results.path.name}"
    rate = "" if results.floor_rate is None else f"; its floor reads and writes {results.floor_rate / 1e9:.1f} GB/s"
    again = f"`{command}`, which measures into `{DEFAULT_ANEW}` and prints the differences"
    if not results.is_complete:
        again = f"`{command}`"
    return (
        f"Measured {results.date} at commit {results.commit}, size `{results.size['name']}`, on"
        f" {results.processors} ([machines](index.md)){rate}; {busy} on {results.machine['cores']} processors."
        f"{warning if results.is_busy else ''}{beginning} Again: {again}. Numbers: [{numbers}]({numbers})."
    )


def gb(nbytes: float) -> str:
    """Write bytes as GB with three digits after the point."""
    return f"{nbytes / 1e9:.3f}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def cost_cells(results: Results, entry: Entry | None) -> tuple[str, ...]:
    """Return what a merge took, by the columns of `COST_HEADER`; empty cells where it was not measured."""
    if entry is None:
        return ("",) * len(COST_HEADER)
    seconds = (results.told_seconds(entry, clock) for clock in ("seconds", "cpu_seconds"))
    return (*seconds, results.over_floor(entry), peak_mib(entry))


def peak_mib(entry: Entry) -> str:
    """Write the peak memory of a merge in MiB; nothing where it is not stored."""
    return f"{entry['peak_rss_bytes'] / 2**20:.0f}" if "peak_rss_bytes" in entry else ""
