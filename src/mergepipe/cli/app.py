"""The command line as one object: every command, added in the order in which the help lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mergepipe.cli.commands.budgets import analyze, explain, plan, sweep
from mergepipe.cli.commands.experts import extract_lora, pack, unpack
from mergepipe.cli.commands.maintenance import catalog, gc
from mergepipe.cli.commands.merging import check, merge, run, status
from mergepipe.cli.commands.snapshots import (
    diff,
    lineage,
    ls,
    materialise,
    push,
    repair,
    replay,
    show,
    verify,
)
from mergepipe.cli.commands.training import tailor
from mergepipe.cli.completion import SHELLS, choices, completion_script
from mergepipe.cli.registration import WIDEST_HELP, SectionedGroup

if TYPE_CHECKING:
    from typer.core import TyperGroup

_COMMANDS = (
    merge, check, run, status, plan, explain, analyze, sweep, ls, show, lineage, diff, verify, repair, replay,
    materialise, push, pack, unpack, extract_lora, tailor, gc, catalog,
)  # fmt: skip
"""Modules with a `register(app)`. They import nothing but typer and the standard library until a command runs."""


def build_command() -> TyperGroup:
    """Build the whole command line."""
    app = typer.Typer(
        name="mergepipe",
        cls=SectionedGroup,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST_HELP},
    )
    app.callback(invoke_without_command=True)(_root)
    for command_module in _COMMANDS:
        command_module.register(app)
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
