"""When a signal interrupts and when it waits; a merge that is told to stop leaves nothing, whenever it is told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import termios
import threading
import time
from pathlib import Path

import pytest

import mergepipe
from mergepipe.cli.interrupts import Interrupts
from support.command_line import SIGNAL_AT_EVENT, Ran, Workplace, file_bytes, finish, make_workplace, start_python

# Says that it is about to begin, and begins.
SAY_AND_RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mergepipe.cli import main
print("now", flush=True)
sys.exit(main(sys.argv[1:]))
"""

# The fast form stops at one import of each kind and at each kind of file; the slow one at the others too.
BEFORE_PUBLISHING = [
    pytest.param(signal.SIGINT, "import", "click", marks=pytest.mark.slow),
    (signal.SIGINT, "import", "mergepipe.cli.app"),
    pytest.param(signal.SIGINT, "import", "mergepipe.runs.progress", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, "import", "mergepipe.recipes.recipe_files", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, "import", "numpy", marks=pytest.mark.slow),
    (signal.SIGINT, "import", "mergepipe.engine.pipeline"),
    pytest.param(signal.SIGINT, "open", "recipe.yml", marks=pytest.mark.slow),
    (signal.SIGINT, "open", "base/model.safetensors"),
    pytest.param(signal.SIGINT, "open", "expert-2/model.safetensors", marks=pytest.mark.slow),
    (signal.SIGINT, "os.mkdir", ".out.mergepipe-"),
    pytest.param(signal.SIGINT, "open", ".out.mergepipe-", marks=pytest.mark.slow),  # so do other tests of this file
    (signal.SIGINT, "open", "/model.safetensors"),
    (signal.SIGTERM, "import", "numpy"),
    (signal.SIGHUP, "open", ".out.mergepipe-"),
    pytest.param(signal.SIGHUP, "import", "numpy", marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, "open", ".out.mergepipe-", marks=pytest.mark.slow),
]
# The fast form sends each signal at one time; the slow one both at every time.
_TIMES, _NUMBERS = (0.01, 0.1, 0.3, 0.5, 0.7, 0.9), (signal.SIGINT, signal.SIGTERM)
_FAST_MOMENTS = ((0.1, signal.SIGTERM), (0.5, signal.SIGTERM), (0.7, signal.SIGINT))
MOMENTS = [
    pytest.param(number, seconds, marks=() if (seconds, number) in _FAST_MOMENTS else pytest.mark.slow)
    for seconds in _TIMES
    for number in _NUMBERS
]

UNPUBLISHED = "interrupted: nothing was published"
FROM_THE_BEGINNING = "the same command starts from the beginning"


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    workplace = make_workplace(tmp_path)
    workplace.write_recipe("ties")
    return workplace


def stop_at(work: Workplace, number: signal.Signals, event: str, about: str, *options: str) -> Ran:
    """Merge, and let the process get a signal at the event."""
    return finish(start_python(SIGNAL_AT_EVENT, int(number), event, about, "merge", work.recipe, work.out, *options))


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "event", "about"), BEFORE_PUBLISHING)
def test_merge__stopped_before_it_is_done_it_leaves_nothing(
    work: Workplace, number: signal.Signals, event: str, about: str
) -> None:
    before = work.names()
    ran = stop_at(work, number, event, about, "--quiet")
    assert (ran.exit_code, ran.out) == (128 + number, "sent\n")
    (line,) = ran.error_lines  # what the same command does is said once the run has begun
    assert line in (UNPUBLISHED, f"{UNPUBLISHED}; {FROM_THE_BEGINNING}")
    assert work.names() == before


@pytest.mark.thorough
def test_merge__stopped_with_json_it_says_so_as_json(work: Workplace) -> None:
    ran = stop_at(work, signal.SIGINT, "open", ".out.mergepipe-", "--json")
    error = json.loads(ran.out.splitlines()[0])["error"]
    assert (ran.exit_code, error["code"], error["exit_code"]) == (130, "run.interrupted", 130)


@pytest.mark.thorough
def test_merge__stopped_while_replacing_the_old_snapshot_stays(work: Workplace) -> None:
    mergepipe.merge(work.recipe, work.out)
    before, names = file_bytes(work.out), work.names()
    work.write_recipe("linear")
    ran = stop_at(work, signal.SIGINT, "open", ".out.mergepipe-", "--quiet", "--force")
    assert ran.exit_code == 130
    assert file_bytes(work.out) == before
    assert work.names() == names


@pytest.mark.thorough
def test_merge__stopped_when_all_is_written_it_is_published_whole(work: Workplace) -> None:
    """The last moment to stop is before the manifest: from there on the run goes to its end, and says so."""
    ran = stop_at(work, signal.SIGINT, "open", "/mergepipe.json", "--quiet")
    assert (ran.exit_code, ran.out, ran.err) == (0, "sent\n", "")
    mergepipe.merge(work.recipe, work.root / "other")
    assert (work.out / "model.safetensors").read_bytes() == (work.root / "other" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("number", "seconds"), MOMENTS)
def test_merge__stopped_at_any_time_it_is_there_whole_or_not_at_all(
    work: Workplace, number: signal.Signals, seconds: float
) -> None:
    before = work.names()
    process = start_python(SAY_AND_RUN, "merge", work.recipe, work.out, "--quiet")
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    time.sleep(seconds)
    process.send_signal(number)
    ran = finish(process)
    published, kept = {"out"} & work.names(), {".out.mergepipe-staging"} & work.names()
    assert work.names() == before | published | kept
    if published:
        assert ran.exit_code in (0, 128 + number, -number)
        assert (work.out / "mergepipe.json").is_file()
        assert not kept
    else:  # what was durable by then, which depends on the machine, is kept and told
        resumed = r"(\d+% of out is durable: the same command resumes.*)"
        told = rf"{UNPUBLISHED}(?:; (?:{FROM_THE_BEGINNING}|{resumed}))?"
        (line,) = ran.error_lines
        match = re.fullmatch(told, line)
        assert match is not None
        assert (ran.exit_code, bool(match[1])) == (128 + number, bool(kept))


# Runs the command line and, if asked to, sends Ctrl-C to itself when the first part of the output is durable.
INTERRUPT_AT_RECORD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mergepipe.cli import main
from mergepipe.runs import progress
from mergepipe.snapshots import work_log as work_log
work_log.UNIT_BYTES = 10_000
note = progress.MergeProgress.note
def noted(*arguments):
    note(*arguments)
    if sys.argv[1] == "stops":
        os.kill(os.getpid(), signal.SIGINT)
progress.MergeProgress.note = noted
sys.exit(main(sys.argv[2:]))
"""


def run_on_terminal(work: Workplace, how: str) -> tuple[int, str]:
    """Merge with a terminal of 80 columns behind all streams; return the exit code and what it showed."""
    terminal, stream = os.openpty()
    termios.tcsetwinsize(stream, (40, 80))
    process = start_python(
        INTERRUPT_AT_RECORD, how, "merge", work.recipe, work.out, "--shard-size", "30kB",
        stdin=stream, stdout=stream, stderr=stream,
    )  # fmt: skip
    os.close(stream)
    shown = b""
    with contextlib.suppress(OSError):  # how the system ends a terminal that nothing is behind
        while chunk := os.read(terminal, 1 << 16):
            shown += chunk
    os.close(terminal)
    return process.wait(timeout=120), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


@pytest.mark.thorough
def test_merge__stopped_on_a_terminal_says_what_is_durable_and_resumes_there(work: Workplace) -> None:
    exit_code, shown = run_on_terminal(work, "stops")
    told = re.search(r"interrupted: nothing was published; (\d+)% of out is durable: the same command resumes", shown)
    assert told is not None
    assert (exit_code, int(told[1]) > 0) == (130, True)
    exit_code, shown = run_on_terminal(work, "goes on")
    assert exit_code == 0
    assert shown.index("start") < shown.index(f"resuming at {told[1]}%") < shown.index("operator")
    assert f"resumed an interrupted run at {told[1]}%" in " ".join(shown.split())
    assert mergepipe.verify(work.out).is_sound


def test_interrupts__after_a_report_a_signal_waits_for_the_next_and_a_second_does_not() -> None:
    with Interrupts() as interrupts:
        interrupts.report()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.report()
    assert interrupts.exit_code == 143
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


def test_interrupts__one_in_a_callback_of_python_is_not_printed_and_comes_back_at_the_next_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Dropped:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with Interrupts() as interrupts:
        Dropped()
        with pytest.raises(KeyboardInterrupt):
            interrupts.report()
    assert capsys.readouterr().err == ""


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
