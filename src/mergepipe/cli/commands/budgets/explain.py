"""`mergepipe explain`: which experts are where in a snapshot or a plan, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import AsJson, Debug, Home
from mergepipe.cli.printing import print_report

Subject = Annotated[
    str, typer.Argument(metavar="SNAPSHOT|PLAN", help="A snapshot's directory or sid, or a stored plan.")
]
TensorPattern = Annotated[
    str | None,
    typer.Option("--tensor", metavar="GLOB", help="Explain these tensors block by block: 'model.layers.0.*'."),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("explain")(explain)


def explain(
    subject: Subject,
    *,
    tensor: TensorPattern = None,
    home: Home = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Say which experts are where in a snapshot or a plan, and why.

    Reads no tensor data: a snapshot's mergepipe.json holds the answers.
    """
    from mergepipe import api

    explanation = api.explain(subject, tensor=tensor, home=home)
    from mergepipe.cli.render.plans import explain_table

    print_report(explanation, explain_table, as_json=as_json)
