"""`mergepipe show`: show how one snapshot was made, from what."""

from __future__ import annotations

import typer

from mergepipe.cli.options import Home, PrintFlags, SnapshotName
from mergepipe.cli.printing import print_report
from mergepipe.cli.registration import add_command

EXAMPLES = (
    "mergepipe show merged/",
    "mergepipe show 7b3a2e50",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, show, section="Snapshots", examples=EXAMPLES)


def show(
    snapshot: SnapshotName,
    *,
    home: Home = None,
    printing: PrintFlags,
) -> None:
    """Show one snapshot: how it was made, from what, what was read."""
    from mergepipe import api

    report = api.show(snapshot, home=home)
    from mergepipe.cli.render.catalog import snapshot_table

    print_report(report, snapshot_table, as_json=printing.as_json)
