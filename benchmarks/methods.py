"""The benchmark of methods: time over the I/O floor of each one's own bytes, memory and bytes, in rounds."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cold import make_cold
from benchmarks.floor import FloorResult
from benchmarks.make_family import SHAPES, FamilyRequest, ensure_family
from benchmarks.merge import BenchmarkError, calibrated, measure_floor
from benchmarks.method_cases import MethodCase, all_cases
from benchmarks.process import ProcessCost, measure

OURS = Path(".venv/bin/mergepipe")
N_EXPERTS = 2
COLUMNS = (
    "merge", "time s (min-max)", "floor s", "x floor", "CPU s", "CPU s per GB in", "peak RSS MiB", "needed GB",
    "read GB", "written GB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MethodRun:
    """One merge on cold files, and right after it the floor of the bytes it needed; `load` is of the last minute."""

    name: str
    needed_bytes: int
    cost: ProcessCost
    floor: FloorResult
    load: float

    @property
    def ratio(self) -> float:
        return self.cost.wall_seconds / self.floor.seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """A scratch directory in which one case at a time is merged."""

    directory: Path
    executable: Path
    memory: str
    floor_settings: tuple[str, ...] = ()

    def run(self, case: MethodCase) -> MethodRun:
        """Merge a case, then measure its floor."""
        files = case.files()
        make_cold(files)
        cost, report = self.merged(case)
        stored_bytes = sum(file.stat().st_size for file in files)
        needed_bytes = min(stored_bytes, int(str(report["base_bytes"])) + int(str(report["expert_bytes"])))
        floor = self._floor(files, needed_bytes, int(str(report["output_bytes"])))
        return MethodRun(case.name, needed_bytes, cost, floor, os.getloadavg()[0])

    def merged(self, case: MethodCase) -> tuple[ProcessCost, Mapping[str, object]]:
        """Merge once; what it cost and what it says.

        Raises:
            BenchmarkError: it failed.
        """
        recipe, out, log = (self.directory / name for name in ("recipe.yml", "out", "log.txt"))
        recipe.write_text(case.text())
        command = [str(self.executable), "merge", str(recipe), str(out), "--json", "--quiet", "--no-catalog"]
        try:
            cost = measure([*command, "--memory", self.memory], log=log)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        if cost.exit_code:
            raise BenchmarkError(f"{case.name}: {log.read_text(errors='replace')[-2000:]}")
        report: Mapping[str, object] = json.loads(log.read_text())
        return cost, report

    def _floor(self, files: Sequence[Path], needed_bytes: int, output_bytes: int) -> FloorResult:
        sizes = ["--read-bytes", str(needed_bytes), "--output-bytes", str(output_bytes)]
        return measure_floor(self.directory, files, self.floor_settings, *sizes)


def _row(runs: Sequence[MethodRun]) -> tuple[str, ...]:
    seconds = [run.cost.wall_seconds for run in runs]
    cpu_seconds = statistics.median(run.cost.cpu_seconds for run in runs)
    return (
        runs[0].name,
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
        f"{statistics.median(run.floor.seconds for run in runs):.2f}",
        f"{statistics.median(run.ratio for run in runs):.2f}",
        f"{cpu_seconds:.1f}",
        f"{cpu_seconds / runs[0].needed_bytes * 1e9:.2f}",
        f"{max(run.cost.peak_rss_bytes for run in runs) / 2**20:.0f}",
        f"{runs[0].needed_bytes / 1e9:.2f}",
        f"{statistics.median(run.cost.read_bytes for run in runs) / 1e9:.2f}",
        f"{statistics.median(run.cost.written_bytes for run in runs) / 1e9:.2f}",
    )


def to_markdown(runs: Sequence[MethodRun], memory: str) -> str:
    """The table for docs/internals/benchmarks.md."""
    names = list(dict.fromkeys(run.name for run in runs))
    rows = [_row([run for run in runs if run.name == name]) for name in names]
    loads = sorted(run.load for run in runs)
    head = f"--memory {memory}; load {loads[0]:.1f} to {loads[-1]:.1f}, median {statistics.median(loads):.1f}, "
    lines = [head + f"{len(os.sched_getaffinity(0))} cores", "", COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(line if isinstance(line, str) else f"| {' | '.join(line)} |" for line in lines) + "\n"


def _warm_up(options: argparse.Namespace) -> None:
    """Merge a tiny family by each case: compiled code is cached once per machine."""
    root = options.root / "tiny"
    family = ensure_family(FamilyRequest(root / "family", "tiny", N_EXPERTS, 0))
    bench = Bench(root, options.mergepipe, options.memory)
    for case in _chosen(all_cases(family, SHAPES["tiny"], root / "more"), options.cases):
        bench.merged(case)


def _chosen(cases: Sequence[MethodCase], words: Sequence[str]) -> list[MethodCase]:
    return [case for case in cases if not words or any(word in case.name for word in words)]


def _run(options: argparse.Namespace) -> list[MethodRun]:
    _warm_up(options)
    family = ensure_family(FamilyRequest(options.root / "family", options.shape, N_EXPERTS, 0))
    cases = _chosen(all_cases(family, SHAPES[options.shape], options.root / "more"), options.cases)
    settings = calibrated(options.root, cases[0].files())
    bench = Bench(options.root, options.mergepipe, options.memory, settings)
    runs = []
    for _ in range(options.repeat):
        for case in cases:
            runs.append(bench.run(case))
            print(f"{case.name}: {runs[-1].cost.wall_seconds:.2f} s, x {runs[-1].ratio:.2f}", file=sys.stderr)
            if options.json:
                options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(".bench/methods"), help="family and outputs; 6 GB")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument(
        "--cases", nargs="*", default=[], metavar="WORD", help="only cases with one of these in the name"
    )
    parser.add_argument("--repeat", type=int, default=3, help="rounds over all cases")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--mergepipe", type=Path, default=OURS)
    parser.add_argument("--json", type=Path, help="write every run")
    options = parser.parse_args()
    try:
        runs = _run(options)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(to_markdown(runs, options.memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
