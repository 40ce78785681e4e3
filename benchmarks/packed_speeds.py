"""Command that measures the speed of packed experts: packing, unpacking and full merges, with raw merges beside them.

Every action is repeated in turn with all others, on one and on two threads; the least processor time and the least time
by the clock are shown. Files stay in the page cache, so that times are those of the processor. All is done with a
family of a third of the layers as well: what both sizes take tells fixed seconds and those for each byte apart.
Removing what was written is not part of the times.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.make_family import SHAPES
from benchmarks.process import BenchmarkError
from benchmarks.recipes import OPERATORS
from mergepipe import api as session
from mergepipe.options import MergeOptions
from support.disk_families import weights_digest
from support.families import FamilyPaths, family_paths, write_family

MERGED = ("linear", "ties")
SMALLER = 3
"""The smaller family has this part of the layers."""


@dataclass(frozen=True, slots=True)
class PackedFamily:
    """A family with its experts as they are and packed, in the same order; their tensor bytes."""

    base: Path
    raw: tuple[Path, ...]
    packed: tuple[Path, ...]
    raw_bytes: int


def packed_family(family: FamilyPaths, stores: Path, threads: int) -> PackedFamily:
    """Pack what is not packed yet."""
    report = session.pack(family.base, family.experts, stores, threads=threads)
    raw_bytes = sum(expert.tensor_bytes for expert in report.experts)
    return PackedFamily(family.base, family.experts, tuple(e.folder for e in report.experts), raw_bytes)


@dataclass(frozen=True, slots=True)
class Speed:
    """The least times of one action on some threads. `nbytes`: the experts' bytes it is about."""

    action: str
    threads: int
    nbytes: int
    cpu_seconds: float
    seconds: float


def measure(families: Sequence[PackedFamily], work: Path, threads: Sequence[int], repeats: int) -> list[Speed]:
    """Repeat all actions in turn, after one round that compiles or loads the loops."""
    actions: dict[tuple[str, int, int], Callable[[], Path]] = {}
    for n in threads:
        for family in families:
            actions |= _actions(family, work, n)
    least: dict[tuple[str, int, int], tuple[float, float]] = {}
    for round_number in range(repeats + 1):
        for key, action in actions.items():
            times = _times(action)
            if round_number:
                cpu_seconds, seconds = least.get(key, times)
                least[key] = min(times[0], cpu_seconds), min(times[1], seconds)
                _say(f"{key[0]} on {key[1]}: {times[0]:.2f} CPU s, {times[1]:.2f} s, load {os.getloadavg()[0]:.1f}")
    return [Speed(*key, *times) for key, times in least.items()]


def _actions(family: PackedFamily, work: Path, threads: int) -> dict[tuple[str, int, int], Callable[[], Path]]:
    """All actions with a family by name, threads and bytes; each returns what it wrote."""
    nbytes, one = family.raw_bytes, family.raw_bytes // len(family.raw)
    actions: dict[tuple[str, int, int], Callable[[], Path]] = {
        ("pack", threads, nbytes): partial(_pack, family, work / "packed", threads),
        ("unpack", threads, one): partial(_unpack, family, work / "unpacked", threads),
    }
    for operator in MERGED:
        for form, experts in (("raw", family.raw), ("packed", family.packed)):
            merge = partial(_merge, operator, family.base, experts, work, threads)
            actions[f"{operator}, {form}", threads, nbytes] = merge
    return actions


def _times(action: Callable[[], Path]) -> tuple[float, float]:
    """Processor time of all threads, and time by the clock; what was written is removed afterwards."""
    cpu, clock = time.process_time(), time.perf_counter()
    out = action()
    times = time.process_time() - cpu, time.perf_counter() - clock
    shutil.rmtree(out)
    return times


def _pack(family: PackedFamily, out: Path, threads: int) -> Path:
    session.pack(family.base, family.raw, out, threads=threads)
    return out


def _unpack(family: PackedFamily, out: Path, threads: int) -> Path:
    session.unpack(family.packed[0], out, threads=threads)
    return out


def check_unpacking(family: PackedFamily, out: Path) -> None:
    """Compare the weights of an unpacked expert with the original's.

    Raises:
        BenchmarkError: they differ.
    """
    session.unpack(family.packed[0], out)
    if weights_digest(out) != weights_digest(family.raw[0]):
        raise BenchmarkError(f"{family.packed[0]} was unpacked to other files")
    shutil.rmtree(out)


def _merge(operator: str, base: Path, experts: Sequence[Path], work: Path, threads: int) -> Path:
    recipe, out = work / "recipe.yml", work / "merged"
    recipe.write_text(OPERATORS[operator].recipe(base, experts, "bfloat16"))
    session.merge(recipe, out, options=MergeOptions(catalog=False, threads=threads))
    return out


def table(speeds: Sequence[Speed]) -> str:
    """Markdown, a row for each action with the larger family.

    Times; GB of experts for each processor second, in all and without the fixed seconds; the latter of packed merges
    also beyond the raw merge.
    """
    lines = [
        "| action | threads | CPU s | s | GB/CPU s | GB/s | fixed CPU s | GB/CPU s beyond fixed | beyond raw |",
        "|---" * 9 + "|",
    ]
    by_action = {(s.action, s.threads): _sorted_sizes(speeds, s) for s in speeds}
    for (action, threads), (small, large) in by_action.items():
        slope = _seconds_a_gb(small, large)
        raw = by_action.get((action.replace(", packed", ", raw"), threads)) if action.endswith(", packed") else None
        beyond = "" if raw is None else f"{1 / max(slope - _seconds_a_gb(*raw), 1e-9):.2f}"
        gb = large.nbytes / 1e9
        lines.append(
            f"| {action} | {threads} | {large.cpu_seconds:.2f} | {large.seconds:.2f} | {gb / large.cpu_seconds:.2f} "
            f"| {gb / large.seconds:.2f} | {large.cpu_seconds - slope * gb:.2f} | {1 / slope:.2f} | {beyond} |"
        )
    return "\n".join(lines)


def _sorted_sizes(speeds: Sequence[Speed], like: Speed) -> tuple[Speed, Speed]:
    """The same action with the smaller and the larger family."""
    same = [s for s in speeds if (s.action, s.threads) == (like.action, like.threads)]
    return min(same, key=lambda s: s.nbytes), max(same, key=lambda s: s.nbytes)


def _seconds_a_gb(small: Speed, large: Speed) -> float:
    """Processor seconds that each further GB of experts takes."""
    return max((large.cpu_seconds - small.cpu_seconds) / ((large.nbytes - small.nbytes) / 1e9), 1e-9)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a directory for the family, the stores, the outputs")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="slice", help="the shape of the family that is made")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    shape, families = SHAPES[options.shape], []
    for layers in (max(shape.layers // SMALLER, 1), shape.layers):
        root = options.work / f"family-{layers}"
        made = family_paths(root, options.experts)
        if not made.base.exists():
            made = write_family(root, replace(shape, layers=layers), options.experts, threads=2)
        families.append(packed_family(made, options.work / f"stores-{layers}", max(options.threads)))
    check_unpacking(families[-1], options.work / "unpacked")
    print(table(measure(families, options.work, options.threads, options.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
