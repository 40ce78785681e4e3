"""Command that runs `mergepipe` behind storage of a given speed, or with its phases timed."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.packed_merging import RateLimit, slow_storage
from mergepipe.cli import main as run_command_line
from mergepipe.planning import planner
from mergepipe.snapshots.staging import Staging

_PHASES: tuple[tuple[str, Any, str], ...] = (
    ("planning", planner.Ranking, "plan"),
    ("publish", Staging, "publish"),
    ("flush", os, "fsync"),
)


def _timed(call: Callable[..., Any], phase: str, seconds: Counter[str]) -> Callable[..., Any]:
    @wraps(call)
    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            seconds[phase] += time.perf_counter() - started  # type: ignore[assignment]

    return timed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line given after the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=math.inf, help="bytes a second of all local inputs together")
    parser.add_argument("--phases", type=Path, help="write the seconds of planning, fsync and publishing here")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    seconds: Counter[str] = Counter()
    sys.argv = ["mergepipe", *chosen.command]
    with ExitStack() as stack:
        if math.isfinite(chosen.rate):
            stack.enter_context(slow_storage(RateLimit(chosen.rate)))
        for phase, owner, name in _PHASES if chosen.phases else ():
            stack.enter_context(patch.object(owner, name, _timed(getattr(owner, name), phase, seconds)))
        try:
            run_command_line()
        finally:
            if chosen.phases:
                chosen.phases.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
