"""Compositions, averages and exports of checkpoints, and how one is run cold beside its I/O floor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.floor import floor_seconds, make_cold
from benchmarks.process import OURS, BenchmarkError, measure_checked
from benchmarks.tailor_tree import LAYERS, checkpoint_name

_EDGE_LAYERS = 2
_FRAMING_SHARE = 0.02  # headers and padding, of the bytes of small checkpoints
_OUTER_UNITS = ("embed", "norm", "lm_head")  # after the layers, in the numbers of units
N_UNITS = LAYERS + len(_OUTER_UNITS)

Units = Mapping[int, Iterable[int]]  # source -> numbers of the units taken from it; the newest gives the rest


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which units come from which of `n_sources` checkpoints; without `units` it is an `export` or an `average`."""

    name: str
    n_sources: int
    units: Units | None = None

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


def patterns(source_counts: Sequence[int], average_counts: Sequence[int] = ()) -> Iterator[Pattern]:
    """An export, the paper's filter, for each number of sources units in runs and in turn, and averages."""
    yield Pattern("export", 1)
    yield Pattern("filter", 2, {0: range(_EDGE_LAYERS, LAYERS - _EDGE_LAYERS)})
    for n in source_counts:
        runs = {i: range(i * N_UNITS // n, (i + 1) * N_UNITS // n) for i in range(n)}
        yield Pattern("consecutive", n, runs)
        if n < N_UNITS:
            yield Pattern("parity" if n == 2 else "in turn", n, {i: range(i, N_UNITS, n) for i in range(n)})
    for n in average_counts:
        yield Pattern("average", n)


def run_pattern(pattern: Pattern, scratch: Path) -> dict[str, Any]:
    """Measure the floor, then one cold run of `pattern` on the checkpoints in `scratch`; its output is removed.

    The floor reads one checkpoint and writes as many bytes: what a composition has to move however its layers are
    interleaved. An average of weights and moments reads all checkpoints and writes one, and so does its floor. An
    export reads the float32 masters, a third of a checkpoint, and writes as much.

    Raises:
        BenchmarkError: the run failed, or wrote other bytes than these.
    """
    sources = [scratch / checkpoint_name(i) for i in range(pattern.n_sources)]
    newest = files_of(sources[-1])
    size_bytes = sum(path.stat().st_size for path in newest)
    inputs = [path for source in sources for path in files_of(source)] if pattern.name == "average" else newest
    output_bytes = size_bytes // 3 if pattern.name == "export" else size_bytes
    seconds = floor_seconds(inputs, scratch / "floor", output_bytes, output_bytes if pattern.name == "export" else None)
    out = scratch / "out"
    make_cold(sources)
    time.sleep(1)  # what the floor left to the disk is not this run's
    try:
        cost = measure_checked(_command(pattern, sources, out), log=scratch / "log")
        written = sum(path.stat().st_size for path in files_of(out) if path.suffix in (".pt", ".safetensors"))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    if abs(written - output_bytes) > _FRAMING_SHARE * output_bytes:
        raise BenchmarkError(f"{pattern}: {written} bytes written of {output_bytes}")
    return {
        "pattern": pattern.name, "n_sources": pattern.n_sources, "seconds": cost.wall_seconds, "floor_seconds": seconds,
        "cpu_seconds": cost.cpu_seconds, "peak_rss_bytes": cost.peak_rss_bytes, "read_bytes": cost.read_bytes,
        "written_bytes": cost.written_bytes,
    }  # fmt: skip


def _command(pattern: Pattern, sources: Sequence[Path], out: Path) -> list[str]:
    if pattern.units is None:
        options = ("--optimizer", "average") if pattern.name == "average" else ("--config", str(out.parent))
        return [*OURS, "tailor", pattern.name, *map(str, sources), "-o", str(out), *options]
    recipe = out.with_name("recipe.yml")
    recipe.write_text(pattern.recipe())
    return [*OURS, "tailor", "compose", str(recipe), str(out)]


def files_of(directory: Path) -> list[Path]:
    """The files of a checkpoint, in the order of their names."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def make_tree(scratch: Path, size_gb: float, n_checkpoints: int, ranks: int) -> None:
    """Write the checkpoints in another process: a child's peak memory begins with its parent's."""
    command = [sys.executable, "-m", "benchmarks.tailor_tree", *map(str, (scratch, size_gb, n_checkpoints, ranks))]
    subprocess.run(command, check=True)
