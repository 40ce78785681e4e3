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
    list[float] | None,
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
    probe_fraction = 0.0 if probe is None else parse_share(probe, "--probe")
    from mergepipe import api

    with progress_shown(session, silent=printing.silent) as on_progress:
        report = api.analyze(
            base,
            experts,
            probe_fraction=probe_fraction,
            densities=density or (),
            block_elements=block_elements,
            pack=pack,
            options=options,
            on_progress=on_progress,
        )
    from mergepipe.cli.render.merges import analyze_table

    print_report(report, analyze_table, as_json=printing.as_json, quiet=printing.quiet)


def parse_share(text: str, option: str) -> float:
    """A share above 0 and up to 1, written `1%` or `0.01`.

    Raises:
        RecipeError: `option.share`; the message names `option`.
    """
    from mergepipe.core.sizes import split_quantity
    from mergepipe.errors import RecipeError

    quantity = split_quantity(text)
    if quantity is not None and quantity[1] in ("", "%"):
        share = quantity[0] / 100 if quantity[1] else quantity[0]
        if 0 < share <= 1:
            return float(share)
    raise RecipeError.of("option.share", option, f"'{text[:40]}' is not a share", "write it as 1% or 0.01, up to 100%")
