"""`mergepipe ls`: list the snapshots that the catalog knows, or the packed experts in a folder."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import Home, PrintFlags
from mergepipe.cli.printing import print_report, print_text
from mergepipe.cli.registration import add_command

Folder = Annotated[
    str | None, typer.Argument(metavar="DIR", help="List the packed experts in this folder, not the snapshots.")
]
EXAMPLES = ("mergepipe ls", "mergepipe ls packed/")


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, list_snapshots, name="ls", section="Snapshots", examples=EXAMPLES)


def list_snapshots(
    folder: Folder = None,
    *,
    home: Home = None,
    printing: PrintFlags,
) -> None:
    """List the snapshots that the catalog knows, newest first, or the packed experts in DIR.

    For each expert its size as it was and packed, what of that other experts of DIR have too and
    is stored once, the norm of its deltas, and its base.
    """
    from mergepipe import api

    if folder is not None:
        from mergepipe.cli.render.packing import library_table

        print_report(api.list_packed(folder), library_table, as_json=printing.as_json)
        return
    snapshots = api.list_snapshots(home=home)
    if printing.as_json:
        from mergepipe.cli.render.json import report_json

        print(report_json({"snapshots": snapshots}))
    else:
        from mergepipe.cli.render.catalog import snapshots_table

        print_text(snapshots_table(snapshots))
