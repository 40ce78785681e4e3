"""`mergepipe show`: show how one snapshot was made, from what."""

from __future__ import annotations

import typer

from mergepipe.cli.options import AsJson, Debug, Home, SnapshotName
from mergepipe.cli.printing import print_report


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show")(show)


def show(
    snapshot: SnapshotName,
    *,
    home: Home = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Show one snapshot: how it was made, from what, what was read."""
    from mergepipe import api

    report = api.show(snapshot, home=home)
    from mergepipe.cli.render.catalog import snapshot_table

    print_report(report, snapshot_table, as_json=as_json)
