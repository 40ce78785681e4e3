"""Decides what an exception means to the user: problems to tell, and an exit code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mergepipe.core.escaping import printable
from mergepipe.errors import InterruptedRunError, MergePipeError, Problem, RecipeError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typer._click import Parameter

INTERNAL_EXIT_CODE = 70
NOTHING_PUBLISHED = "nothing was published"


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
    if isinstance(error, KeyboardInterrupt):
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
    return _internal_failure(error)


def _kept(error: BaseException) -> tuple[Problem, ...]:
    """Return the outputs that were published although the command failed, as problems to print after the error."""
    return tuple(Problem("run.kept", "", note) for note in _notes(error))


def _notes(error: BaseException) -> tuple[str, ...]:
    """Return the notes that are printed after the error."""
    return tuple(getattr(error, "__notes__", ()))


def _is_lack_of_memory(error: BaseException) -> bool:
    """Whether the interpreter or the loader says in its own words that the system gave no memory."""
    from mergepipe.kernels.address_space import address_space_limit_bytes

    text = str(error)
    if isinstance(error, RuntimeError):
        return text.startswith(("can't start new thread", "can't allocate lock"))
    is_unloaded = isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is None)
    return is_unloaded and "shared object" in text and address_space_limit_bytes() is not None


def _system_failure(error: OSError) -> Failure:
    from pathlib import Path

    from mergepipe.storage.ranges import os_error

    named = error.filename if isinstance(error.filename, str) else ""
    typed = os_error(error, Path(named), "the operation")
    problems = typed.problems if named else tuple(Problem(p.code, "", p.message, p.hint) for p in typed.problems)
    return Failure("error", problems, typed.exit_code)


def _usage_problem(error: BaseException) -> Problem | None:
    from difflib import get_close_matches

    import typer

    if not isinstance(error, typer.TyperException):
        return None
    context = getattr(error, "ctx", None)
    hint = f"see '{context.command_path} --help'" if context is not None else "see 'mergepipe --help'"
    option, near = str(getattr(error, "option_name", "") or ""), getattr(error, "possibilities", None)
    message = error.message if near else error.format_message()
    if option and option in _mergekit_flags():
        hint = "it is a flag of mergekit-yaml: `mergepipe-yaml CONFIG OUT` takes those"
    elif near:
        written = option or str(getattr(error, "cmd_name", "") or error.message)
        hint = f"did you mean '{get_close_matches(written, sorted(near), n=1, cutoff=0.0)[0]}'?"
    elif message.startswith("Missing") and context is not None and context.command.epilog:
        hint = f"as in: {context.command.epilog.splitlines()[0]}"
    return Problem("option.invalid", "", message.rstrip(". "), "" if "Did you mean" in message else hint)


def _mergekit_flags() -> set[str]:
    """The flags of mergekit-yaml that `merge` does not have."""
    from mergepipe.cli.app import build_command
    from mergepipe.cli.mergekit import build_command as build_mergekit_command

    def flags(params: Sequence[Parameter]) -> set[str]:
        return {flag for param in params for flag in (*param.opts, *param.secondary_opts)}

    return flags(build_mergekit_command().params) - flags(build_command(["merge"]).commands["merge"].params)


def _internal_failure(error: BaseException) -> Failure:
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    problem = Problem("internal", "", message, "run again with --debug and report it")
    return Failure("internal error", (problem,), INTERNAL_EXIT_CODE)
