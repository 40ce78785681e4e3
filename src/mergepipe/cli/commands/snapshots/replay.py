"""`mergepipe replay`: make a snapshot again from its manifest."""

from __future__ import annotations

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import Force, NoCatalog, OutPath, ReportFlags, RunFlags, SnapshotName
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_merge_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.storage.location import Location

EXAMPLES = ("mergepipe replay 7b3a2e50 again/",)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, replay, section="Snapshots", examples=EXAMPLES)


def replay(
    context: typer.Context,
    snapshot: SnapshotName,
    out: OutPath,
    *,
    no_catalog: NoCatalog = False,
    machine: RunFlags,
    force: Force = False,
    printing: ReportFlags,
) -> None:
    """Make a snapshot again at OUT, from its manifest alone.

    The same bytes, or nothing: then it says which input is gone or is not what it was.
    """
    session: Session = context.obj
    options = machine.options(catalog=not no_catalog)
    from mergepipe import api

    with tell_if_published(Location.of(out)), progress_shown(session, silent=printing.silent) as on_progress:
        report = api.replay(
            snapshot,
            out,
            force=force,
            options=options,
            on_progress=on_progress,
        )
    print_merge_report(report, as_json=printing.as_json, quiet=printing.quiet)
