"""`mergepipe repair`: make what is damaged in a snapshot again from its inputs."""

from __future__ import annotations

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Home, Memory, Quiet, SnapshotName, Threads
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.sizes import optional_size
from mergepipe.core.outcome import note_committed
from mergepipe.options import RunOptions


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("repair")(repair)


def repair(
    context: typer.Context,
    snapshot: SnapshotName,
    *,
    home: Home = None,
    threads: Threads = None,
    memory: Memory = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Repair a damaged snapshot from its inputs.

    What is damaged is made again, compared with the manifest, and nothing else is written.
    """
    session: Session = context.obj
    memory_bytes = optional_size(memory, "--memory")
    options = RunOptions(threads=threads, memory_bytes=memory_bytes, home=home)
    from mergepipe import api

    with progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.repair(snapshot, options=options, on_progress=on_progress)
    note_committed(report.path)
    from mergepipe.cli.render.snapshots import repair_table

    print_report(report, repair_table, as_json=as_json, quiet=quiet)
