"""Command that measures the speed of packed experts: packing, unpacking and full merges, with raw merges beside them.

Every action is repeated in turn with all others, on one and on two threads; the least processor time and the least time
by the clock are shown. Files stay in the page cache, so that times are those of the processor.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.fidelity_points import OPERATORS
from benchmarks.packed_merging import MADE, PackedFamily, PackedMergingError, packed_family, weights_digest
from mergepipe import api as session
from mergepipe.options import MergeOptions
from support.families import family_paths, write_family

MERGED = ("linear", "ties")


@dataclass(frozen=True, slots=True)
class Speed:
    """The least times of one action on some threads. `nbytes`: the experts' bytes it is about."""

    action: str
    threads: int
    nbytes: int
    cpu_seconds: float
    seconds: float


def measure(family: PackedFamily, work: Path, threads: Sequence[int], repeats: int) -> list[Speed]:
    """Repeat all actions in turn, after one round that compiles or loads the loops."""
    nbytes, one = family.raw_bytes, family.raw_bytes // len(family.raw)
    actions: dict[tuple[str, int, int], Callable[[], None]] = {}
    for n in threads:
        actions["pack", n, nbytes] = partial(_pack, family, work / "packed", n)
        actions["unpack", n, one] = partial(_unpack, family, work / "unpacked", n)
        for operator in MERGED:
            for form, experts in (("raw", family.raw), ("packed", family.packed)):
                actions[f"{operator}, {form}", n, nbytes] = partial(_merge, operator, family.base, experts, work, n)
    least: dict[tuple[str, int, int], tuple[float, float]] = {}
    for round_number in range(repeats + 1):
        for key, action in actions.items():
            times = _times(action)
            if round_number:
                cpu_seconds, seconds = least.get(key, times)
                least[key] = min(times[0], cpu_seconds), min(times[1], seconds)
                _say(f"{key[0]} on {key[1]}: {times[0]:.2f} CPU s, {times[1]:.2f} s, load {os.getloadavg()[0]:.1f}")
    return [Speed(*key, *times) for key, times in least.items()]


def _times(action: Callable[[], None]) -> tuple[float, float]:
    """Processor time of all threads, and time by the clock."""
    cpu, clock = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - clock


def _pack(family: PackedFamily, out: Path, threads: int) -> None:
    session.pack(family.base, family.raw, out, threads=threads)
    shutil.rmtree(out)


def _unpack(family: PackedFamily, out: Path, threads: int) -> None:
    session.unpack(family.packed[0], out, threads=threads)
    shutil.rmtree(out)


def check_unpacking(family: PackedFamily, out: Path) -> None:
    """Compare the weights of an unpacked expert with the original's.

    Raises:
        PackedMergingError: they differ.
    """
    session.unpack(family.packed[0], out)
    if weights_digest(out) != weights_digest(family.raw[0]):
        raise PackedMergingError(f"{family.packed[0]} was unpacked to other files")
    shutil.rmtree(out)


def _merge(operator: str, base: Path, experts: Sequence[Path], work: Path, threads: int) -> None:
    recipe, out = work / "recipe.yml", work / "merged"
    recipe.write_text(OPERATORS[operator].recipe(base, experts, "bfloat16"))
    session.merge(recipe, out, options=MergeOptions(catalog=False, reuse=False, threads=threads))
    shutil.rmtree(out)


def table(speeds: Sequence[Speed]) -> str:
    """Markdown: times, and GB of experts for each processor second; of packed merges also beyond the raw merge."""
    lines = [
        "| action | threads | CPU s | s | GB/CPU s | GB/s | beyond raw, GB/CPU s |",
        "|---" * 7 + "|",
    ]
    raw = {(s.action.removesuffix(", raw"), s.threads): s.cpu_seconds for s in speeds if s.action.endswith(", raw")}
    for s in speeds:
        beyond = raw.get((s.action.removesuffix(", packed"), s.threads)) if s.action.endswith(", packed") else None
        rate = "" if beyond is None else f"{s.nbytes / 1e9 / max(s.cpu_seconds - beyond, 1e-9):.2f}"
        gb = s.nbytes / 1e9
        lines.append(
            f"| {s.action} | {s.threads} | {s.cpu_seconds:.2f} | {s.seconds:.2f} | {gb / s.cpu_seconds:.2f} "
            f"| {gb / s.seconds:.2f} | {rate} |"
        )
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a directory for the family, the stores, the outputs")
    parser.add_argument("--shape", choices=sorted(MADE), default="slice", help="the shape of the family that is made")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    made = family_paths(options.work / "family", options.experts)
    if not made.base.exists():
        made = write_family(options.work / "family", MADE[options.shape], options.experts, threads=2)
    family = packed_family(made, options.work / "stores", max(options.threads))
    check_unpacking(family, options.work / "unpacked")
    print(table(measure(family, options.work, options.threads, options.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
