"""`mergepipe verify`: compare a snapshot with its manifest."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import ReportFlags, RunFlags, SnapshotName
from mergepipe.cli.printing import print_text
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command

DAMAGED_EXIT_CODE = 4
DEFAULT_DEEP_FRACTION = 0.05
Deep = Annotated[bool, typer.Option("--deep", help="Make a sample again from the inputs too, and compare.")]
Sample = Annotated[
    float | None, typer.Option("--sample", metavar="SHARE", help="How much --deep makes again.  [default: 0.05]")
]


BaseNow = Annotated[
    str | None,
    typer.Option("--base", metavar="BASE", help="Where the base of a packed expert is now.  [default: where it was]"),
]
EXAMPLES = (
    "mergepipe verify merged/",
    "mergepipe verify merged/ --deep --sample 0.2",
    "mergepipe verify packs/math --base models/base",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, verify, section="Snapshots", examples=EXAMPLES)


def verify(
    context: typer.Context,
    snapshot: SnapshotName,
    *,
    deep: Deep = False,
    sample: Sample = None,
    base: BaseNow = None,
    machine: RunFlags,
    printing: ReportFlags,
) -> None:
    """Compare every byte of a snapshot or a pack with its record.

    Names the damaged tensors and bytes. Exit code 0: it is sound; 4: it is damaged.
    """
    session: Session = context.obj
    options = machine.options()
    if sample is not None and not deep:
        from mergepipe.errors import RecipeError

        raise RecipeError.of("option.pair", "--sample", "it has no meaning by itself", "add --deep")
    from mergepipe import api

    fraction = (DEFAULT_DEEP_FRACTION if sample is None else sample) if deep else 0.0
    with progress_shown(session, silent=printing.silent) as on_progress:
        report = api.verify(
            snapshot,
            deep_fraction=fraction,
            base=base,
            options=options,
            on_progress=on_progress,
        )
    if printing.as_json:
        from mergepipe.cli.render.json import report_json

        print(report_json({"is_sound": report.is_sound, "report": report}))
    elif not printing.quiet or not report.is_sound:
        from mergepipe.cli.render.snapshots import verify_table

        print_text(verify_table(report))
    if not report.is_sound:
        raise typer.Exit(DAMAGED_EXIT_CODE)
