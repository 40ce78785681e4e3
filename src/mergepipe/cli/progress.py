"""Shows how far a run is: a live bar on a terminal or in a notebook, a line every few seconds elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TextIO

from mergepipe.cli.printing import terminal_columns
from mergepipe.core.display import printable
from mergepipe.core.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from mergepipe.cli.interrupts import Interrupts
    from mergepipe.reports import Progress

WINDOW_SECONDS = 5.0
STEADY_SECONDS = 30.0
SETTLING_SECONDS = 1.0
BAR_SECONDS = 0.1
BAR_COLUMNS = 30
STANDARD_ERROR = 2
COLUMNS_WITHOUT_TERMINAL = 80
LINE_SECONDS = 5.0

Clock = Callable[[], float]
OnProgress = Callable[["Progress"], None]


@dataclass(frozen=True, slots=True)
class TimedProgress:
    """Progress with its phase's speed; `seconds_left` is None while there is no speed to tell it by."""

    phase: str
    fraction: float
    done_bytes: int
    total_bytes: int
    bytes_per_second: float
    seconds_left: float | None
    retries: int = 0

    def text(self) -> str:
        """Return the progress as a plain line."""
        amount = f"{format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}"
        return ", ".join([f"{self.phase}: {self.fraction:.0%}", amount, *self.pace()])

    def pace(self) -> list[str]:
        """Speed and time left, as far as they are known, and retries, if there were any."""
        speed = [format_rate(self.bytes_per_second)] if self.bytes_per_second > 0 else []
        time_left = [f"{format_seconds(self.seconds_left)} left"] if self.seconds_left else []
        retries = [f"{self.retries} retried"] if self.retries else []
        return [*speed, *time_left, *retries]


class Meter:
    """Measures the speed of the current phase: shown over `WINDOW_SECONDS`, extrapolated from `STEADY_SECONDS`.

    Bytes of an interrupted run that is resumed are no part of it, nor is what another phase did.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._key: tuple[str, int, int] | None = None

    def read(self, progress: Progress, now: float) -> TimedProgress:
        """Note `progress` at `now` (seconds) and return how it goes. Reads beyond the plan never show as over 100 %."""
        key = (progress.phase, progress.total_bytes, progress.earlier_bytes)
        if key != self._key or progress.done_bytes < self._samples[-1][1]:
            self._key = key
            self._samples.clear()
        self._samples.append((now, progress.done_bytes))
        while now - self._samples[0][0] > STEADY_SECONDS and len(self._samples) > 2:
            self._samples.popleft()
        done = min(progress.done_bytes, progress.total_bytes)
        fraction = done / progress.total_bytes if progress.total_bytes else 1.0
        steady = self._speed(now, STEADY_SECONDS)
        seconds_left = (progress.total_bytes - done) / steady if steady > 0 else None
        speed = self._speed(now, WINDOW_SECONDS)
        return TimedProgress(
            progress.phase, fraction, done, progress.total_bytes, speed, seconds_left, progress.retries
        )

    def _speed(self, now: float, window_seconds: float) -> float:
        """Bytes a second since the first sample of the window; 0 before `SETTLING_SECONDS` of the phase."""
        since, before_bytes = next(sample for sample in self._samples if now - sample[0] <= window_seconds)
        if since == now:  # samples further apart than the window: the last interval is all there is
            since, before_bytes = self._samples[-2] if len(self._samples) > 1 else self._samples[-1]
        elapsed = now - since
        return (self._samples[-1][1] - before_bytes) / elapsed if elapsed >= SETTLING_SECONDS else 0.0


class Display:
    """Shows nothing; others show progress while their context lasts. `update` may be called as often as one likes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, progress: Progress) -> None:
        """Take a report of progress."""


def choose_display(*, silent: bool) -> Display:
    """The display that fits standard error."""
    if silent or sys.stderr is None:
        return Display()
    if in_notebook() or (sys.stderr.isatty() and os.environ.get("TERM") != "dumb"):
        return BarDisplay(sys.stderr)
    return LineDisplay(sys.stderr)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


class LineDisplay(Display):
    """Writes one line when a phase begins or `LINE_SECONDS` have passed."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._meter = Meter()
        self._phase = ""
        self._due = 0.0

    def update(self, progress: Progress) -> None:
        """Write a line if it is time to."""
        for notice in progress.notices:
            self._write(printable(notice))
        now = self._clock()
        if now < self._due and progress.phase == self._phase:
            return
        self._phase, self._due = progress.phase, now + LINE_SECONDS
        self._write(self._meter.read(progress, now).text())

    def _write(self, line: str) -> None:
        """Write a line, if anybody takes it: no run fails for that."""
        with contextlib.suppress(OSError, ValueError):
            print(line, file=self._stream, flush=True)


class BarDisplay(Display):
    """Draws a bar in the last line of a terminal, or under a cell of a notebook, and wipes it at the end.

    A line is drawn over the one before it, with nothing but carriage returns and spaces, which notebooks know too.
    """

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._meter = Meter()
        self._due = 0.0
        self._drawn = ""

    def __enter__(self) -> Self:
        self._draw("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._draw("")

    def update(self, progress: Progress) -> None:
        """Redraw, at most every `BAR_SECONDS`. Notices stay above the bar."""
        for notice in progress.notices:
            drawn = self._drawn
            self._draw("")
            self._write(f"{printable(notice)}\n")
            self._draw(drawn)
        now = self._clock()
        if now < self._due:
            return
        self._due = now + BAR_SECONDS
        reading = self._meter.read(progress, now)
        filled = round(reading.fraction * BAR_COLUMNS)
        bar = f"[{'#' * filled}{'-' * (BAR_COLUMNS - filled)}]"
        self._draw("  ".join([f"{reading.phase:<8}", f"{bar} {reading.fraction:>4.0%}", *reading.pace()]))

    def _draw(self, line: str) -> None:
        """Draw a line, cut to the terminal's width, over the one that is there; an empty one only wipes that."""
        columns = terminal_columns(STANDARD_ERROR) or COLUMNS_WITHOUT_TERMINAL
        line = line[: columns - 1]  # in the last column a terminal may go on to the next line
        covered = min(len(self._drawn), columns - 1)
        self._write(f"\r{line:<{covered}}" + ("" if line else "\r"))
        self._drawn = line

    def _write(self, text: str) -> None:
        """Write to the terminal, if it is still there: no run fails for that."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def progress_bar(*, silent: bool = False) -> Iterator[OnProgress]:
    """Show progress in a notebook, on a terminal or as lines; give it to a call as `on_progress`."""
    with choose_display(silent=silent) as display:
        yield display.update


@contextlib.contextmanager
def progress_shown(interrupts: Interrupts, *, silent: bool) -> Iterator[OnProgress]:
    """Show progress while the context lasts; what it gives is called with each report, and is where a run can stop."""
    with progress_bar(silent=silent) as update:

        def on_progress(progress: Progress) -> None:
            interrupts.report()
            update(progress)

        yield on_progress
