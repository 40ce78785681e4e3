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
    PackAlong,
    Quiet,
    Threads,
)
from mergepipe.cli.running import optional_size, print_report, progress_shown
from mergepipe.options import RunOptions

Probe = Annotated[
    str | None,
    typer.Option("--probe", metavar="SHARE", help="Read only this share of every block (1%, 0.01) and estimate."),
]
Densities = Annotated[
    list[str] | None,
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
    pack: PackAlong = None,
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
    from mergepipe.planning.budget import parse_fraction

    probe_fraction = 0.0 if probe is None else parse_fraction(probe, "--probe")
    from mergepipe import api

    with progress_shown(session, silent=quiet or as_json) as on_progress:
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

    print_report(report, analyze_table, as_json=as_json, quiet=quiet)
