"""`mergepipe analyze`: fill the catalog with what plans are made from."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import (
    AsJson,
    BasePath,
    BlockElements,
    Debug,
    ExpertPaths,
    Home,
    Memory,
    PackPath,
    Quiet,
    Threads,
)
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.sizes import optional_size
from mergepipe.options import RunOptions

Probe = Annotated[
    str | None,
    typer.Option("--probe", metavar="SHARE", help="Read only this share of every block (1%, 0.01) and estimate."),
]
Densities = Annotated[
    list[float] | None,
    typer.Option("--density", metavar="SHARE", help="Work out this magnitude cut too; may be given several times."),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("analyze")(analyze)


def analyze(
    context: typer.Context,
    base: BasePath,
    experts: ExpertPaths,
    *,
    probe: Probe = None,
    density: Densities = None,
    block_elements: BlockElements = None,
    pack: PackPath = None,
    home: Home = None,
    threads: Threads = None,
    memory: Memory = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Read each EXPERT once against BASE and keep what plans need.

    What is known of unchanged files is not read again. An interrupted analysis is resumed.
    """
    session: Session = context.obj
    options = RunOptions(threads=threads, memory_bytes=optional_size(memory, "--memory"), home=home)
    probe_fraction = 0.0 if probe is None else parse_share(probe, "--probe")
    from mergepipe import api

    with progress_shown(session, silent=quiet or as_json) as on_progress:
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

    print_report(report, analyze_table, as_json=as_json, quiet=quiet)


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
