"""The long form: `python -m tests.fuzz.run --inputs 1000000`, a table of figures, and a file for every failure."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from support.fuzz_targets import all_targets
from support.fuzzing import Failure, Tally, fuzz

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def main(arguments: Sequence[str]) -> int:
    """Fuzz; the exit code is 1 if anything but typed errors came of it."""
    options = _options(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
        chosen = [t for t in all_targets(Path(folder), GOLDEN) if not options.only or t.name in options.only]
        if not chosen:
            print(f"no target is called {', '.join(options.only)}", file=sys.stderr)
            return 2
        tallies = []
        for left, target in zip(range(len(chosen), 0, -1), chosen, strict=True):
            now = time.monotonic()  # all get the same time, and what others leave of theirs
            deadline = now + (started + 60 * options.minutes - now) / left
            tallies.append(fuzz(target, options.seed, -(-options.inputs // len(chosen)), deadline))
            print(_line(tallies[-1]), flush=True)
    seconds = time.monotonic() - started
    failures = [failure for tally in tallies for failure in tally.failures]
    inputs = sum(tally.inputs for tally in tallies)
    print(f"{inputs} inputs, seed {options.seed}, {seconds:.0f} s, {len(failures)} failures")
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


def _line(tally: Tally) -> str:
    return (
        f"{tally.target:18} {tally.inputs:9} inputs  read {tally.accepted:8}  refused {tally.refused:8} "
        f"with {len(tally.codes):3} codes  {len(tally.failures)} failures"
    )


def _keep(failure: Failure, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(char if char.isalnum() else "-" for char in f"{failure.target}-{failure.kind}")
    (folder / name).write_bytes(failure.content)
    print(f"\n{failure.target}: {failure.kind}; {len(failure.content)} bytes in {folder / name}", file=sys.stderr)
    print(f"  {failure.content[:200]!r}\n{failure.trace}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
