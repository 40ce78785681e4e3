"""Command that measures compositions and averages of checkpoints against the I/O floor.

    python -m benchmarks.tailor --scratch DIR --size-gb 8 [--sources 2 4 8] [--ranks 4] [--repeat 3] [--only NAME...]
    python -m benchmarks.tailor --scratch DIR --size-gb 0.5 --average 10 --only average

Every run is a cold process of its own. The floor, measured right before it, reads one checkpoint and writes as many
bytes: what a composition has to move however its layers are interleaved. An average of weights and moments reads all
checkpoints and writes one, and so does its floor. `cp` copies one checkpoint and syncs it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cold import make_cold
from benchmarks.floor import FloorSetting, calibrate, fastest_floor
from benchmarks.process import ProcessCost, measure
from benchmarks.tailor_tree import LAYERS, checkpoint_name

OURS = Path(".venv/bin/mergepipe")
_EDGE_LAYERS = 2
_COPY = 'cp -r "$1" "$2" && sync "$2"/*'  # not durable otherwise, as a composite is
_HEAD = "| pattern | sources | time s (min-max) | floor s | x floor | CPU s | peak RSS MB | read GB | written GB |"

_OUTER_UNITS = ("embed", "norm", "lm_head")  # after the layers, in the numbers of units
N_UNITS = LAYERS + len(_OUTER_UNITS)

Units = Mapping[int, Iterable[int]]  # source -> numbers of the units taken from it; the newest gives the rest


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which units come from which of `n_sources` checkpoints; `units` None is a plain copy of one, or an average."""

    name: str
    n_sources: int
    units: Units | None
    is_average: bool = False

    def recipe(self) -> str:
        """The composition as a recipe that lies beside the checkpoints."""
        newest = self.n_sources - 1
        lines = [f"default: {checkpoint_name(newest)}", "take:"]
        for source, units in sorted((self.units or {}).items()):
            if source != newest:
                lines.append(f"  - {{from: {checkpoint_name(source)}, units: {json.dumps(_selectors(units))}}}")
        return "\n".join(lines) + "\n"


def _selectors(units: Iterable[int]) -> list[str]:
    """Name units as recipes do."""
    numbers = list(units)
    layers = ",".join(str(number) for number in numbers if number < LAYERS)
    outer = [_OUTER_UNITS[number - LAYERS] for number in numbers if number >= LAYERS]
    return [*([f"layers {layers}"] if layers else []), *outer]


@dataclass(frozen=True, slots=True)
class Run:
    """One cold run and the floor of its moment."""

    pattern: str
    n_sources: int
    seconds: float
    floor_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    read_bytes: int
    written_bytes: int


class BenchmarkError(Exception):
    """A run did not do what it was measured for."""


def patterns(source_counts: Sequence[int], average_counts: Sequence[int] = ()) -> Iterator[Pattern]:
    """A plain copy, the paper's filter, for each number of sources units in runs and in turn, and averages."""
    yield Pattern("cp -r, sync", 1, None)
    yield Pattern("filter", 2, {0: range(_EDGE_LAYERS, LAYERS - _EDGE_LAYERS)})
    for n in source_counts:
        runs = {i: range(i * N_UNITS // n, (i + 1) * N_UNITS // n) for i in range(n)}
        yield Pattern("consecutive", n, runs)
        if n < N_UNITS:
            yield Pattern("parity" if n == 2 else "in turn", n, {i: range(i, N_UNITS, n) for i in range(n)})
    for n in average_counts:
        yield Pattern("average", n, None, is_average=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """The checkpoints in `scratch` and the tool that composes them."""

    scratch: Path
    mergepipe: Path
    settings: tuple[FloorSetting, ...]

    def run(self, pattern: Pattern) -> Run:
        """Measure the floor, then one run of `pattern`; its output is removed."""
        newest = files_of(self.scratch / checkpoint_name(pattern.n_sources - 1))
        size_bytes = sum(path.stat().st_size for path in newest)
        sources = [self.scratch / checkpoint_name(i) for i in range(pattern.n_sources)]
        inputs = [path for source in sources for path in files_of(source)] if pattern.is_average else newest
        floor = fastest_floor(inputs, self.scratch / "floor", size_bytes, self.settings)
        out, log = self.scratch / "out", self.scratch / "log"
        make_cold(sources)
        time.sleep(1)  # what the floor left to the disk is not this run's
        try:
            cost = measure(self._command(pattern, sources, out), log=log)
            written = sum(path.stat().st_size for path in out.glob("*.pt"))
        finally:
            shutil.rmtree(out, ignore_errors=True)
        if cost.exit_code or written != size_bytes:
            tail = log.read_text(errors="replace")[-2000:]
            raise BenchmarkError(f"{pattern}: exit code {cost.exit_code}, {written} bytes written\n{tail}")
        return _run(pattern, cost, floor.seconds)

    def _command(self, pattern: Pattern, sources: Sequence[Path], out: Path) -> list[str]:
        if pattern.is_average:
            options = ["-o", str(out), "--optimizer", "average"]
            return [str(self.mergepipe), "tailor", "average", *map(str, sources), *options]
        if pattern.units is None:
            return ["bash", "-c", _COPY, "cp", str(sources[0]), str(out)]
        recipe = self.scratch / "recipe.yml"
        recipe.write_text(pattern.recipe())
        return [str(self.mergepipe), "tailor", "compose", str(recipe), str(out)]


def _run(pattern: Pattern, cost: ProcessCost, floor_seconds: float) -> Run:
    return Run(
        pattern.name, pattern.n_sources, cost.wall_seconds, floor_seconds, cost.cpu_seconds, cost.peak_rss_bytes,
        cost.read_bytes, cost.written_bytes,
    )  # fmt: skip


def files_of(directory: Path) -> list[Path]:
    """The files of a checkpoint, in the order of their names."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def row(runs: Sequence[Run]) -> str:
    """One line of the table: medians; the ratio is the median of the ratios within rounds."""
    median = statistics.median
    seconds = [run.seconds for run in runs]
    ratio = median(run.seconds / run.floor_seconds for run in runs)
    first = runs[0]
    return (
        f"| {first.pattern} | {first.n_sources} | {median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) "
        f"| {median(run.floor_seconds for run in runs):.2f} | {ratio:.2f} "
        f"| {median(run.cpu_seconds for run in runs):.1f} | {max(run.peak_rss_bytes for run in runs) / 1e6:.0f} "
        f"| {max(run.read_bytes for run in runs) / 1e9:.3f} | {max(run.written_bytes for run in runs) / 1e9:.3f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=1.0, help="bytes of one checkpoint")
    parser.add_argument("--sources", type=int, nargs="+", default=[2], help="numbers of checkpoints to compose from")
    parser.add_argument("--average", type=int, nargs="+", default=[], help="numbers of checkpoints to average")
    parser.add_argument("--scratch", type=Path, required=True, help="a directory to make and remove")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mergepipe", type=Path, default=OURS)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="the names in the table; default, all")
    parser.add_argument("--json", action="store_true", help="one JSON object a run")
    options = parser.parse_args()
    scratch: Path = options.scratch
    scratch.mkdir(parents=True)
    try:
        make_tree(scratch, options.size_gb, max(options.sources + options.average), options.ranks)
        _measure_all(scratch, options)
    finally:
        shutil.rmtree(scratch)
    return 0


def make_tree(scratch: Path, size_gb: float, n_checkpoints: int, ranks: int) -> None:
    """Write the checkpoints in another process: a child's peak memory begins with its parent's."""
    command = [sys.executable, "-m", "benchmarks.tailor_tree", str(scratch), f"--size-gb={size_gb}"]
    subprocess.run([*command, f"--checkpoints={n_checkpoints}", f"--ranks={ranks}"], check=True)


def _measure_all(scratch: Path, options: argparse.Namespace) -> None:
    inputs = files_of(scratch / checkpoint_name(0))
    size_bytes = sum(path.stat().st_size for path in inputs)
    bench = Bench(scratch, options.mergepipe, calibrate(inputs, scratch / "floor", size_bytes, repeat=1))
    chosen = [p for p in patterns(options.sources, options.average) if options.only is None or p.name in options.only]
    found: list[list[Run]] = [[] for _ in chosen]
    for _ in range(options.repeat):
        for pattern, of_pattern in zip(chosen, found, strict=True):
            of_pattern.append(bench.run(pattern))
            if options.json:
                print(json.dumps(asdict(of_pattern[-1])), flush=True)
    print(f"{size_bytes / 1e9:.3f} GB a checkpoint, {options.ranks} ranks, floor {bench.settings}", file=sys.stderr)
    if not options.json:
        print(_HEAD, "|---" * 9 + "|", *map(row, found), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
