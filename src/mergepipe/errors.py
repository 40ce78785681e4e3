"""The error tree: few classes by what the caller can do, each with one exit code.

    MergePipeError
    ├── RecipeError        2  the request is wrong: fix the recipe, the option or the plan
    ├── NotFoundError      3  a path or a named thing does not exist
    ├── CorruptError       4  a file contradicts itself or its format: replace the file
    ├── MismatchError      5  sound inputs that do not fit together
    ├── UnsupportedError   6  understood but not supported: refused before the first write
    ├── OutputError        7  the output cannot go there: choose another place, or --force
    ├── StorageError       8  the operating system refused (space, permission, I/O): fix that and retry
    ├── ConflictError      9  another process changed or locked it: check, then retry
    ├── LimitError        10  a configured limit (memory, budget) is too small for the job
    ├── PublishedError    11  the output is complete and published; a later step failed
    └── InterruptedRunError 130  stopped by the user; nothing was published

A code (`"checkpoint.damaged"`) names the object and what is wrong with it, so that a caller can tell what to do; the
message has the particulars, and may improve.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

_VALUES = (
    "adapter-config lora-alpha "
    "address allow-dropped alpha at base base-model-id block-elements budget budgets chain config connections "
    "dtype ends energy evaluate executor export from-log home importance importance-out message method "
    "min-density optimizer part paths rank rounding save-modules seed select state-from strategy target-loss tensor "
    "text threads weights where-omitted work"
)
_SWITCHES = "adapter create force lenient private resume strict"
KEYWORD_OF_OPTION = {
    **{f"--{name}": name.replace("-", "_") for name in _VALUES.split()},
    **{f"--{name}": f"{name.replace('-', '_')}=True" for name in _SWITCHES.split()},
    "--all": "everything=True",
    "--allow-unapplied": "allow_unapplied",
    "--deep": "deep_fraction",
    "--density": "densities",
    "--experts": "experts",
    "--to": "form",
    "--finish": "part=None",
    "--memory": "memory",
    "--no-catalog": "catalog=False",
    "--no-resume": "resume=False",
    "--objective": "objectives",
    "--parts": "n_parts",
    "--rename": "adapter_names",
    "--rung": "rungs",
    "--shard-size": "shard_size",
    "--tokenizer": "tokenizer_of",
    "--weight": "weights",
}
"""Options that errors name, and the keyword arguments that they are in Python."""
_OPTION = re.compile(
    r"`(?:mergepipe|hf) [^`]*`|(?<![\w/.-])(--[a-z]+(?:-[a-z]+)*)(?: (norm|keep|renormalize)\b)?(?![\w/.-]*/)"
)


def with_keywords(text: str) -> str:
    """Return an error's text with options replaced by keyword arguments, for callers in Python.

    Commands in backticks stay: they are for a terminal.
    """

    def replaced(match: re.Match[str]) -> str:
        keyword = KEYWORD_OF_OPTION.get(match[1] or "")
        if keyword is None:
            return match[0]
        return keyword if match[2] is None else f'{keyword}="{match[2]}"'

    return _OPTION.sub(replaced, text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its `code`, its location, a `message` with what was found and needed, a `hint` for what to do.

    Options are named as on the command line; an error's own text names keyword arguments instead.
    """

    code: str
    where: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head}; {self.hint}" if self.hint else head


class MergePipeError(Exception):
    """Base class of all errors that users can cause or encounter. Holds at least one `Problem`."""

    exit_code: ClassVar[int] = 1

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("an error needs at least one problem")
        self.problems: tuple[Problem, ...] = problems
        super().__init__("\n".join(with_keywords(str(p)) for p in problems))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the problems, with notes and whatever else was added, so that errors of workers arrive whole."""
        return type(self), self.problems, self.__dict__

    @classmethod
    def of(cls, code: str, where: object, message: str, hint: str = "") -> MergePipeError:
        """Make an error with a single problem."""
        return cls(Problem(code, str(where), message, hint))

    @property
    def code(self) -> str:
        """The code of the first problem."""
        return self.problems[0].code


class RecipeError(MergePipeError):
    """The request itself is wrong."""

    exit_code = 2


class NotFoundError(MergePipeError):
    """A path or a named thing does not exist."""

    exit_code = 3


class CorruptError(MergePipeError):
    """A file contradicts itself or its format."""

    exit_code = 4


class MismatchError(MergePipeError):
    """Each input is valid, but they do not fit together."""

    exit_code = 5


class UnsupportedError(MergePipeError):
    """The request is understood, but not supported by this version."""

    exit_code = 6


class OutputError(MergePipeError):
    """The output cannot be written at the requested place."""

    exit_code = 7


class StorageError(MergePipeError):
    """The operating system refused: no space, no permission, an I/O failure."""

    exit_code = 8


class ConflictError(MergePipeError):
    """Another process changed or locked what this one needs."""

    exit_code = 9


class LimitError(MergePipeError):
    """A configured limit is too small for the job."""

    exit_code = 10


class PublishedError(MergePipeError):
    """The output is complete and published; a later step failed."""

    exit_code = 11


class InterruptedRunError(MergePipeError):
    """Stopped by the user; nothing was published."""

    exit_code = 130


class MergePipeWarning(UserWarning):
    """The result of a call is not what the recipe asks for: an entry in it has no effect, or another effect."""


def damaged(where: object, message: str, hint: str = "") -> MergePipeError:
    """Make the error for a file of a checkpoint that contradicts itself or its format."""
    return CorruptError.of("checkpoint.damaged", where, message, hint)


def unsupported(where: object, message: str, hint: str = "") -> MergePipeError:
    """Make the error for a checkpoint that is sound, and that this version does not read."""
    return UnsupportedError.of("checkpoint.unsupported", where, message, hint)


def mismatched(where: object, message: str, hint: str = "") -> MergePipeError:
    """Make the error for a checkpoint that does not fit the others, or its own parts."""
    return MismatchError.of("checkpoint.mismatch", where, message, hint)


def invalid_option(option: str, message: str, hint: str = "") -> MergePipeError:
    """Make the error for an option whose value means nothing."""
    return RecipeError.of("option.invalid", option, message, hint)


REPOSITORY = "https://github.com/mergepipe/mergepipe"


def how_to_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra, in a clone and anywhere else."""
    return f'pip install ".[{extra}]" in a clone, elsewhere pip install "mergepipe[{extra}] @ git+{REPOSITORY}"'


def library(name: str, where: object, extra: str, *, instead: str = "") -> Any:
    """Import a library that is no dependency.

    Raises:
        UnsupportedError: `extra.missing`, it is not installed; the hint says what to do `instead`, or how to install
            the `extra`.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        message = f"needs {error.name or name}, which is not installed"
        hint = f"{instead}, or {how_to_install(extra)}" if instead else how_to_install(extra)
        raise UnsupportedError.of("extra.missing", where, message, hint) from error


def did_you_mean(name: object, candidates: Sequence[str], otherwise: str | None = None) -> str:
    """Return `"did you mean 'x'?"` for the nearest known name, else what is known, shortened; nothing if nothing is.

    `otherwise` is returned instead of what is known.
    """
    from difflib import get_close_matches

    near = get_close_matches(str(name), candidates, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    if otherwise is not None:
        return otherwise
    known = sorted(set(candidates))
    return f"known: {', '.join(known[:12])}" + (", ..." if len(known) > 12 else "") if known else ""


def check_platform() -> None:
    """Refuse a system that is not POSIX."""
    if os.name != "posix":
        message = f"mergepipe runs on Linux, and this system is '{os.name}'"
        raise UnsupportedError.of("platform.unsupported", "", message, "on Windows, run it inside WSL")
