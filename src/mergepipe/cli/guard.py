"""Run one command inside the outermost error handling: every way to fail ends in lines and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from mergepipe.cli.interrupts import Interrupts
from mergepipe.cli.printing import coloured_failure, report_json
from mergepipe.core.display import printable, printable_lines
from mergepipe.core.outcome import Place, committed_places, published_error
from mergepipe.errors import (
    InterruptedRunError,
    MergePipeError,
    MergePipeWarning,
    Problem,
    PublishedError,
    RecipeError,
    StorageError,
)

if TYPE_CHECKING:
    import click

BROKEN_PIPE_EXIT_CODE = 141  # what a shell reports for a program that SIGPIPE ended


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
    with committed_places() as committed, warnings.catch_warnings():
        warnings.simplefilter("ignore", MergePipeWarning)  # reports print what these say
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
    if _is_interrupt(error):
        return InterruptedRunError.of("run.interrupted", committed[-1], "was complete by then, and is published")
    return published_error(committed[-1], error)


def _is_interrupt(error: BaseException) -> bool:
    """Whether an interrupt is the error, or came while Python made a class: until 3.12 it raises another for that."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)


def _without_report(refusal: OSError, exit_code: int, *, is_committed: bool) -> int:
    """The exit code where standard output takes no report: the command's own, unless the report was all it had."""
    if isinstance(refusal, BrokenPipeError):
        return exit_code if exit_code or is_committed else BROKEN_PIPE_EXIT_CODE
    kind = "warning" if exit_code or is_committed else "error"
    reason = refusal.strerror or str(refusal)
    _write(sys.stderr, f"{kind}: standard output: the report could not be written: {reason} [output.report]\n")
    return exit_code if exit_code or is_committed else StorageError.exit_code


def _run(arguments: Sequence[str], interrupts: Interrupts, program: str) -> int:
    from click.exceptions import Exit

    command: click.Command
    if program == "mergepipe":
        from mergepipe.cli.app import asks_for_completions, build_command, complete

        if asks_for_completions():
            return complete(build_command())
        command = build_command(arguments)
    else:
        from mergepipe.cli.mergekit import build_command as build_mergekit_command

        command = build_mergekit_command()
    try:
        with command.make_context(program, list(arguments), obj=interrupts) as context:
            command.invoke(context)
    except Exit as ended:
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


# --- what an exception means to the user: problems to tell, and an exit code ---


INTERNAL_EXIT_CODE = 70
NOTHING_PUBLISHED = "nothing was published"
_OF_PYTHON = "Error calling __set_name__"


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a command failed. `kind` is the first word of each line."""

    kind: str
    problems: tuple[Problem, ...]
    exit_code: int

    def lines(self) -> list[str]:
        """One line per problem, with its code in brackets; an interruption has no code to look up."""
        if self.kind == "interrupted":
            return [f"{self.kind}: {printable(str(problem))}" for problem in self.problems]
        return [f"{self.kind}: {printable(str(problem))} [{problem.code}]" for problem in self.problems]

    def to_json(self) -> dict[str, object]:
        """The same for programs."""
        problems = [
            {"code": problem.code, "where": problem.where, "message": problem.message, "hint": problem.hint}
            for problem in self.problems
        ]
        return {"error": {"code": self.problems[0].code, "exit_code": self.exit_code, "problems": problems}}


def failure_of(error: BaseException, interrupted_exit_code: int) -> Failure:
    """Return the lines and the exit code of `error`; `interrupted_exit_code` is used if it is an interruption."""
    if _is_interrupt(error):
        message = "; ".join((NOTHING_PUBLISHED, *_notes(error)))
        return Failure("interrupted", (Problem("run.interrupted", "", message),), interrupted_exit_code)
    if isinstance(error, InterruptedRunError):
        return Failure("interrupted", error.problems, interrupted_exit_code)
    if isinstance(error, MergePipeError):
        return Failure("error", (*error.problems, *_kept(error)), error.exit_code)
    if isinstance(error, MemoryError) or _is_lack_of_memory(error):
        hint = "close other programs, raise `ulimit -v`, or lower --memory or --threads"
        problem = Problem("storage.exhausted", "", "the system has no more memory", hint)
        return Failure("error", (problem, *_kept(error)), StorageError.exit_code)
    if isinstance(error, OSError):
        failure = _system_failure(error)
        return replace(failure, problems=(*failure.problems, *_kept(error)))
    usage = _usage_problem(error)
    if usage is not None:
        return Failure("error", (usage,), RecipeError.exit_code)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    problem = Problem("internal", "", message, "run again with --debug and report it")
    return Failure("internal error", (problem,), INTERNAL_EXIT_CODE)


def _kept(error: BaseException) -> tuple[Problem, ...]:
    """Return the outputs that were published although the command failed, as problems to print after the error."""
    return tuple(Problem("run.kept", "", note) for note in _notes(error))


def _notes(error: BaseException) -> tuple[str, ...]:
    """Return the notes that are printed after the error, but for what Python adds where a class was being made."""
    return tuple(note for note in getattr(error, "__notes__", ()) if not note.startswith(_OF_PYTHON))


def _is_lack_of_memory(error: BaseException) -> bool:
    """Whether the interpreter or the loader says in its own words that the system gave no memory."""
    import resource

    text = str(error)
    if isinstance(error, RuntimeError):
        return text.startswith(("can't start new thread", "can't allocate lock"))
    is_unloaded = isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is None)
    return (
        is_unloaded and "shared object" in text and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    )


def _system_failure(error: OSError) -> Failure:
    from pathlib import Path

    from mergepipe.storage.ranges import os_error

    named = error.filename if isinstance(error.filename, str) else ""
    typed = os_error(error, Path(named), "the operation")
    if error.errno == errno.ENOENT and not named:  # what `os.getcwd` raises
        where, message, hint = "the working folder", "is no longer there", "change to one that is"
        return Failure("error", (Problem("storage.not-found", where, message, hint),), typed.exit_code)
    problems = typed.problems if named else tuple(replace(problem, where="") for problem in typed.problems)
    return Failure("error", problems, typed.exit_code)


_SAID_ELSEWHERE = {
    "--gguf": "the name of the output says it: merged-Q8_0.gguf (or -F16, -BF16, -F32)",
    "--like-base": "the recipe says it: `out_dtype: like_base`",
}


_WORDINGS = (
    (r": '.*' is not a valid integer", ": a valid integer is needed"),
    (r": '.*' is not a valid float", ": a valid number is needed"),
    (r"extra arguments? \(", "extra argument(s) ("),
)
"""What click says of arguments, by regular expressions, and what is said here."""


def _usage_problem(error: BaseException) -> Problem | None:
    from difflib import get_close_matches

    import click

    if not isinstance(error, click.ClickException):
        return None
    context = getattr(error, "ctx", None)
    hint = f"see '{context.command_path} --help'" if context is not None else "see 'mergepipe --help'"
    option = str(getattr(error, "option_name", "") or "")
    near = getattr(error, "possibilities", None)
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):  # versions of click write this differently
        message = f"No such option: {option}"
    for pattern, wording in _WORDINGS:
        message = re.sub(pattern, wording, message, flags=re.DOTALL)
    if option and option in _mergekit_flags():
        hint = "it is a flag of mergekit-yaml: `mergepipe-yaml CONFIG OUT` takes those"
    elif option in _SAID_ELSEWHERE:
        hint = _SAID_ELSEWHERE[option]
    elif option and near:
        hint = f"did you mean '{get_close_matches(option, near, n=1)[0]}'?"
    elif message.startswith("Missing") and context is not None and context.command.epilog:
        hint = f"as in: {context.command.epilog.splitlines()[0]}"
    return Problem("option.invalid", "", message.rstrip(". "), "" if "Did you mean" in message else hint)


def _mergekit_flags() -> set[str]:
    """The flags of mergekit-yaml that `merge` does not have."""
    from mergepipe.cli.app import build_command
    from mergepipe.cli.mergekit import build_command as build_mergekit_command

    def flags(params: Sequence[click.Parameter]) -> set[str]:
        return {flag for param in params for flag in (*param.opts, *param.secondary_opts)}

    return flags(build_mergekit_command().params) - flags(build_command(["merge"]).commands["merge"].params)
