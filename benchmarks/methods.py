"""The benchmark of merges in full: time over the I/O floor of each one's own bytes, memory and bytes, on cold files.

Every method, slices, adapters and tokenizers, in rounds. Other programs are in `benchmarks.reproduce.mergekit`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.floor import floor_seconds, make_cold
from benchmarks.make_family import SHAPES, FamilyRequest, ensure_family
from benchmarks.process import BenchmarkError, ProcessCost, measure_checked
from benchmarks.recipes import Case, all_cases

OURS = Path(".venv/bin/mergepipe")
COLUMNS = (
    "merge", "time s (min-max)", "floor s", "x floor", "CPU s", "CPU s per GB in", "peak RSS MiB", "needed GB",
    "read GB", "written GB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One merge on cold files, and right after it the floor of the bytes it needed; `load` is of the last minute."""

    name: str
    needed_bytes: int
    cost: ProcessCost
    floor_seconds: float
    load: float

    @property
    def ratio(self) -> float:
        return self.cost.wall_seconds / self.floor_seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """A scratch directory in which one case at a time is merged."""

    directory: Path
    program: Path
    memory: str

    def run(self, case: Case) -> Run:
        """Merge a case, then measure its floor: of what the report says was needed.

        Raises:
            BenchmarkError: the program failed, or wrote less than a model.
        """
        files = case.files()
        make_cold(files)
        cost, output_bytes, printed = self._merged(case)
        report = json.loads(printed)
        stored_bytes = sum(file.stat().st_size for file in files)
        needed_bytes = min(stored_bytes, report["base_bytes"] + report["expert_bytes"])
        floor = floor_seconds(files, self.directory / "scratch", output_bytes, needed_bytes)
        return Run(case.name, needed_bytes, cost, floor, os.getloadavg()[0])

    def _merged(self, case: Case) -> tuple[ProcessCost, int, str]:
        recipe, out, log = (self.directory / name for name in ("recipe.yml", "out", "log.txt"))
        recipe.write_text(case.recipe)
        try:
            options = ("--json", "--quiet", "--no-catalog", "--memory", self.memory)
            cost = measure_checked([str(self.program), "merge", str(recipe), str(out), *options], log=log)
            output_bytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        finally:
            shutil.rmtree(out, ignore_errors=True)
        if not output_bytes:
            raise BenchmarkError(f"{case.name}: exit code 0, and no weights")
        return cost, output_bytes, log.read_text(errors="replace")


def to_markdown(runs: Sequence[Run], memory: str) -> str:
    """The table for docs/internals/benchmarks.md: medians over the rounds of each case."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    loads = sorted(run.load for run in runs)
    head = f"--memory {memory}; load {loads[0]:.1f} to {loads[-1]:.1f}, median {statistics.median(loads):.1f}, "
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, groups.values())]
    return "\n".join([f"{head}{len(os.sched_getaffinity(0))} cores", "", *(f"| {' | '.join(row)} |" for row in rows)])


def _row(runs: Sequence[Run]) -> tuple[str, ...]:
    seconds = [run.cost.wall_seconds for run in runs]
    cpu_seconds = statistics.median(run.cost.cpu_seconds for run in runs)
    return (
        runs[0].name,
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
        f"{statistics.median(run.floor_seconds for run in runs):.2f}",
        f"{statistics.median(run.ratio for run in runs):.2f}",
        f"{cpu_seconds:.1f}",
        f"{cpu_seconds / runs[0].needed_bytes * 1e9:.2f}",
        f"{max(run.cost.peak_rss_bytes for run in runs) / 2**20:.0f}",
        f"{runs[0].needed_bytes / 1e9:.2f}",
        f"{statistics.median(run.cost.read_bytes for run in runs) / 1e9:.2f}",
        f"{statistics.median(run.cost.written_bytes for run in runs) / 1e9:.2f}",
    )


def _run(options: argparse.Namespace) -> Iterator[Run]:
    bench = Bench(options.root, options.mergepipe, options.memory)

    def cases(shape: str) -> list[Case]:
        root = options.root / shape
        family = ensure_family(FamilyRequest(root / "family", shape, options.experts, 0))
        found = all_cases(family, SHAPES[shape], root / "more")
        return [case for case in found if not options.cases or any(word in case.name for word in options.cases)]

    for case in cases("tiny"):  # compiled code is cached once per machine
        bench.run(case)
    chosen = cases(options.shape)
    for _ in range(options.repeat):
        for case in chosen:
            yield bench.run(case)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(".bench/methods"), help="family and outputs; 6 GB")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=[], metavar="WORD", help="only those with such a name")
    parser.add_argument("--repeat", type=int, default=3, help="rounds over all cases")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--mergepipe", type=Path, default=OURS)
    parser.add_argument("--json", type=Path, help="write every run")
    options = parser.parse_args(arguments)
    runs: list[Run] = []
    try:
        for run in _run(options):
            runs.append(run)
            print(f"{run.name}: {run.cost.wall_seconds:.2f} s, x {run.ratio:.2f}", file=sys.stderr)
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in runs], indent=1) + "\n")
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(to_markdown(runs, options.memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
