"""`mergepipe gc`: remove what dead runs left."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import Home, PrintFlags
from mergepipe.cli.printing import print_report
from mergepipe.cli.registration import add_command

Roots = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[DIR]...", help="Where else dead runs may have left something: folders, prefixes of buckets."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")]


EXAMPLES = (
    "mergepipe gc --dry-run",
    "mergepipe gc /models",
    "mergepipe gc s3://bucket/prefix",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, gc, section="Maintenance", examples=EXAMPLES)


def gc(
    roots: Roots = None,
    *,
    dry_run: DryRun = False,
    home: Home = None,
    printing: PrintFlags,
) -> None:
    """Remove what dead runs left, and rows about what is gone.

    Nothing that a living process works on, and no snapshot, is ever removed.
    """
    from mergepipe import api

    report = api.gc(roots or (), dry_run=dry_run, home=home)
    from mergepipe.cli.render.snapshots import gc_table

    print_report(report, gc_table, as_json=printing.as_json)
