"""`mergepipe pack`: keep experts as what they change of their base."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import BasePath, ExpertPart, Home, ReportFlags, Threads
from mergepipe.cli.outcomes import tell_what_is_published
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command

PackOut = Annotated[
    str, typer.Option("--out", "-o", metavar="DIR", help="Where the stores go: DIR/NAME for an expert named NAME.")
]
Replace = Annotated[
    bool, typer.Option("--replace", help="Remove each expert's files once its store was read back and compared.")
]


Experts = Annotated[
    list[str] | None,
    typer.Argument(metavar="EXPERT...", help="Models fine-tuned from it; none: BASE is packed on its own."),
]

EXAMPLES = (
    "mergepipe pack base/ expert-1/ expert-2/ --out packed/",
    "mergepipe pack base/ expert-1/ --out s3://bucket/packed",
    "mergepipe pack base/ expert-*/ --out packed/ --part 2/4",
    "mergepipe pack base/ --out packed/",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, pack, section="Experts", examples=EXAMPLES)


def pack(
    context: typer.Context,
    base: BasePath,
    experts: Experts = None,
    *,
    out: PackOut,
    replace: Replace = False,
    part: ExpertPart = None,
    threads: Threads = None,
    home: Home = None,
    printing: ReportFlags,
) -> None:
    """Keep each EXPERT as what it changes of BASE, bit for bit.

    Every element is checked while it is packed. All experts are read in one pass with BASE. An
    interrupted pack is resumed. BASE alone is packed on its own, to about two thirds.
    """
    session: Session = context.obj
    from mergepipe import api
    from mergepipe.jobs.parts import experts_of_part

    part_experts = experts_of_part(experts or [base], part)
    beside = base if experts else None
    with tell_what_is_published(), progress_shown(session, silent=printing.silent) as on_progress:
        report = api.pack(
            beside, part_experts, out, replace=replace, threads=threads, home=home, on_progress=on_progress
        )
    from mergepipe.cli.render.packing import pack_table

    print_report(report, pack_table, as_json=printing.as_json, quiet=printing.quiet)
