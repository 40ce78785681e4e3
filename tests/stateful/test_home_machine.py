"""A home under random commands, crashes among them, always agrees with a dict of what was asked for."""

from __future__ import annotations

import pytest
from home_machine import HomeMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

CHECKS = list(HealthCheck)


def test_home__agrees_with_its_model() -> None:
    short = settings(
        max_examples=3, stateful_step_count=10, deadline=None, suppress_health_check=CHECKS, database=None,
        derandomize=True,
    )  # fmt: skip
    run_state_machine_as_test(HomeMachine, settings=short)


@pytest.mark.slow
def test_home__agrees_with_its_model_over_long_histories() -> None:
    long = settings(
        max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS, database=None
    )  # fmt: skip
    run_state_machine_as_test(HomeMachine, settings=long)
