"""Command that runs `mergepipe` behind storage of a given speed, or with its phases timed."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mergepipe.cli import main as run_command_line
from mergepipe.jobs import plan
from mergepipe.snapshots.staging import Staging
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalFile, LocalStore
from mergepipe.storage.location import Location

_PHASES: tuple[tuple[str, Any, str], ...] = (
    ("planning", plan, "make_plan"),
    ("publish", Staging, "publish"),
    ("flush", os, "fsync"),
)


class RateLimit:
    """A storage device of one speed: requests of all threads pass it one after the other, without any latency."""

    def __init__(self, bytes_a_second: float) -> None:
        self._bytes_a_second = bytes_a_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.passed_bytes = 0

    def reserve(self, nbytes: int, now: float) -> float:
        """When a request that is made `now` is through."""
        with self._lock:
            self.passed_bytes += nbytes
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_a_second
            return self._free_at


@contextmanager
def slow_storage(limit: RateLimit) -> Iterator[None]:
    """All that this process reads of local files comes no faster than `limit` allows; reading still happens."""
    read_into, read_metadata = LocalFile.read_into, LocalStore.read_metadata

    def limited_read(file: LocalFile, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        through = limit.reserve(len(buffer), time.perf_counter())
        done = read_into(file, offset, buffer, purpose)
        _sleep_until(through)
        return done

    def limited_metadata(store: LocalStore, location: Location, offset: int, nbytes: int) -> bytes:
        found = read_metadata(store, location, offset, nbytes)
        _sleep_until(limit.reserve(len(found), time.perf_counter()))
        return found

    with ExitStack() as stack:
        stack.enter_context(patch.object(LocalFile, "read_into", limited_read))
        stack.enter_context(patch.object(LocalStore, "read_metadata", limited_metadata))
        yield


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


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
