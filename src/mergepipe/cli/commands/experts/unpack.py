"""`mergepipe unpack`: restore the files that a store was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import ReportFlags, Threads
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="A store that pack made.")]
UnpackOut = Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="The directory to create.")]
BaseOption = Annotated[
    str | None, typer.Option("--base", metavar="BASE", help="Where the base is now.  [default: where it was]")
]


EXAMPLES = ("mergepipe unpack packed/expert-1 --out expert-1/",)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, unpack, section="Experts", examples=EXAMPLES)


def unpack(
    context: typer.Context,
    store: StorePath,
    *,
    out: UnpackOut,
    base: BaseOption = None,
    threads: Threads = None,
    printing: ReportFlags,
) -> None:
    """Restore the files that STORE was made from, byte for byte."""
    session: Session = context.obj
    from mergepipe import api

    with tell_if_published(Path(out)), progress_shown(session, silent=printing.silent) as on_progress:
        report = api.unpack(store, out, base=base, threads=threads, on_progress=on_progress)
    from mergepipe.cli.render.packing import unpack_line

    print_report(report, unpack_line, as_json=printing.as_json, quiet=printing.quiet)
