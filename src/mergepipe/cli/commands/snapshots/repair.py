"""`mergepipe repair`: make what is damaged in a snapshot again from its inputs."""

from __future__ import annotations

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import ReportFlags, RunFlags, SnapshotName
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.core.outcome import note_committed

EXAMPLES = ("mergepipe repair merged/",)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, repair, section="Snapshots", examples=EXAMPLES)


def repair(
    context: typer.Context,
    snapshot: SnapshotName,
    *,
    machine: RunFlags,
    printing: ReportFlags,
) -> None:
    """Repair a damaged snapshot from its inputs.

    What is damaged is made again, compared with the manifest, and nothing else is written.
    """
    session: Session = context.obj
    options = machine.options()
    from mergepipe import api

    with progress_shown(session, silent=printing.silent) as on_progress:
        report = api.repair(snapshot, options=options, on_progress=on_progress)
    note_committed(report.path)
    from mergepipe.cli.render.snapshots import repair_table

    print_report(report, repair_table, as_json=printing.as_json, quiet=printing.quiet)
