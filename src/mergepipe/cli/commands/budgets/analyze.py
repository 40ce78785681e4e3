"""`mergepipe analyze`: fill the catalog with what plans are made from."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import BlockElements, ExpertPart, ReportFlags, RunFlags
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.errors import RecipeError

Densities = Annotated[
    list[str] | None,
    typer.Option("--density", metavar="SHARE", help="Work out this magnitude cut too; may be given several times."),
]


OptionalBase = Annotated[
    str | None, typer.Argument(metavar="BASE", help="The base model: a directory or a .safetensors file.")
]
OptionalExperts = Annotated[
    list[str] | None, typer.Argument(metavar="EXPERT...", help="Models fine-tuned from it.", show_default=False)
]
ImportFrom = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="FILE", help="First take in what another machine exported; alone, only that. Repeatable."
    ),
]
ExportTo = Annotated[
    str | None,
    typer.Option("--export", metavar="FILE", help="Write what is known of the experts to FILE, for other machines."),
]

EXAMPLES = (
    "mergepipe analyze base/ expert-1/ expert-2/",
    "mergepipe analyze base/ expert-1/ --export mergepipe.stats",
    "mergepipe analyze --import part-1.stats --import part-2.stats",
    "mergepipe analyze base/ expert-*/ --part 2/4 --export part-2.stats",
)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add_command(app, analyze, section="Budgets", examples=EXAMPLES)


def analyze(
    context: typer.Context,
    base: OptionalBase = None,
    experts: OptionalExperts = None,
    *,
    density: Densities = None,
    block_elements: BlockElements = None,
    import_from: ImportFrom = None,
    export_to: ExportTo = None,
    part: ExpertPart = None,
    machine: RunFlags,
    printing: ReportFlags,
) -> None:
    """Read each EXPERT once against BASE and keep what plans need.

    What is known of unchanged files is not read again. An interrupted analysis is resumed.

    Statistics that are imported are used like an analysis of your own: import what you trust.
    """
    if base is None and import_from:
        _import_alone(import_from, machine, printing)
        return
    if base is None or not experts:
        missing = "BASE" if base is None else "EXPERT..."
        raise RecipeError.of("option.invalid", "", f"Missing argument '{missing}'", "see 'mergepipe analyze --help'")
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
            import_from=import_from or (),
            export_to=export_to,
            options=options,
            on_progress=on_progress,
        )
    from mergepipe.cli.render.merges import analyze_table

    print_report(report, analyze_table, as_json=printing.as_json, quiet=printing.quiet)


def _import_alone(files: list[str], machine: RunFlags, printing: ReportFlags) -> None:
    from mergepipe import api
    from mergepipe.cli.render.merges import import_table

    report = api.import_statistics(*files, home=machine.home)
    print_report(report, import_table, as_json=printing.as_json, quiet=printing.quiet)
