"""`mergepipe ls`: list the snapshots that the catalog knows."""

from __future__ import annotations

import typer

from mergepipe.cli.options import AsJson, Debug, Home
from mergepipe.core.escaping import printable_lines


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ls")(list_snapshots)


def list_snapshots(
    *,
    home: Home = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """List the snapshots that the catalog knows, newest first."""
    from mergepipe import api

    snapshots = api.list_snapshots(home=home)
    if as_json:
        from mergepipe.cli.render.json import to_json

        print(to_json({"snapshots": snapshots}))
    else:
        from mergepipe.cli.render.catalog import snapshots_table

        print(printable_lines(snapshots_table(snapshots)))
