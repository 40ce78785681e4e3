"""`mergepipe explain`: which experts are where in a snapshot or a plan, and why."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.options import Home, PrintFlags
from mergepipe.cli.page_files import check_page, write_page
from mergepipe.cli.printing import print_report
from mergepipe.cli.registration import add_command

Subject = Annotated[
    str, typer.Argument(metavar="SNAPSHOT|PLAN", help="A snapshot's directory or sid, or a stored plan.")
]
TensorPattern = Annotated[
    str | None,
    typer.Option("--tensor", metavar="GLOB", help="Explain these tensors block by block: 'model.layers.0.*'."),
]

HtmlPath = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Draw it into one HTML file as well.")]

EXAMPLES = (
    "mergepipe explain plan.json",
    "mergepipe explain merged/ --html merged.html",
    "mergepipe explain merged/ --tensor 'model.layers.0.*'",
)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add_command(app, explain, section="Budgets", examples=EXAMPLES)


def explain(
    subject: Subject,
    *,
    tensor: TensorPattern = None,
    html: HtmlPath = None,
    home: Home = None,
    printing: PrintFlags,
) -> None:
    """Say which experts are where in a snapshot or a plan, and why.

    Reads no tensor data: a snapshot's mergepipe.json holds the answers.
    """
    from mergepipe import api

    if html is not None:
        check_page(Path(html))
    explanation = api.explain(subject, tensor=tensor, home=home)
    if html is not None:
        from mergepipe.cli.render.explain_page import explain_page

        write_page(Path(html), explain_page(explanation, datetime.now(UTC)))
    from mergepipe.cli.render.plans import explain_table

    print_report(explanation, explain_table, as_json=printing.as_json)
