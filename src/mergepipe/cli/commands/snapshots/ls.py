"""`mergepipe ls`: list the snapshots that the catalog knows."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, TypeAlias

import typer

from mergepipe.cli.options import Home, PrintFlags
from mergepipe.cli.printing import print_text
from mergepipe.cli.registration import add_command

With: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--with",
        metavar="EXPERT",
        help="Only those that this model is in, directly or through earlier merges: a path, a name, hf://org/name, or "
        "the first digits of a commit, a content digest or a sid.",
    ),
]
Operator: TypeAlias = Annotated[
    str | None, typer.Option("--operator", metavar="NAME", help="Only those that this operator made.")
]
Since: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--since", metavar="YYYY-MM-DD", formats=["%Y-%m-%d"], help="Only those made on this day or later."),
]
Until: TypeAlias = Annotated[
    datetime | None,
    typer.Option("--until", metavar="YYYY-MM-DD", formats=["%Y-%m-%d"], help="Only those made on this day or before."),
]

EXAMPLES = (
    "mergepipe ls",
    "mergepipe ls --with models/math --operator ties --since 2026-11-01",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, list_snapshots, name="ls", section="Snapshots", examples=EXAMPLES)


def list_snapshots(
    *,
    contained: With = None,
    operator: Operator = None,
    since: Since = None,
    until: Until = None,
    home: Home = None,
    printing: PrintFlags,
) -> None:
    """List the snapshots that the catalog knows, newest first."""
    from mergepipe import api

    first, last = (None if day is None else day.date() for day in (since, until))
    snapshots = api.list_snapshots(contained=contained, operator=operator, since=first, until=last, home=home)
    if printing.as_json:
        from mergepipe.cli.render.json import report_json

        print(report_json({"snapshots": snapshots}))
    else:
        from mergepipe.cli.render.catalog import snapshots_table

        print_text(snapshots_table(snapshots))
