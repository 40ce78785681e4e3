"""What exceptions mean to the user; streams that are full or closed, and errors after the commit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergepipe import Catalog, errors
from mergepipe.cli import main
from mergepipe.cli.guard import failure_of
from mergepipe.errors import MergePipeError, Problem
from mergepipe.jobs import merge_run as merging
from support.command_line import Workplace, make_workplace

FULL = Path("/dev/full")
MERGE = ("merge", "recipe.yml", "out", "--no-catalog")
QUERY = ("check", "recipe.yml")
FAST = [  # what follows the command, its exit code, what it says
    (MERGE, "2>/dev/full", 0, ""),
    (MERGE, ">&- 2>&- <&-", 0, ""),
    (QUERY, ">/dev/full", 8, "[output.report]"),
]
SLOW = [
    (MERGE, ">/dev/full", 0, "[output.report]"),
    (MERGE, ">&-", 0, ""),
    (MERGE, "2>&-", 0, ""),
    (MERGE, "| true", 0, ""),
    (QUERY, "2>&-", 0, ""),
]
SHELL = [pytest.param(*case, id=f"{case[0][0]}{case[1]}") for case in FAST] + [
    pytest.param(*case, id=f"{case[0][0]}{case[1]}", marks=pytest.mark.slow) for case in SLOW
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.chdir(tmp_path)
    return make_workplace(tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(("command", "redirection", "exit_code", "said"), SHELL)
def test_command__whose_streams_do_not_work_ends_as_it_would(
    place: Workplace, command: tuple[str, ...], redirection: str, exit_code: int, said: str
) -> None:
    line = f"{sys.executable} -m mergepipe {' '.join(command)} {redirection}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    ran = subprocess.run(
        ["bash", "-c", line], cwd=place.root, env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, "Traceback" in ran.stderr) == (exit_code, False)
    assert said in ran.stderr
    assert (place.root / "out" / "mergepipe.json").exists() == (command is MERGE)
    if command is MERGE:
        assert main(["verify", "out", "--quiet"]) == 0


COMMANDS: list[tuple[list[str], int]] = [
    (["pack", "family/base", "family/expert-1", "-o", "stores"], 0),
    (["unpack", "stores/expert-1", "-o", "unpacked"], 0),
    (["merge", "recipe.yml", "whole", "--no-catalog"], 0),
    (["replay", "whole", "again", "--no-catalog"], 0),
    (["repair", "whole"], 0),
    (["plan", "recipe.yml", "--budget", "50%", "-o", "plan.json"], 0),
    (["run", "plan.json", "planned", "--no-catalog"], 0),
    (["plan", "recipe.yml", "--budget", "50%"], 8),
    (["plan", "recipe.yml", "--budget", "50%", "--json"], 8),
    (["merge", "recipe.yml", "whole", "--no-catalog", "--json"], 7),
    (["--help"], 8),
]


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_every_command__to_a_full_standard_output_keeps_its_outcome(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MERGEPIPE_HOME", str(place.root / "home"))
    for arguments, exit_code in COMMANDS:
        with FULL.open("w", encoding="utf-8") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            assert (main(arguments), arguments) == (exit_code, arguments)
    for name in ("stores/expert-1", "unpacked", "whole", "again", "plan.json", "planned"):
        assert (place.root / name).exists()


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (MemoryError(), 11, "[output.published-but]"),
        (OSError(errno.EIO, "Input/output error"), 11, "Input/output error"),
        (KeyError("a bug"), 11, "KeyError"),
        (KeyboardInterrupt(), 130, "is published"),
    ],
    ids=["memory", "io", "bug", "ctrl-c"],
)
@pytest.mark.parametrize("where", ["catalog", "report", "table"])
def test_merge__that_fails_after_the_commit_says_what_stands(
    place: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    exit_code: int,
    said: str,
    where: str,
) -> None:
    with monkeypatch.context() as patch:
        if where == "catalog":
            patch.setattr(Catalog, "record_snapshot", raising(error))
        elif where == "report":
            patch.setattr(merging, "MergeReport", raising(error))
        else:
            patch.setattr("mergepipe.cli.printing.report_text", raising(error))
        assert main(["merge", "recipe.yml", "out", "--home", "home"]) == exit_code
    lines = capsys.readouterr().err
    assert said in lines
    assert str(place.root / "out") in lines or "out" in lines
    assert main(["verify", "out", "--quiet"]) == 0


CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MergePipeError)]


@pytest.mark.parametrize("kind", [each for each in CLASSES if each is not errors.InterruptedRunError])
def test_failure_of__takes_the_exit_code_of_the_class(kind: type[MergePipeError]) -> None:
    failure = failure_of(kind.of("a.code", "where", "what", "do this"), 130)
    assert failure.exit_code == kind.exit_code
    assert failure.lines() == ["error: where: what; do this [a.code]"]


def test_failure_of__an_interrupt_while_a_class_was_being_made_is_one(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
        type("Made", (), {"field": Interrupted()})
    failure = failure_of(caught.value, 143)
    assert (failure.exit_code, failure.lines()) == (143, ["interrupted: nothing was published"])
    monkeypatch.setattr("mergepipe.cli.printing.report_text", raising(caught.value))
    assert main(["merge", "recipe.yml", "out", "--home", "home"]) == 130
    assert f"{place.root / 'out'}: was complete by then, and is published" in capsys.readouterr().err


def test_failure_of__never_sends_control_characters_of_names_to_the_terminal() -> None:
    failure = failure_of(errors.CorruptError.of("c", "\x1b[2J\u202e\udcff", "name"), 130)
    assert failure.lines() == ["error: \\x1b[2J\\u202e\\udcff: name [c]"]


def test_failure_of__json_holds_the_same() -> None:
    failure = failure_of(errors.MismatchError(Problem("a", "x", "one", "two"), Problem("b", "", "three")), 130)
    assert failure.to_json() == {
        "error": {
            "code": "a",
            "exit_code": 5,
            "problems": [
                {"code": "a", "where": "x", "message": "one", "hint": "two"},
                {"code": "b", "where": "", "message": "three", "hint": ""},
            ],
        }
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "storage.no-space"),
        (OSError(errno.EACCES, "Permission denied", "/x/y"), "storage.permission"),
        (OSError(errno.EIO, "Input/output error"), "storage.io"),
        (MemoryError(), "storage.exhausted"),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "/x/y"), "storage.exhausted"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "storage.exhausted"),
        (RuntimeError("can't start new thread"), "storage.exhausted"),
        (RuntimeError("can't allocate lock"), "storage.exhausted"),
        (OSError("Could not find/load shared object file 'libllvmlite.so'"), "storage.io"),
    ],
)
def test_failure_of__what_the_system_refused_is_a_storage_error(error: Exception, code: str) -> None:
    failure = failure_of(error, 130)
    assert (failure.problems[0].code, failure.exit_code) == (code, 8)
    assert len(failure.lines()) == 1


def test_failure_of__a_working_folder_that_is_gone_names_it() -> None:
    (line,) = failure_of(FileNotFoundError(errno.ENOENT, "No such file or directory"), 130).lines()
    assert line.startswith("error: the working folder: is no longer there;")


def test_failure_of__anything_else_is_an_internal_error() -> None:
    failure = failure_of(KeyError("x"), 130)
    assert failure.exit_code == 70
    assert failure.lines() == ["internal error: KeyError: 'x'; run again with --debug and report it [internal]"]


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")])
def test_failure_of__says_what_stands_whatever_the_error_is(error: Exception) -> None:
    error.add_note("stores/expert-1 is complete and published")
    assert failure_of(error, 130).problems[-1].message == "stores/expert-1 is complete and published"
