"""`mergepipe sweep`: what budgets cost in fidelity, measured against the full merge."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import (
    EVALUATE_HELP,
    AllowDropped,
    Lenient,
    PlanFlags,
    RecipePath,
    ReportFlags,
    RunFlags,
    Seed,
    Strict,
)
from mergepipe.cli.page_files import check_page, write_page
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.options import SWEEP_BUDGETS

Budgets = Annotated[
    str | None,
    typer.Option("--budgets", metavar="LIST", help="Budgets to try.  [default: 5%,10%,25%,50%,75%,100%]"),
]
HtmlPath = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Draw the curves into one HTML file.")]
WorkPath = Annotated[
    str | None,
    typer.Option("--work", metavar="DIR", help="Where two outputs fit at a time.  [default: for temporary files]"),
]
Evaluate = Annotated[str | None, typer.Option("--evaluate", metavar="CMD", help=EVALUATE_HELP)]


EXAMPLES = (
    "mergepipe sweep recipe.yml --html sweep.html",
    "mergepipe sweep recipe.yml --budgets 5%,10%,20%",
    "mergepipe sweep recipe.yml --budgets 0,10% --evaluate 'python loss.py {}'",
)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add_command(app, sweep, section="Budgets", examples=EXAMPLES)


def sweep(
    context: typer.Context,
    recipe: RecipePath,
    *,
    budgets: Budgets = None,
    planning: PlanFlags,
    seed: Seed = 0,
    work: WorkPath = None,
    evaluate: Evaluate = None,
    html: HtmlPath = None,
    machine: RunFlags,
    allow_dropped: AllowDropped = None,
    strict: Strict = False,
    lenient: Lenient = False,
    printing: ReportFlags,
) -> None:
    """Measure bytes, time and losses of RECIPE at several budgets.

    It is merged in full once, then under each budget; the merged models are not kept. What is lost is
    the loss that --evaluate prints, or the distance from the full merge, with the policy `random`
    beside the chosen one. Of samples the distance tells nothing, and is not measured.
    """
    session: Session = context.obj
    options = machine.options()
    plan = planning.options(strict=strict, lenient=lenient)
    if html is not None:
        check_page(Path(html))
    from mergepipe import api

    with progress_shown(session, silent=printing.silent) as on_progress:
        report = api.sweep(
            recipe,
            SWEEP_BUDGETS if budgets is None else budgets.split(","),
            seed=seed,
            work=work,
            evaluate=evaluate,
            allow_dropped=allow_dropped or (),
            plan=plan,
            options=options,
            on_progress=on_progress,
        )
    if html is not None:
        from mergepipe.cli.render.sweep_page import sweep_page

        write_page(Path(html), sweep_page(report, datetime.now(UTC)))
    from mergepipe.cli.render.sweep import sweep_table

    print_report(report, sweep_table, as_json=printing.as_json, quiet=printing.quiet)
