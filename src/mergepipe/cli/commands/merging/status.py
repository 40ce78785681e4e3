"""`mergepipe status`: which parts of an output are made."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import PLAN_ENDINGS, PrintFlags, refuse_swapped
from mergepipe.cli.printing import print_report
from mergepipe.cli.registration import add_command

PlanPath = Annotated[str, typer.Argument(metavar="PLAN", help="The plan that OUT is made by.")]
PartsOut = Annotated[str, typer.Argument(metavar="OUT", help="The directory that `run --part` makes.")]
Parts = Annotated[
    int | None, typer.Option("--parts", metavar="N", help="Tell which of N parts are missing.", show_default=False)
]

EXAMPLES = ("mergepipe status plan.json merged/ --parts 7",)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, status, section="Merging", examples=EXAMPLES)


def status(plan: PlanPath, out: PartsOut, *, parts: Parts = None, printing: PrintFlags) -> None:
    """Tell how far an OUT that is made in parts is.

    Reads records beside OUT, no inputs.
    """
    refuse_swapped(plan, out, PLAN_ENDINGS)
    from mergepipe import api
    from mergepipe.cli.render.parts import status_table

    print_report(api.parts_status(plan, out, n_parts=parts), status_table, as_json=printing.as_json)
