"""Runs one command inside the outermost error handling: every way to fail ends in lines and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from mergepipe.cli.failures import failure_of
from mergepipe.cli.interrupts import Interrupts
from mergepipe.cli.render.terminal import coloured_failure
from mergepipe.core.escaping import printable_lines
from mergepipe.core.outcome import Place, committed_places, published_error
from mergepipe.errors import InterruptedRunError, PublishedError, StorageError

if TYPE_CHECKING:
    from typer.core import TyperCommand, TyperGroup

BROKEN_PIPE_EXIT_CODE = 141  # what a shell reports for a program that SIGPIPE ended


@dataclass(frozen=True, slots=True)
class Session:
    """The context that every command is given: it tells when the user wants to stop."""

    interrupts: Interrupts


def run_guarded(arguments: Sequence[str], interrupts: Interrupts, program: str = "mergepipe") -> int:
    """Run the command that `arguments` name; return its exit code.

    What it prints is written once it has ended, so that a full or closed standard output changes nothing of what it
    does. Where the report of a command that committed something cannot be written, its exit code is still its own.
    """
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name the terminal cannot show is no reason to fail
    printed, failure, exit_code = io.StringIO(), None, 0
    with committed_places() as committed:
        try:
            with contextlib.redirect_stdout(printed):
                exit_code = _run(arguments, interrupts, program)
        except (Exception, KeyboardInterrupt) as error:
            failure = failure_of(_after_commit(error, committed), interrupts.exit_code)
            exit_code = failure.exit_code
            if "--debug" in options:
                import traceback

                _write(sys.stderr, printable_lines("".join(traceback.format_exception(error))))
    if failure is not None:
        _write(sys.stderr, coloured_failure("".join(f"{line}\n" for line in failure.lines())))
        if "--json" in options:
            from mergepipe.cli.printing import report_json

            printed.write(report_json(failure.to_json()) + "\n")
    refusal = _write(sys.stdout, printed.getvalue())
    if refusal is not None:
        exit_code = _without_report(refusal, exit_code, is_committed=bool(committed))
    _write(sys.stderr, "")  # what progress could not write, which the interpreter would try once more
    return exit_code


def _after_commit(error: BaseException, committed: Sequence[Place]) -> BaseException:
    """The error that says what stands complete, where the command had committed something."""
    if not committed or isinstance(error, PublishedError | InterruptedRunError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRunError.of("run.interrupted", committed[-1], "was complete by then, and is published")
    return published_error(committed[-1], error)


def _without_report(refusal: OSError, exit_code: int, *, is_committed: bool) -> int:
    """The exit code where standard output takes no report: the command's own, unless the report was all it had."""
    if isinstance(refusal, BrokenPipeError):
        return exit_code if exit_code or is_committed else BROKEN_PIPE_EXIT_CODE
    kind = "warning" if exit_code or is_committed else "error"
    reason = refusal.strerror or str(refusal)
    _write(sys.stderr, f"{kind}: standard output: the report could not be written: {reason} [output.report]\n")
    return exit_code if exit_code or is_committed else StorageError.exit_code


def _run(arguments: Sequence[str], interrupts: Interrupts, program: str) -> int:
    import typer

    command: TyperCommand | TyperGroup
    if program == "mergepipe":
        from mergepipe.cli.app import build_command
        from mergepipe.cli.completion import asks_for_completions, complete

        if asks_for_completions():
            return complete(build_command())
        command = build_command(arguments)
    else:
        from mergepipe.cli.mergekit import build_command as build_mergekit_command

        command = build_mergekit_command()
    try:
        with command.make_context(program, list(arguments), obj=Session(interrupts)) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return 0


def _write(stream: TextIO | None, text: str) -> OSError | None:
    """Write to a standard stream; what keeps that from working, if anything does. A closed stream takes everything."""
    if stream is None:
        return None
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _forget_output(stream)
        return error
    except ValueError:  # it was closed
        return None
    return None


def _forget_output(stream: TextIO) -> None:
    """Drop what cannot be written, or the interpreter would complain about it once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
