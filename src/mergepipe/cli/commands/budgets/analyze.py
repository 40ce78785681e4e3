"""`mergepipe analyze`: fill the catalog with what plans are made from."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import BlockElements, ExpertPart, ReportFlags, RunFlags
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command

Densities = Annotated[
    list[str] | None,
    typer.Option("--density", metavar="SHARE", help="Work out this magnitude cut too; may be given several times."),
]
Base = Annotated[str, typer.Argument(metavar="BASE", help="The base model: a directory or a .safetensors file.")]
Experts = Annotated[
    list[str], typer.Argument(metavar="EXPERT...", help="Models fine-tuned from it.", show_default=False)
]
EXAMPLES = (
    "mergepipe analyze base/ expert-1/ expert-2/",
    "mergepipe analyze base/ expert-*/ --part 2/4 --home /shared/home",
)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add_command(app, analyze, section="Budgets", examples=EXAMPLES)


def analyze(
    context: typer.Context,
    base: Base,
    experts: Experts,
    *,
    density: Densities = None,
    block_elements: BlockElements = None,
    part: ExpertPart = None,
    machine: RunFlags,
    printing: ReportFlags,
) -> None:
    """Read each EXPERT once against BASE and keep what plans need.

    What is on record of the same contents is not read again. The report names a file for each expert: copied into the
    home folder of another machine, it serves there.
    """
    session: Session = context.obj
    options = machine.options()
    from mergepipe import api
    from mergepipe.jobs.parts import experts_of_part
    from mergepipe.planning.budget import parse_fraction

    with progress_shown(session, silent=printing.silent) as on_progress:
        report = api.analyze(
            base,
            experts_of_part(experts, part),
            densities=[parse_fraction(text, "--density", "option.density") for text in density or ()],
            block_elements=block_elements,
            options=options,
            on_progress=on_progress,
        )
    from mergepipe.cli.render.merges import analyze_table

    print_report(report, analyze_table, as_json=printing.as_json, quiet=printing.quiet)
