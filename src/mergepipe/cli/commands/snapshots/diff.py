"""`mergepipe diff`: compare two snapshots."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Home, Quiet, SnapshotName
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown

Fast = Annotated[bool, typer.Option("--fast", help="Compare manifests only, and read no tensors.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diff")(diff)


def diff(
    context: typer.Context,
    a: SnapshotName,
    b: SnapshotName,
    *,
    fast: Fast = False,
    home: Home = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Compare two snapshots.

    Recipes, settings, inputs, coverage, and the tensors that differ, with norms.
    """
    session: Session = context.obj
    from mergepipe import api

    with progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.diff(a, b, reads_tensors=not fast, home=home, on_progress=on_progress)
    from mergepipe.cli.render.snapshots import diff_table

    print_report(report, diff_table, as_json=as_json)
