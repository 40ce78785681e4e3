"""Completion of commands, options and their choices in shells."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from mergepipe.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from typer.core import TyperGroup

PROGRAM = "mergepipe"
VARIABLE = "_MERGEPIPE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


def completion_script(shell: str) -> str:
    """Return the script that a shell evaluates to complete the program's arguments."""
    if shell not in SHELLS:
        raise RecipeError.of("option.invalid", "--completion", f"'{shell}' was given", did_you_mean(shell, SHELLS))
    from typer._completion_shared import get_completion_script

    return get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)


def choices(*names: str) -> Callable[[str], list[str]]:
    """Return what completes the value of an option that takes one of `names`."""

    def begin_with(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return begin_with


def asks_for_completions() -> bool:
    """Whether a shell's completion script runs this program."""
    return bool(os.environ.get(VARIABLE))


def complete(command: TyperGroup) -> int:
    """Print the completions that a shell's completion script asks for; return the exit code."""
    from typer._completion_classes import completion_init
    from typer.completion import shell_complete

    completion_init()
    return shell_complete(command, {}, PROGRAM, VARIABLE, os.environ[VARIABLE])
