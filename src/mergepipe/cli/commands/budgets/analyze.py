"""`mergepipe analyze`: fill the catalog with what plans are made from."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import BasePath, BlockElements, ExpertPaths, PackPath, ReportFlags, RunFlags
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command

Probe = Annotated[
    str | None,
    typer.Option("--probe", metavar="SHARE", help="Read only this share of every block (1%, 0.01) and estimate."),
]
Densities = Annotated[
    list[str] | None,
    typer.Option("--density", metavar="SHARE", help="Work out this magnitude cut too; may be given several times."),
]


EXAMPLES = (
    "mergepipe analyze base/ expert-1/ expert-2/",
    "mergepipe analyze base/ expert-1/ --probe 1%",
)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add_command(app, analyze, section="Budgets", examples=EXAMPLES)


def analyze(
    context: typer.Context,
    base: BasePath,
    experts: ExpertPaths,
    *,
    probe: Probe = None,
    density: Densities = None,
    block_elements: BlockElements = None,
    pack: PackPath = None,
    machine: RunFlags,
    printing: ReportFlags,
) -> None:
    """Read each EXPERT once against BASE and keep what plans need.

    What is known of unchanged files is not read again. An interrupted analysis is resumed.
    """
    session: Session = context.obj
    options = machine.options()
    from mergepipe.planning.budget import parse_fraction

    probe_fraction = 0.0 if probe is None else parse_fraction(probe, "--probe")
    from mergepipe import api

    with progress_shown(session, silent=printing.silent) as on_progress:
        report = api.analyze(
            base,
            experts,
            probe_fraction=probe_fraction,
            densities=[parse_fraction(each, "--density", "option.density") for each in density or ()],
            block_elements=block_elements,
            pack=pack,
            options=options,
            on_progress=on_progress,
        )
    from mergepipe.cli.render.merges import analyze_table

    print_report(report, analyze_table, as_json=printing.as_json, quiet=printing.quiet)
