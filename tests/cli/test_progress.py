"""How progress is measured and shown."""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.cli.progress import LINE_SECONDS, BarDisplay, Display, LineDisplay, Meter, choose_display
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
    assert reading.seconds_left == pytest.approx(60 / (40 / 19))  # from the whole phase
    assert reading.fraction == pytest.approx(0.4)


def test_meter__measures_each_phase_by_itself() -> None:
    meter = Meter()
    for second in range(20):
        meter.read(Progress("merge", 1000 * second, 20_000), float(second))
    assert meter.read(Progress("publish", 19_000, 20_000), 20.0).pace() == []
    for second in range(21, 24):
        reading = meter.read(Progress("publish", 19_000 + 10 * (second - 20), 20_000), float(second))
    assert reading.bytes_per_second == pytest.approx(10.0)
    assert meter.read(Progress("publish", 0, 20_000), 25.0).pace() == []  # a sweep's next run begins at nothing


def test_meter__leaves_out_what_an_interrupted_run_did() -> None:
    meter = Meter()
    meter.read(Progress("merge", 0, 10_000), 0.0)
    for second in range(1, 4):
        reading = meter.read(Progress("merge", 9000 + 100 * second, 10_000, (), 9000), float(second))
    assert reading.bytes_per_second == pytest.approx(100.0)
    assert reading.seconds_left == pytest.approx(7.0)


def test_meter__time_left_does_not_jump_with_bursts() -> None:
    meter, total, lefts = Meter(), 10**6, []
    for tick in range(900):  # half of each four seconds nothing moves
        done = 2000 * (tick // 40) + 100 * min(tick % 40, 20)
        reading = meter.read(Progress("merge", done, total), tick / 10)
        if tick > 300 and reading.seconds_left is not None:
            lefts.append(reading.seconds_left)
    assert all(abs(after - before) < 0.02 * before for before, after in pairwise(lefts))


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


def test_line_display__tells_retries_once_there_are_any() -> None:
    stream = io.StringIO()
    with LineDisplay(stream, FakeClock()) as display:
        display.update(Progress("merge", 10, 20))
        display.update(Progress("publish", 10, 20, retries=3))
    assert [line.endswith(", 3 retried") for line in stream.getvalue().splitlines()] == [False, True]


def test_bar_display__draws_phase_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setenv("COLUMNS", "120")
    clock = FakeClock()
    with BarDisplay(terminal, clock) as display:
        for second in range(4):
            clock.now = 100.0 + second
            display.update(Progress("merge", second * 10**9, 4 * 10**9))
    drawn = terminal.getvalue()
    assert all(part in drawn for part in ("merge", "75%", "1.00 GB/s", "1.0 s left"))


def screen_of(written: str) -> list[str]:
    """Return the lines that a terminal shows of what was written to it."""
    lines = [""]
    column = 0
    for character in written:
        if character == "\n":
            lines.append("")
            column = 0
        elif character == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_bar_display__is_one_line_that_fits_and_is_wiped_at_the_end(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, clock = FakeTerminal(), FakeClock()
    monkeypatch.setenv("COLUMNS", str(columns))
    with BarDisplay(terminal, clock) as display:
        for second in range(4):
            clock.now = 100.0 + second
            notices = ("a notice",) if second == 2 else ()
            display.update(Progress("merge", second * 10**9, 4 * 10**9, notices))
            lines = screen_of(terminal.getvalue())
            assert lines[:-1] == (["a notice"] if second >= 2 else [])
            assert lines[-1].startswith("merge     [")
            assert len(lines[-1]) < columns
        display.update(Progress("publish", 4 * 10**9, 4 * 10**9))
    assert screen_of(terminal.getvalue()) == ["a notice", ""]
    assert terminal.getvalue().endswith("\r")


def test_bar_display__ignores_a_terminal_that_is_gone() -> None:
    terminal = FakeTerminal()
    with BarDisplay(terminal, FakeClock()) as display:
        terminal.close()
        display.update(Progress("merge", 1, 2, ("a notice",)))


def test_choose_display__fits_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(choose_display(silent=False), LineDisplay)
    assert type(choose_display(silent=True)) is Display
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(choose_display(silent=False), BarDisplay)
    monkeypatch.setattr(sys, "stderr", None)
    assert type(choose_display(silent=False)) is Display


def test_choose_display__on_a_dumb_terminal_writes_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_display(silent=False), LineDisplay)


def test_choose_display__of_a_notebook_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = ModuleType("IPython")
    notebook.get_ipython = lambda: SimpleNamespace(kernel=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(choose_display(silent=False), BarDisplay)
