"""A plugin of pytest that lists the processor seconds of each test file, those of the processes that it started apart.

    python -m pytest -n 2 -p tools.processor_seconds

Unlike times by the clock they hardly depend on what else the machine does. Collecting tests is not counted.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

import pytest

OWN = "own processor seconds"
CHILDREN = "processor seconds of children"
MOST_FILES = 40


@dataclass(slots=True)
class Seconds:
    """Processor seconds of this process, and of the children that it has waited for."""

    own: float = 0.0
    children: float = 0.0
    tests: int = 0

    @classmethod
    def now(cls) -> Seconds:
        times = os.times()
        return cls(times.user + times.system, times.children_user + times.children_system)

    @property
    def total(self) -> float:
        return self.own + self.children


_began = pytest.StashKey[Seconds]()
_seconds_of_files: dict[str, Seconds] = defaultdict(Seconds)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin to count, fixtures included."""
    item.stash[_began] = Seconds.now()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Give the last report of a test what it took; workers of pytest-xdist send it on."""
    if call.when == "teardown":
        began = item.stash[_began]
        ended = Seconds.now()
        item.user_properties.append((OWN, ended.own - began.own))
        item.user_properties.append((CHILDREN, ended.children - began.children))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what the tests of a file took."""
    properties = dict(report.user_properties)
    own = properties.get(OWN)
    children = properties.get(CHILDREN)
    if report.when == "teardown" and isinstance(own, float) and isinstance(children, float):
        seconds = _seconds_of_files[report.nodeid.partition("::")[0]]
        seconds.own += own
        seconds.children += children
        seconds.tests += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the files that took most."""
    terminalreporter.section("processor seconds")
    terminalreporter.line("   own  children  tests")
    files = sorted(_seconds_of_files.items(), key=lambda entry: -entry[1].total)
    for name, seconds in files[:MOST_FILES]:
        terminalreporter.line(f"{seconds.own:6.1f}  {seconds.children:8.1f}  {seconds.tests:5}  {name}")
    own = sum(seconds.own for seconds in _seconds_of_files.values())
    children = sum(seconds.children for seconds in _seconds_of_files.values())
    terminalreporter.line(f"{own:6.1f}  {children:8.1f}  of all tests: {own + children:.1f}")
