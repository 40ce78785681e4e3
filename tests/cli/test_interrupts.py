"""When a signal interrupts, and when it waits."""

from __future__ import annotations

import signal
import threading

import pytest

from mergepipe.cli import Interrupts


def test_interrupts__a_signal_interrupts_at_once_before_the_first_report() -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupts.exit_code == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_interrupts__exit_codes_tell_the_signal(number: signal.Signals) -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert interrupts.exit_code == 128 + number


def test_interrupts__after_a_report_a_signal_waits_for_the_next() -> None:
    with Interrupts() as interrupts:
        interrupts.report()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.report()
    assert interrupts.exit_code == 143


def test_interrupts__a_second_signal_does_not_wait() -> None:
    with Interrupts() as interrupts:
        interrupts.report()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert interrupts.exit_code == 130


def test_interrupts__cleaning_up_is_not_interrupted_again() -> None:
    cleaned = []
    with Interrupts():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)
    assert cleaned == [True]


def test_interrupts__one_that_foreign_code_swallowed_comes_back_at_the_next_report() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.report()


def test_interrupts__signals_ignored_from_outside_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            interrupts.report()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_interrupts__handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_interrupts__outside_the_main_thread_nothing_is_handled() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
