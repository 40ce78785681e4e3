"""`mergepipe pack` and `unpack`: experts kept as what they change of their base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.commands.analyze import BasePath
from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Quiet, Threads
from mergepipe.cli.running import naming_what_stands, print_report, progress_shown, truthful_about
from mergepipe.options import threads_asked

ExpertPaths = Annotated[list[str], typer.Argument(metavar="EXPERT...", help="Models fine-tuned from it.")]
StorePath = Annotated[str, typer.Argument(metavar="STORE", help="A store that pack made.")]
PackOut = Annotated[
    str, typer.Option("--out", "-o", metavar="DIR", help="Where the stores go: DIR/NAME for an expert named NAME.")
]
UnpackOut = Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="The directory to create.")]
Replace = Annotated[
    bool, typer.Option("--replace", help="Remove each expert's files once its store was read back and compared.")
]
BaseOption = Annotated[
    str | None, typer.Option("--base", metavar="BASE", help="Where the base is now.  [default: where it was]")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("pack")(pack)
    app.command("unpack")(unpack)


def pack(
    context: typer.Context,
    base: BasePath,
    experts: ExpertPaths,
    *,
    out: PackOut,
    replace: Replace = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Keep each EXPERT as what it changes of BASE, bit for bit.

    Every element is checked while it is packed. All experts are read in one pass with BASE. A pack that was stopped
    goes on where it was.
    """
    session: Session = context.obj
    threads = threads_asked(threads)  # before anything compiled is loaded
    from mergepipe.jobs import pack as packing

    with naming_what_stands(), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = packing.pack(base, experts, out, replace=replace, threads=threads, on_progress=on_progress)
    from mergepipe.cli.render.packing import pack_table

    print_report(report, pack_table, as_json=as_json, quiet=quiet)


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
    threads = threads_asked(threads)  # before anything compiled is loaded
    from mergepipe.jobs import unpack as unpacking

    with truthful_about(Path(out)), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = unpacking.unpack(store, out, base=base, threads=threads, on_progress=on_progress)
    from mergepipe.cli.render.packing import unpack_line

    print_report(report, unpack_line, as_json=as_json, quiet=quiet)
