"""The command line as one object: commands, added in the order in which the help lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mergepipe.cli.registration import (
    SHELLS,
    WIDEST_HELP,
    SectionedGroup,
    add_commands,
    choices,
    completion_script,
    show_all,
)

if TYPE_CHECKING:
    from typer.core import TyperGroup

_COMMANDS = {
    "merging": ("merge", "check", "run"),
    "budgets": ("plan", "explain", "analyze"),
    "snapshots": ("ls", "verify", "push"),
    "experts": ("pack", "unpack", "lora"),
    "training": ("tailor",),
    "maintenance": ("gc",),
}
"""Modules of `cli.commands`, and the commands of each that `--help` describes.

They import nothing but typer and the standard library until a command runs.
"""
_RARE_COMMANDS = {
    "merging": ("moe", "status"),
    "budgets": ("sweep", "search"),
    "snapshots": ("show", "lineage", "diff", "repair", "replay"),
    "maintenance": ("catalog",),
}
"""The other commands of these modules: `--help` names them, `--help-all` describes them."""


def build_command(arguments: Sequence[str] = ()) -> TyperGroup:
    """Build the command line: the commands of the module with that which `arguments` begin with, or all."""
    commands = {module: (*names, *_RARE_COMMANDS.get(module, ())) for module, names in _COMMANDS.items()}
    named = [module for module, names in commands.items() if arguments and arguments[0] in names]
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
        add_commands(app, module)
    command: TyperGroup = typer.main.get_group(app)
    assert isinstance(command, SectionedGroup)
    command.rare_commands = tuple(name for names in _RARE_COMMANDS.values() for name in names)
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
    help_all: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all commands and exit.")
    ] = False,
) -> None:
    """Fold adapters, merge experts and compose training checkpoints of large models, all or nothing."""
    del help_all  # `show_all` has seen to it
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
