"""Runs one command inside the outermost error handling: every way to fail ends in lines and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mergepipe.cli.failures import Failure, failure_of
from mergepipe.cli.interrupts import Interrupts
from mergepipe.escaping import json_line, printable_lines

BROKEN_PIPE_EXIT_CODE = 141  # what a shell reports for a program that SIGPIPE ended


@dataclass(frozen=True, slots=True)
class Session:
    """What every command is given: how to notice that the user wants to stop."""

    interrupts: Interrupts


def run_guarded(arguments: Sequence[str], interrupts: Interrupts) -> int:
    """Run the command that `arguments` name; return its exit code."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name the terminal cannot show is no reason to fail
    try:
        exit_code = _run(arguments, interrupts)
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:
        _forget_output()
        return BROKEN_PIPE_EXIT_CODE
    except (Exception, KeyboardInterrupt) as error:
        failure = failure_of(error, interrupts.exit_code)
        if "--debug" in options:
            import traceback

            print(printable_lines("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return _tell(failure, as_json="--json" in options)


def _run(arguments: Sequence[str], interrupts: Interrupts) -> int:
    import typer

    from mergepipe.cli.app import build_command

    command = build_command()
    try:
        with command.make_context("mergepipe", list(arguments), obj=Session(interrupts)) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return 0


def _tell(failure: Failure, *, as_json: bool) -> int:
    for line in failure.lines():
        print(line, file=sys.stderr or open(os.devnull, "w"))  # noqa: PTH123, SIM115 - the process is about to end
    if as_json:
        try:
            print(json_line(failure.to_json()), flush=True)
        except OSError:  # the failure has been told, and its exit code is the one that matters
            _forget_output()
    return failure.exit_code


def _forget_output() -> None:
    """Drop what cannot be written, or the interpreter would complain about it once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
