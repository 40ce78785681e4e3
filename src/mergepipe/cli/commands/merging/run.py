"""`mergepipe run`: merge as a stored plan says."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import Force, NoCatalog, OutPath, ReportFlags, Resume, RunFlags, ShardSize
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_merge_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.cli.sizes import optional_size
from mergepipe.options import DEFAULT_SHARD_BYTES
from mergepipe.storage.location import Location

PlanPath = Annotated[str, typer.Argument(metavar="PLAN", help="A plan that `mergepipe plan` stored.")]


EXAMPLES = ("mergepipe run plan.json merged/",)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, run, section="Merging", examples=EXAMPLES)


def run(
    context: typer.Context,
    plan: PlanPath,
    out: OutPath,
    *,
    no_catalog: NoCatalog = False,
    resume: Resume = None,
    machine: RunFlags,
    force: Force = False,
    shard_size: ShardSize = None,
    printing: ReportFlags,
) -> None:
    """Merge as PLAN says into the directory OUT.

    Refused if an input is not what it was when the plan was made. OUT appears when it is complete, or not at all.
    An interrupted run is resumed.
    """
    session: Session = context.obj
    options = machine.options(catalog=not no_catalog)
    shard_bytes = optional_size(shard_size, "--shard-size")
    from mergepipe import api

    with tell_if_published(Location.of(out)), progress_shown(session, silent=printing.silent) as on_progress:
        report = api.run(
            plan,
            out,
            force=force,
            shard_bytes=DEFAULT_SHARD_BYTES if shard_bytes is None else shard_bytes,
            resume=resume,
            options=options,
            on_progress=on_progress,
        )
    print_merge_report(report, as_json=printing.as_json, quiet=printing.quiet)
