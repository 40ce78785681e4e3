"""Shows how far a run is: a live bar on a terminal, a line every few seconds elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from mergepipe.cli.render.units import format_bytes, format_rate, format_seconds
from mergepipe.core.escaping import printable

if TYPE_CHECKING:
    from mergepipe.cli.guard import Session
    from mergepipe.reports import Progress

WINDOW_SECONDS = 5.0
BAR_SECONDS = 0.1
LINE_SECONDS = 5.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress with its speed over the last seconds; `seconds_left` is None while there is no speed to tell it by."""

    phase: str
    fraction: float
    done_bytes: int
    total_bytes: int
    bytes_per_second: float
    seconds_left: float | None

    def text(self) -> str:
        """As a plain line."""
        amount = f"{format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}"
        return ", ".join([f"{self.phase}: {self.fraction:.0%}", amount, *self.pace()])

    def pace(self) -> list[str]:
        """Speed and time left, as far as they are known."""
        speed = [format_rate(self.bytes_per_second)] if self.bytes_per_second > 0 else []
        left = [f"{format_seconds(self.seconds_left)} left"] if self.seconds_left else []
        return [*speed, *left]


class Meter:
    """Takes the speed of a run from its last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def read(self, progress: Progress, now: float) -> Reading:
        """Note `progress` at `now` (seconds) and return how it goes. Reads beyond the plan never show as over 100 %."""
        self._samples.append((now, progress.done_bytes))
        while now - self._samples[0][0] > WINDOW_SECONDS and len(self._samples) > 2:
            self._samples.popleft()
        since, before_bytes = self._samples[0]
        speed = (progress.done_bytes - before_bytes) / (now - since) if now > since else 0.0
        done = min(progress.done_bytes, progress.total_bytes)
        fraction = done / progress.total_bytes if progress.total_bytes else 1.0
        left = (progress.total_bytes - done) / speed if speed > 0 else None
        return Reading(progress.phase, fraction, done, progress.total_bytes, speed, left)


class Display(Protocol):
    """Shows progress while its context lasts; `update` may be called as often as one likes."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, progress: Progress) -> None: ...


def choose_display(*, silent: bool) -> Display:
    """The display that fits standard error."""
    if silent or sys.stderr is None:
        return NoDisplay()
    if sys.stderr.isatty():
        return BarDisplay()
    return LineDisplay(sys.stderr)


class NoDisplay:
    """Shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, progress: Progress) -> None:
        """Do nothing."""


class LineDisplay(NoDisplay):
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


class BarDisplay(NoDisplay):
    """Draws a bar on the terminal behind standard error, and wipes it at the end."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        columns = ("{task.description:<8}", BarColumn(), TextColumn("{task.percentage:>3.0f} %  {task.fields[pace]}"))
        self._bars = Bars(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        self._task = self._bars.add_task("start", total=1.0, pace="")
        self._clock = clock
        self._meter = Meter()
        self._due = 0.0

    def __enter__(self) -> Display:
        with contextlib.suppress(OSError):  # a terminal that is gone
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._bars.stop()

    def update(self, progress: Progress) -> None:
        """Redraw, at most every `BAR_SECONDS`."""
        with contextlib.suppress(OSError):
            self._draw(progress)

    def _draw(self, progress: Progress) -> None:
        for notice in progress.notices:
            self._bars.console.print(printable(notice), markup=False, highlight=False)
        now = self._clock()
        if now < self._due:
            return
        self._due = now + BAR_SECONDS
        reading = self._meter.read(progress, now)
        pace = "  ".join(reading.pace())
        self._bars.update(self._task, description=reading.phase, completed=reading.fraction, pace=pace, refresh=True)


@contextlib.contextmanager
def progress_shown(session: Session, *, silent: bool) -> Iterator[Callable[[Progress], None]]:
    """Show progress while the context lasts; what it gives is called with each report, and is where a run can stop."""
    with choose_display(silent=silent) as display:

        def on_progress(progress: Progress) -> None:
            session.interrupts.report()
            display.update(progress)

        yield on_progress
