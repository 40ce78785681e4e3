"""`mergepipe verify`: compare a snapshot with its manifest."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Home, Memory, Quiet, SnapshotName, Threads
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.sizes import optional_size
from mergepipe.core.escaping import printable_lines
from mergepipe.options import RunOptions

DAMAGED_EXIT_CODE = 4
DEFAULT_DEEP_FRACTION = 0.05
Deep = Annotated[bool, typer.Option("--deep", help="Make a sample again from the inputs too, and compare.")]
Sample = Annotated[
    float | None, typer.Option("--sample", metavar="SHARE", help="How much --deep makes again.  [default: 0.05]")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify)


def verify(
    context: typer.Context,
    snapshot: SnapshotName,
    *,
    deep: Deep = False,
    sample: Sample = None,
    home: Home = None,
    threads: Threads = None,
    memory: Memory = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Compare every byte of a snapshot with its manifest.

    Names the damaged tensors and bytes. Exit code 0: it is sound; 4: it is damaged.
    """
    session: Session = context.obj
    memory_bytes = optional_size(memory, "--memory")
    options = RunOptions(threads=threads, memory_bytes=memory_bytes, home=home)
    if sample is not None and not deep:
        from mergepipe.errors import RecipeError

        raise RecipeError.of("option.pair", "--sample", "it has no meaning by itself", "add --deep")
    from mergepipe import api

    fraction = (DEFAULT_DEEP_FRACTION if sample is None else sample) if deep else 0.0
    with progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.verify(
            snapshot,
            deep_fraction=fraction,
            options=options,
            on_progress=on_progress,
        )
    if as_json:
        from mergepipe.cli.render.json import to_json

        print(to_json({"is_sound": report.is_sound, "report": report}))
    elif not quiet or not report.is_sound:
        from mergepipe.cli.render.snapshots import verify_table

        print(printable_lines(verify_table(report)))
    if not report.is_sound:
        raise typer.Exit(DAMAGED_EXIT_CODE)
