"""`mergepipe materialise`: make the whole snapshot of an overlay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import Force, Home, NoCatalog, ReportFlags, SnapshotName, Threads
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.options import RunOptions

WholePath = Annotated[
    str | None, typer.Argument(metavar="[OUT]", help="The directory to create.  [default: the overlay's, with --force]")
]
MovedBase = Annotated[
    str | None, typer.Option("--base", metavar="DIR", help="Where the base is now.  [default: where it was]")
]


EXAMPLES = ("mergepipe materialise overlay/ whole/",)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, materialise, section="Snapshots", examples=EXAMPLES)


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
    printing: ReportFlags,
) -> None:
    """Make the whole snapshot of an overlay.

    From its own blocks and its base's, each compared with its digest: the bytes of the merge without --overlay, or
    nothing.
    """
    session: Session = context.obj
    options = RunOptions(threads=threads, home=home, catalog=not no_catalog)
    from mergepipe import api

    target = Path(overlay if out is None else out)
    with tell_if_published(target), progress_shown(session, silent=printing.silent) as on_progress:
        report = api.materialise(
            overlay,
            out,
            base=base,
            force=force,
            options=options,
            on_progress=on_progress,
        )
    from mergepipe.cli.render.snapshots import materialise_table

    print_report(report, materialise_table, as_json=printing.as_json, quiet=printing.quiet)
