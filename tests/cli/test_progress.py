"""How progress is measured and shown."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.cli.progress import (
    LINE_SECONDS,
    BarDisplay,
    LineDisplay,
    Meter,
    NoDisplay,
    choose_display,
)
from mergepipe.reports import Progress


class FakeClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_meter__takes_the_speed_from_the_last_seconds() -> None:
    meter = Meter()
    for second in range(10):  # nothing moves at first
        meter.read(Progress("merge", 0, 100), float(second))
    for second in range(10, 20):
        reading = meter.read(Progress("merge", 4 * (second - 9), 100), float(second))
    assert reading.bytes_per_second == pytest.approx(4.0)
    assert reading.seconds_left == pytest.approx(60 / 4)
    assert reading.fraction == pytest.approx(0.4)


def test_meter__knows_no_time_left_without_a_speed() -> None:
    reading = Meter().read(Progress("merge", 0, 100), 1.0)
    assert reading.seconds_left is None
    assert reading.text() == "merge: 0%, 0 B of 100 B"


@given(
    steps=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1000)), min_size=1, max_size=50),
    total=st.integers(0, 5000),
)
def test_meter__fractions_stay_within_the_whole(steps: list[tuple[float, int]], total: int) -> None:
    meter, now, done = Meter(), 0.0, 0
    for seconds, nbytes in steps:
        now, done = now + seconds, done + nbytes
        reading = meter.read(Progress("merge", done, total), now)
        assert 0.0 <= reading.fraction <= 1.0
        assert reading.done_bytes <= total
        assert reading.seconds_left is None or reading.seconds_left >= 0.0


def test_line_display__writes_a_line_every_few_seconds_and_at_every_phase() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with LineDisplay(stream, clock) as display:
        for tick in range(101):
            clock.now = 100 + LINE_SECONDS * tick / 50
            display.update(Progress("merge", tick * 10**9, 200 * 10**9))
        display.update(Progress("publish", 200 * 10**9, 200 * 10**9))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "merge: 0%, 0 B of 200 GB"
    assert lines[1] == "merge: 25%, 50.0 GB of 200 GB, 10.0 GB/s, 15.0 s left"
    assert lines[2].startswith("merge: 50%, 100 GB of 200 GB, 10.0 GB/s")
    assert lines[3].startswith("publish: 100%, 200 GB of 200 GB")
    assert len(lines) == 4


def test_bar_display__draws_phase_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    clock = FakeClock()
    with BarDisplay(clock) as display:
        for second in range(4):
            clock.now = 100.0 + second
            display.update(Progress("merge", second * 10**9, 4 * 10**9))
    drawn = terminal.getvalue()
    assert all(part in drawn for part in ("merge", "75 %", "1.00 GB/s", "1.0 s left"))


def test_choose_display__fits_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(choose_display(silent=False), LineDisplay)
    assert type(choose_display(silent=True)) is NoDisplay
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    assert isinstance(choose_display(silent=False), BarDisplay)
    monkeypatch.setattr(sys, "stderr", None)
    assert type(choose_display(silent=False)) is NoDisplay
