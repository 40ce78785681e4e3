"""For all tests: signals as in a terminal, an own home, and Hypothesis profiles.

Profiles: `dev`; `ci`, the same examples every time, where CI is set; others by HYPOTHESIS_PROFILE.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_RELAXED, database=None)
settings.register_profile(
    "ci", max_examples=60, deadline=None, suppress_health_check=_RELAXED, database=None, derandomize=True
)
settings.register_profile("nightly", max_examples=2000, deadline=None, suppress_health_check=_RELAXED, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_configure() -> None:
    """Take signals as in a terminal: jobs in the background, or under nohup, inherit that they are ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or leaves anything in the user's catalog."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("MERGEPIPE_HOME", str(home))
    return home
