"""`mergepipe ls`: list the snapshots that the catalog knows."""

from __future__ import annotations

import typer

from mergepipe.cli.options import Home, PrintFlags
from mergepipe.cli.printing import print_text
from mergepipe.cli.registration import add_command

EXAMPLES = ("mergepipe ls",)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, list_snapshots, name="ls", section="Snapshots", examples=EXAMPLES)


def list_snapshots(*, home: Home = None, printing: PrintFlags) -> None:
    """List the snapshots that the catalog knows, newest first."""
    from mergepipe import api

    snapshots = api.list_snapshots(home=home)
    if printing.as_json:
        from mergepipe.cli.render.json import report_json

        print(report_json({"snapshots": snapshots}))
    else:
        from mergepipe.cli.render.catalog import snapshots_table

        print_text(snapshots_table(snapshots))
