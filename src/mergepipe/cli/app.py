"""The command line as one object: commands, added in the order in which the help lists them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from mergepipe.cli.completion import SHELLS, choices, completion_script
from mergepipe.cli.registration import WIDEST_HELP, SectionedGroup

if TYPE_CHECKING:
    from typer.core import TyperGroup

_COMMANDS = {
    "merging": ("merge", "check", "run", "status"),
    "budgets": ("plan", "explain", "analyze", "sweep"),
    "snapshots": ("ls", "show", "lineage", "diff", "verify", "repair", "replay", "push"),
    "experts": ("pack", "unpack", "lora"),
    "training": ("tailor",),
    "maintenance": ("gc", "catalog"),
}
"""Modules of `cli.commands`, each with a `register(app)`, and the commands that it adds.

They import nothing but typer and the standard library until a command runs.
"""


def build_command(arguments: Sequence[str] = ()) -> TyperGroup:
    """Build the command line: the commands of the module with that which `arguments` begin with, or all."""
    named = [module for module, commands in _COMMANDS.items() if arguments and arguments[0] in commands]
    app = typer.Typer(
        name="mergepipe",
        cls=SectionedGroup,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST_HELP},
    )
    app.callback(invoke_without_command=True)(_root)
    for module in named or _COMMANDS:
        import_module(f"mergepipe.cli.commands.{module}").register(app)
    command: TyperGroup = typer.main.get_group(app)
    return command


def _root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    completion: Annotated[
        str | None,
        typer.Option(
            "--completion",
            metavar="SHELL",
            autocompletion=choices(*SHELLS),
            help="Print a script for bash, zsh or fish, and exit.",
        ),
    ] = None,
) -> None:
    """Merge large-model checkpoints at disk speed, all or nothing."""
    if version:
        from mergepipe import __version__

        print(f"mergepipe {__version__}")
        raise typer.Exit(0)
    if completion is not None:
        print(completion_script(completion))
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
