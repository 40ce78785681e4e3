"""Print as JSON how much of the package a merge and a compose meet: the modules they load, the files they enter.

Run as a program of its own: what other tests have loaded does not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

TESTS = Path(__file__).resolve().parent.parent


@cache
def met_by() -> dict[str, int]:
    """Return `modules of jobs.merge`, and the source files that a `merge` and a `compose` enter."""
    code = "import sys, mergepipe.jobs.merge; print(sum(name.startswith('mergepipe') for name in sys.modules))"
    n_modules = int(subprocess.check_output([sys.executable, "-c", code], text=True))
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS / 'surface'}"}
    found = subprocess.check_output([sys.executable, __file__], text=True, env=environment)
    return {"modules of jobs.merge": n_modules, **json.loads(found.splitlines()[-1])}


@contextmanager
def entered(files: set[str]) -> Iterator[None]:
    """Add the source files of the package whose functions are called, in any thread."""

    def note(frame: FrameType, event: str, _argument: object) -> None:
        _, _, place = frame.f_code.co_filename.partition("/mergepipe/")
        if event == "call" and place:
            files.add(place)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def n_entered(run: Callable[[str], object]) -> int:
    """Run a command twice, as the first run imports; return how many files the second run enters."""
    files: set[str] = set()
    run("first")
    with entered(files):
        run("second")
    return len(files)


def main() -> None:
    from workplace import workplace

    from support.command_line import run_command

    def succeed(*words: str) -> None:
        ran = run_command(list(words))
        assert ran.exit_code == 0, ran.err

    with tempfile.TemporaryDirectory() as folder, workplace(Path(folder)):
        merge = n_entered(lambda out: succeed("merge", "ties.yml", out))
        compose = n_entered(lambda out: succeed("tailor", "compose", "compose.yml", f"composed-{out}"))
    print(json.dumps({"merge": merge, "compose": compose}))


if __name__ == "__main__":
    main()
