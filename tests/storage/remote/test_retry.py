"""What follows a failed request, decided without making any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import MergePipeError
from mergepipe.storage.location import Location
from mergepipe.storage.remote.retry import (
    TRANSIENT_STATUSES,
    Failure,
    FailureKind,
    RetryPolicy,
    error_of,
    wait_before_retry,
)

UNAVAILABLE = Failure(FailureKind.STATUS, "503 Service Unavailable", 503)
WHERE = Location.parse("s3://bucket/model/x.safetensors")
POLICY = RetryPolicy(most_attempts=5, most_seconds=100, first_wait_seconds=1, longest_wait_seconds=4)


def waits(failure: Failure, fraction: float = 0.0, *, has_answered: bool = True) -> list[float]:
    """The waits between attempts that all fail alike."""
    seconds: list[float] = []
    while True:
        wait = wait_before_retry(
            POLICY,
            failure,
            n_failures=len(seconds) + 1,
            elapsed_seconds=sum(seconds),
            has_answered=has_answered,
            random_fraction=fraction,
        )
        if wait is None:
            return seconds
        seconds.append(wait)


def test_wait__doubles_up_to_a_bound_and_ends_with_the_attempts() -> None:
    assert waits(UNAVAILABLE, 0.0) == [0.5, 1, 2, 2]
    assert waits(UNAVAILABLE, 0.5) == [0.75, 1.5, 3, 3]


def test_wait__is_never_shorter_than_the_server_asks() -> None:
    assert waits(Failure(FailureKind.STATUS, "429", 429, 30)) == [30, 30, 30]  # a fourth would end after 100 s
    assert waits(Failure(FailureKind.STATUS, "503", 503, 101)) == []


def test_wait__gives_up_a_host_that_never_answered_early() -> None:
    unreachable = Failure(FailureKind.UNREACHABLE, "no connection")
    assert len(waits(unreachable, has_answered=False)) == 2
    assert len(waits(unreachable)) == len(waits(UNAVAILABLE, has_answered=False)) == 4


@given(st.sampled_from(FailureKind), st.integers(100, 599))
def test_wait__comes_only_before_what_may_succeed_later(kind: FailureKind, status: int) -> None:
    failure = Failure(kind, "x", status)
    is_status = kind is FailureKind.STATUS
    may_succeed = status in TRANSIENT_STATUSES if is_status else kind.name in ("UNREACHABLE", "CUT", "STALLED")
    assert bool(waits(failure)) == may_succeed


@given(st.sampled_from(FailureKind), st.integers(100, 599), st.integers(1, 9), st.floats(0, 300))
def test_error_of__names_the_location_and_a_code(kind: FailureKind, status: int, n: int, seconds: float) -> None:
    error = error_of(Failure(kind, "what happened", status), WHERE, n, seconds)
    assert isinstance(error, MergePipeError)
    assert str(error).startswith(f"{WHERE}: ")
    assert "what happened" in str(error)
    assert error.code.partition(".")[0] in ("storage", "input")
    assert "\n" not in str(error)


def test_error_of__tells_how_long_it_was_tried() -> None:
    failure = Failure(FailureKind.STATUS, "503 Service Unavailable", 503, 120)
    assert str(error_of(failure, WHERE, 3, 61.4)) == (
        f"{WHERE}: its server answered 503 Service Unavailable, and asks to wait 120 s (3 attempts in 61 s); "
        "run again later, or with fewer connections"
    )


@pytest.mark.parametrize("changes", [{"most_attempts": 0}, {"first_wait_seconds": 0}, {"most_first_contacts": 0}])
def test_policy__is_checked(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not a policy"):
        RetryPolicy(**changes)
