"""The long form: `python -m tests.fuzz.run --inputs 1000000`, a table of figures, and a file for every failure."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from support.fuzz_targets import all_targets
from support.fuzzing import Failure, Tally, Target, fuzz, total

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LEAST_INPUTS = 200
FIRST_INPUTS = 300


def main(arguments: Sequence[str]) -> int:
    """Fuzz; the exit code is 1 if anything but typed errors came of it."""
    options = _options(arguments)
    started = time.monotonic()
    deadline = started + 60 * options.minutes
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
        chosen = [t for t in all_targets(Path(folder), GOLDEN) if not options.only or t.name in options.only]
        if not chosen:
            print(f"no target is called {', '.join(options.only)}", file=sys.stderr)
            return 2
        tallies = _fuzz_all(chosen, options.inputs, options.seed, deadline)
    for tally in tallies:
        print(_line(tally))
    seconds = time.monotonic() - started
    failures = [failure for tally in tallies for failure in tally.failures]
    print(f"{total(tallies)} inputs, seed {options.seed}, {seconds:.0f} s, {len(failures)} failures")
    for failure in failures:
        _keep(failure, Path(options.failures))
    return 1 if failures else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after this time")
    parser.add_argument("--only", nargs="*", default=[], metavar="TARGET")
    place = Path(tempfile.gettempdir()) / "mergepipe-fuzz"
    parser.add_argument("--failures", default=str(place), help="where inputs that fail are kept")
    return parser.parse_args(arguments)


def _fast_folder() -> str | None:
    """Memory, where there is a place for files in it: some targets write each input to a file."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _fuzz_all(targets: Sequence[Target], n_inputs: int, seed: int, deadline: float) -> list[Tally]:
    """A first round tells how fast each is; the rest is dealt so that all take the same time."""
    tallies = [fuzz(target, seed, FIRST_INPUTS, deadline) for target in targets]
    rates = [tally.inputs / max(tally.seconds, 1e-6) for tally in tallies]
    rest = max(0, n_inputs - total(tallies))
    for index, target in enumerate(targets):
        share = max(LEAST_INPUTS, math.ceil(rest * rates[index] / sum(rates))) if rest else 0
        more = fuzz(target, seed + 1, share, deadline)
        tallies[index] = tallies[index].plus(more)
        print(_line(tallies[index]), file=sys.stderr, flush=True)
    return tallies


def _line(tally: Tally) -> str:
    rate = tally.inputs / max(tally.seconds, 1e-6)
    return (
        f"{tally.target:18} {tally.inputs:9} inputs {rate:8.0f}/s  read {tally.accepted:8}  refused {tally.refused:8} "
        f"with {len(tally.codes):3} codes  grew {tally.grown_bytes / 2**20:6.1f} MiB  {len(tally.failures)} failures"
    )


def _keep(failure: Failure, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(char if char.isalnum() else "-" for char in f"{failure.target}-{failure.kind}")
    (folder / name).write_bytes(failure.content)
    print(f"\n{failure.target}: {failure.kind}; {len(failure.content)} bytes in {folder / name}", file=sys.stderr)
    print(f"  {failure.content[:200]!r}\n{failure.trace}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
