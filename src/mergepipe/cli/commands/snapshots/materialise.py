"""`mergepipe materialise`: make the whole snapshot of an overlay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Force, Home, NoCatalog, Quiet, SnapshotName, Threads
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.options import RunOptions

WholePath = Annotated[
    str | None, typer.Argument(metavar="[OUT]", help="The directory to create.  [default: the overlay's, with --force]")
]
MovedBase = Annotated[
    str | None, typer.Option("--base", metavar="DIR", help="Where the base is now.  [default: where it was]")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("materialise")(materialise)


def materialise(
    context: typer.Context,
    overlay: SnapshotName,
    out: WholePath = None,
    *,
    base: MovedBase = None,
    home: Home = None,
    no_catalog: NoCatalog = False,
    threads: Threads = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Make the whole snapshot of an overlay.

    From its own blocks and its base's, each compared with its digest: the bytes of the merge without --overlay, or
    nothing.
    """
    session: Session = context.obj
    options = RunOptions(threads=threads, home=home, catalog=not no_catalog)
    from mergepipe import api

    target = Path(overlay if out is None else out)
    with tell_if_published(target), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.materialise(
            overlay,
            out,
            base=base,
            force=force,
            options=options,
            on_progress=on_progress,
        )
    from mergepipe.cli.render.snapshots import materialise_table

    print_report(report, materialise_table, as_json=as_json, quiet=quiet)
