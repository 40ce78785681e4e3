"""`mergepipe diff`: compare two snapshots."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import Home, ReportFlags, SnapshotName
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command

Fast = Annotated[bool, typer.Option("--fast", help="Compare manifests only, and read no tensors.")]


EXAMPLES = (
    "mergepipe diff merged/ other/",
    "mergepipe diff merged/ other/ --fast",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, diff, section="Snapshots", examples=EXAMPLES)


def diff(
    context: typer.Context,
    a: SnapshotName,
    b: SnapshotName,
    *,
    fast: Fast = False,
    home: Home = None,
    printing: ReportFlags,
) -> None:
    """Compare two snapshots.

    Recipes, settings, inputs, coverage, and the tensors that differ, with norms.
    """
    session: Session = context.obj
    from mergepipe import api

    with progress_shown(session, silent=printing.silent) as on_progress:
        report = api.diff(a, b, reads_tensors=not fast, home=home, on_progress=on_progress)
    from mergepipe.cli.render.snapshots import diff_table

    print_report(report, diff_table, as_json=printing.as_json, quiet=printing.quiet)
