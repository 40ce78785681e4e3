"""`mergepipe replay`: make a snapshot again from its manifest."""

from __future__ import annotations

from pathlib import Path

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Force, Home, Memory, NoCatalog, OutPath, Quiet, SnapshotName, Threads
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_merge_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.sizes import optional_size
from mergepipe.options import RunOptions


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay")(replay)


def replay(
    context: typer.Context,
    snapshot: SnapshotName,
    out: OutPath,
    *,
    home: Home = None,
    no_catalog: NoCatalog = False,
    threads: Threads = None,
    memory: Memory = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Make a snapshot again at OUT, from its manifest alone.

    The same bytes, or nothing: then it says which input is gone or is not what it was.
    """
    session: Session = context.obj
    memory_bytes = optional_size(memory, "--memory")
    options = RunOptions(threads=threads, memory_bytes=memory_bytes, home=home, catalog=not no_catalog)
    from mergepipe import api

    with tell_if_published(Path(out)), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.replay(
            snapshot,
            out,
            force=force,
            options=options,
            on_progress=on_progress,
        )
    print_merge_report(report, as_json=as_json, quiet=quiet)
