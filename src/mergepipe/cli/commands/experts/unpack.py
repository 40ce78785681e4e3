"""`mergepipe unpack`: restore the files that a store was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Quiet, Threads
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="A store that pack made.")]
UnpackOut = Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="The directory to create.")]
BaseOption = Annotated[
    str | None, typer.Option("--base", metavar="BASE", help="Where the base is now.  [default: where it was]")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("unpack")(unpack)


def unpack(
    context: typer.Context,
    store: StorePath,
    *,
    out: UnpackOut,
    base: BaseOption = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Restore the files that STORE was made from, byte for byte."""
    session: Session = context.obj
    from mergepipe import api

    with tell_if_published(Path(out)), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.unpack(store, out, base=base, threads=threads, on_progress=on_progress)
    from mergepipe.cli.render.packing import unpack_line

    print_report(report, unpack_line, as_json=as_json, quiet=quiet)
