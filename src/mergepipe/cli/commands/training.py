"""Commands on training checkpoints: `tailor inspect`, `export`, `average`, `check`, `compose`, `recipe`, `diff`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mergepipe.cli.commands.merging import RECIPE_ENDINGS, refuse_swapped
from mergepipe.cli.printing import DEBUG, PrintOptions, ReportOptions, report_json
from mergepipe.cli.registration import OUT_HELP, OutPath, RecipePath, SectionedGroup, add_command
from mergepipe.core.escaping import printable_lines
from mergepipe.core.flags import Flag
from mergepipe.options import EXPORT, STATE_FROM, STRATEGIES, AverageOptions, ComposeOptions, ExportOptions

if TYPE_CHECKING:
    from mergepipe.cli.guard import Session
    from mergepipe.tailor.composition import CompositionReport, OnProgress

Checkpoints: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="CKPT...", help="Training checkpoints: directories.")
]
Checkpoint: TypeAlias = Annotated[
    str, typer.Argument(metavar="CKPT", help="A training checkpoint: a directory, or a file.")
]
OutOption: TypeAlias = Annotated[str, Flag(OUT_HELP, short="-o", metavar="OUT")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(cls=SectionedGroup, rich_markup_mode=None, no_args_is_help=True)
    add_command(group, inspect, "mergepipe tailor inspect run/checkpoint-400 run/checkpoint-500")
    add_command(group, check, "mergepipe tailor check tailor.yml")
    add_command(group, compose, "mergepipe tailor compose tailor.yml composed/")
    add_command(group, average, "mergepipe tailor average run/checkpoint-* -o averaged/")
    add_command(group, export, "mergepipe tailor export run/checkpoint-500 -o model/")
    add_command(group, recipe, "mergepipe tailor recipe --run run/ --strategy parity > tailor.yml")
    add_command(group, diff, "mergepipe tailor diff run/checkpoint-400 composed/")
    about = "Make a model of training checkpoints, or compose a resumable one of parts of several."
    app.add_typer(group, name="tailor", help=about, rich_help_panel="Training")


def inspect(
    checkpoints: Checkpoints,
    *,
    printing: PrintOptions,
) -> None:
    """Print the contents of training checkpoints, and whether parts of them fit together.

    Reads no tensor data.
    """
    from mergepipe.cli.render.tailor import inspect_table
    from mergepipe.tailor import api

    report = api.inspect(*checkpoints)
    print(report_json(report.to_json()) if printing.as_json else printable_lines(inspect_table(report)))


def check(
    recipe: RecipePath,
    *,
    state_from: Annotated[str | None, STATE_FROM] = None,
    export: Annotated[str | None, EXPORT] = None,
    printing: PrintOptions,
) -> None:
    """Print the source and the age of each part of a composition.

    Reads no tensor data. Lists all problems at once.
    """
    from mergepipe.tailor import api

    _print(
        api.check(recipe, state_from=state_from, export=export),
        as_json=printing.as_json,
    )


def compose(
    context: typer.Context,
    recipe: RecipePath,
    out: OutPath,
    *,
    options: ComposeOptions,
    printing: ReportOptions,
) -> None:
    """Compose a training checkpoint as RECIPE says into OUT.

    OUT appears when it is complete and has been compared with its sources, or not at all.
    """
    refuse_swapped(recipe, out, RECIPE_ENDINGS)
    from mergepipe.tailor import api

    _make(partial(api.compose, recipe, out, options=options), context.obj, printing)


def _make(make: Callable[..., CompositionReport], session: Session, printing: ReportOptions) -> None:
    """Make an output with its progress shown, and print the report."""
    with _progress_shown(session, silent=printing.silent) as on_progress:
        report = make(on_progress=on_progress)
    if printing.as_json or not printing.quiet:
        _print(report, as_json=printing.as_json)


@contextmanager
def _progress_shown(session: Session, *, silent: bool) -> Iterator[OnProgress]:
    """Show the progress of what copies while the context lasts."""
    from mergepipe.cli.progress import progress_shown
    from mergepipe.reports import Progress

    with progress_shown(session, silent=silent) as on_progress:
        yield lambda phase, done_bytes, total_bytes: on_progress(Progress(phase, done_bytes, total_bytes))


def average(
    context: typer.Context,
    checkpoints: Checkpoints,
    *,
    out: OutOption,
    options: AverageOptions,
    printing: ReportOptions,
) -> None:
    """Average checkpoints of one run: a model, or a checkpoint to resume from.

    Reads the Trainer's, DeepSpeed's and torch DCP's checkpoints as they are, each byte once, in bounded memory.
    """
    from mergepipe.tailor import api

    _make(partial(api.average, checkpoints, out, options=options), context.obj, printing)


def export(
    context: typer.Context,
    checkpoint: Checkpoint,
    *,
    out: OutOption,
    options: ExportOptions,
    printing: ReportOptions,
) -> None:
    """Make an ordinary model of a training checkpoint, in bounded memory.

    Weights are the float32 masters where there are any, rounded once. CKPT is of any format that tailor reads.
    """
    from mergepipe.tailor import api

    _make(partial(api.export, checkpoint, out, options=options), context.obj, printing)


def recipe(
    *,
    run: Annotated[str, Flag("The directory that holds the run's checkpoints.", metavar="DIR")],
    strategy: Annotated[
        str | None,
        Flag(
            "Of full checkpoints: parity, filter, paper-parity, paper-filter or latest.",
            metavar="NAME",
            choices=STRATEGIES,
        ),
    ] = None,
    from_log: Annotated[str | None, Flag("Of partial checkpoints: what their log implies.", metavar="LOG")] = None,
    at: Annotated[int | None, Flag("Look at checkpoints up to this step.", metavar="STEP")] = None,
    ends: Annotated[int, Flag("Layers at either end that the filters take new.", metavar="K")] = 2,
    debug: Annotated[bool, DEBUG] = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Print a recipe that composes the newest checkpoints of a run.

    Its paths are relative to the working directory: save it there.
    """
    from mergepipe.tailor import api

    text = api.recipe(run, strategy=strategy, from_log=from_log, at=at, ends=ends, folder=Path.cwd())
    print(printable_lines(text), end="")


def diff(
    context: typer.Context,
    first: Checkpoint,
    second: Checkpoint,
    *,
    printing: PrintOptions,
) -> None:
    """Print how far two checkpoints are apart, unit by unit: weights, exp_avg, exp_avg_sq.

    Relative changes `|B - A| / |A|`. Reads every byte of both once, in bounded memory.
    """
    from mergepipe.cli.render.tailor import diff_table
    from mergepipe.tailor import api

    report = api.diff(first, second, on_bytes=lambda *_: context.obj.interrupts.report())
    print(report_json(report.to_json()) if printing.as_json else printable_lines(diff_table(report)))


def _print(report: CompositionReport, *, as_json: bool) -> None:
    from mergepipe.cli.render.tailor import composition_json, composition_table

    print(composition_json(report) if as_json else printable_lines(composition_table(report)))
