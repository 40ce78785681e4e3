"""What exceptions mean to the user."""

from __future__ import annotations

import errno

import pytest

from mergepipe import errors
from mergepipe.cli.guard import failure_of
from mergepipe.errors import MergePipeError, Problem

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MergePipeError)]


@pytest.mark.parametrize("kind", [each for each in CLASSES if each is not errors.InterruptedRunError])
def test_failure_of__takes_the_exit_code_of_the_class(kind: type[MergePipeError]) -> None:
    failure = failure_of(kind.of("a.code", "where", "what", "do this"), 130)
    assert failure.exit_code == kind.exit_code
    assert failure.lines() == ["error: where: what; do this [a.code]"]


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


@pytest.mark.parametrize("exit_code", [130, 143, 129])
def test_failure_of__interruptions_exit_as_the_signal_says(exit_code: int) -> None:
    failure = failure_of(KeyboardInterrupt(), exit_code)
    assert (failure.exit_code, failure.lines()) == (exit_code, ["interrupted: nothing was published"])


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "storage.no-space", 8),
        (OSError(errno.EACCES, "Permission denied", "/x/y"), "storage.permission", 8),
        (OSError(errno.EIO, "Input/output error"), "storage.io", 8),
        (MemoryError(), "storage.exhausted", 8),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "/x/y"), "storage.exhausted", 8),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "storage.exhausted", 8),
        (RuntimeError("can't start new thread"), "storage.exhausted", 8),
        (RuntimeError("can't allocate lock"), "storage.exhausted", 8),
        (OSError("Could not find/load shared object file 'libllvmlite.so'"), "storage.io", 8),
    ],
)
def test_failure_of__what_the_system_refused_is_a_storage_error(error: Exception, code: str, exit_code: int) -> None:
    failure = failure_of(error, 130)
    assert (failure.problems[0].code, failure.exit_code) == (code, exit_code)
    assert len(failure.lines()) == 1


def test_failure_of__anything_else_is_an_internal_error() -> None:
    failure = failure_of(KeyError("x"), 130)
    assert failure.exit_code == 70
    assert failure.lines() == ["internal error: KeyError: 'x'; run again with --debug and report it [internal]"]


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")])
def test_failure_of__says_what_stands_whatever_the_error_is(error: Exception) -> None:
    error.add_note("stores/expert-1 is complete and published")
    assert failure_of(error, 130).problems[-1].message == "stores/expert-1 is complete and published"
