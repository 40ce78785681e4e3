"""`mergepipe delta` and `apply`: an expert as its differences from a base, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Force, Quiet
from mergepipe.cli.running import print_report, progress_shown, truthful_about

if TYPE_CHECKING:
    from mergepipe.workflows.deltas import DeltaReport

Base = Annotated[str, typer.Argument(metavar="BASE", help="The base model: a directory, or a file of weights.")]
Expert = Annotated[str, typer.Argument(metavar="EXPERT", help="The model that was fine-tuned from it.")]
Delta = Annotated[str, typer.Argument(metavar="DELTA", help="What `mergepipe delta` made.")]
Out = Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="The directory to create.")]
Exact = Annotated[bool, typer.Option("--exact", help="Store in full what no difference gives back bit for bit.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("delta")(delta)
    app.command("apply")(apply)


def delta(
    context: typer.Context,
    base: Base,
    expert: Expert,
    *,
    out: Out,
    exact: Exact = False,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Store EXPERT as what differs from BASE.

    DIR is bound to that base: it can be merged as an expert, and `mergepipe apply` gives EXPERT back.
    """
    session: Session = context.obj
    from mergepipe import differences

    with truthful_about(Path(out)), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = differences.make_delta(base, expert, out, exact=exact, force=force, on_progress=on_progress)
    _tell(report, "in its differences", as_json=as_json, quiet=quiet)


def apply(
    context: typer.Context,
    base: Base,
    delta: Delta,
    *,
    out: Out,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Make EXPERT again from BASE and DELTA.

    Every tensor is checked against the digest that DELTA remembers of it.
    """
    session: Session = context.obj
    from mergepipe import differences

    with truthful_about(Path(out)), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = differences.apply_delta(base, delta, out, on_progress=on_progress)
    _tell(report, "as a model", as_json=as_json, quiet=quiet)


def _tell(report: DeltaReport, how: str, *, as_json: bool, quiet: bool) -> None:
    from mergepipe.report.delta_tables import delta_table

    print_report(report, lambda each: delta_table(each, how), as_json=as_json, quiet=quiet)
