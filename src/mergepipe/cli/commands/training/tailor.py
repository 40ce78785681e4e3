"""`mergepipe tailor`: training checkpoints inspected, composed, averaged and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergepipe.cli.completion import choices
from mergepipe.cli.guard import Session
from mergepipe.cli.options import RECIPE_ENDINGS, Debug, PrintFlags, RecipePath, ReportFlags, refuse_swapped
from mergepipe.cli.registration import SectionedGroup, add_command
from mergepipe.cli.sizes import parse_size
from mergepipe.core.escaping import printable_lines

if TYPE_CHECKING:
    from mergepipe.tailor.composition import CompositionReport, OnProgress

Checkpoints = Annotated[list[str], typer.Argument(metavar="CKPT...", help="Training checkpoints: directories.")]
Checkpoint = Annotated[str, typer.Argument(metavar="CKPT", help="A training checkpoint: a directory.")]
OutPath = Annotated[str, typer.Argument(metavar="OUT", help="The directory to create.")]
StateFrom = Annotated[
    str | None,
    typer.Option("--state-from", metavar="CKPT", help="Take scheduler, random states and step from this one."),
]
Export = Annotated[
    str | None,
    typer.Option(
        "--export",
        metavar="FORMAT",
        autocompletion=choices("universal"),
        help="universal: write a DeepSpeed universal checkpoint (of ZeRO ones), for any number of ranks.",
    ),
]
Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Cap on buffers.  [default: 256MiB]")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT, if mergepipe made it.")]
SelfCheck = Annotated[
    str,
    typer.Option(
        "--self-check",
        metavar="HOW",
        autocompletion=choices("sampled", "full", "off"),
        help="Compare with the sources: sampled, full or off.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        autocompletion=choices("parity", "filter", "paper-parity", "paper-filter", "latest"),
        help="Of full checkpoints: parity, filter, paper-parity, paper-filter or latest.",
    ),
]
FromLog = Annotated[
    str | None, typer.Option("--from-log", metavar="LOG", help="Of partial checkpoints: what their log implies.")
]
AverageOut = Annotated[str, typer.Option("--out", "-o", metavar="OUT", help="The directory to create.")]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="HOW",
        autocompletion=choices("sma", "ema", "wma", "decay-linear", "decay-cosine", "decay-1-sqrt"),
        help="sma, ema, wma, decay-linear, decay-cosine, decay-1-sqrt, or numbers: 1,2,3.",
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option("--alpha", metavar="A", help="Of ema: a checkpoint's weight against those before it.  [default: 0.2]"),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="WHAT",
        autocompletion=choices("none", "last", "average"),
        help="none: write a model; last, average: a checkpoint to resume from, with these moments.",
    ),
]
OutDtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="Of a model: float32, bfloat16 or float16.  [default: as stored]"),
]
FilesFrom = Annotated[
    str | None,
    typer.Option("--files-from", metavar="DIR", help="Of a model: take configuration and tokenizer from here."),
]
Run = Annotated[str, typer.Option("--run", metavar="DIR", help="The directory that holds the run's checkpoints.")]
AtStep = Annotated[int | None, typer.Option("--at", metavar="STEP", help="Look at checkpoints up to this step.")]
Ends = Annotated[int, typer.Option("--ends", metavar="K", help="Layers at either end that the filters take new.")]

_THOROUGHNESS = ("sampled", "full", "off")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    group = typer.Typer(cls=SectionedGroup, rich_markup_mode=None, no_args_is_help=True)
    add_command(group, inspect, examples=("mergepipe tailor inspect run/checkpoint-400 run/checkpoint-500",))
    add_command(group, check, examples=("mergepipe tailor check tailor.yml",))
    add_command(group, compose, examples=("mergepipe tailor compose tailor.yml composed/",))
    add_command(group, average, examples=("mergepipe tailor average run/checkpoint-* -o averaged/",))
    add_command(group, recipe, examples=("mergepipe tailor recipe --run run/ --strategy parity > tailor.yml",))
    add_command(group, diff, examples=("mergepipe tailor diff run/checkpoint-400 composed/",))
    about = "Compose resumable training checkpoints of parts of several."
    app.add_typer(group, name="tailor", help=about, rich_help_panel="Training")


def inspect(
    checkpoints: Checkpoints,
    *,
    printing: PrintFlags,
) -> None:
    """Say what training checkpoints hold, and whether parts of them fit together.

    Reads no tensor data.
    """
    from mergepipe.cli.render.json import report_json
    from mergepipe.cli.render.tailor import inspect_table
    from mergepipe.tailor import api

    report = api.inspect(*checkpoints)
    print(report_json(report.to_json()) if printing.as_json else printable_lines(inspect_table(report)))


def check(
    recipe: RecipePath,
    *,
    state_from: StateFrom = None,
    export: Export = None,
    printing: PrintFlags,
) -> None:
    """Say what a composition would take from where, and how old each part is.

    Reads no tensor data, and lists everything that is wrong at once.
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
    state_from: StateFrom = None,
    export: Export = None,
    self_check: SelfCheck = "sampled",
    memory: Memory = None,
    force: Force = False,
    printing: ReportFlags,
) -> None:
    """Compose a training checkpoint as RECIPE says into the directory OUT.

    OUT appears when it is complete and has been compared with its sources, or not at all.
    """
    session: Session = context.obj
    refuse_swapped(recipe, out, RECIPE_ENDINGS)
    memory_bytes = None if memory is None else parse_size(memory, "--memory")
    _require(self_check, _THOROUGHNESS, "--self-check")
    from mergepipe.tailor import api

    with _progress_shown(session, silent=printing.silent) as on_progress:
        report = api.compose(
            recipe,
            out,
            state_from=state_from,
            export=export,
            self_check=self_check,
            memory_bytes=memory_bytes,
            force=force,
            on_progress=on_progress,
        )
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
    out: AverageOut,
    weights: Weights = "sma",
    alpha: Alpha = None,
    optimizer: Optimizer = "none",
    dtype: OutDtype = None,
    files_from: FilesFrom = None,
    self_check: SelfCheck = "sampled",
    memory: Memory = None,
    force: Force = False,
    printing: ReportFlags,
) -> None:
    """Average checkpoints of one run: a model, or a checkpoint to resume from.

    Reads the Trainer's, DeepSpeed's and torch DCP's checkpoints as they are, each byte once, in bounded memory.
    """
    session: Session = context.obj
    memory_bytes = None if memory is None else parse_size(memory, "--memory")
    _require(self_check, _THOROUGHNESS, "--self-check")
    from mergepipe.tailor import api

    with _progress_shown(session, silent=printing.silent) as on_progress:
        report = api.average(
            checkpoints,
            out,
            weights=weights,
            alpha=alpha,
            optimizer=optimizer,
            dtype=dtype,
            files_from=files_from,
            self_check=self_check,
            memory_bytes=memory_bytes,
            force=force,
            on_progress=on_progress,
        )
    if printing.as_json or not printing.quiet:
        _print(report, as_json=printing.as_json)


def recipe(
    *,
    run: Run,
    strategy: Strategy = None,
    from_log: FromLog = None,
    at: AtStep = None,
    ends: Ends = 2,
    debug: Debug = False,  # noqa: ARG001 - see inspect
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
    printing: PrintFlags,
) -> None:
    """Print how far two checkpoints are apart, unit by unit: weights, exp_avg, exp_avg_sq.

    Relative changes `|B - A| / |A|`. Reads every byte of both once, in bounded memory.
    """
    session: Session = context.obj
    from mergepipe.cli.render.json import report_json
    from mergepipe.cli.render.tailor import diff_table
    from mergepipe.tailor import api

    report = api.diff(first, second, on_bytes=lambda *_: session.interrupts.report())
    print(report_json(report.to_json()) if printing.as_json else printable_lines(diff_table(report)))


def _print(report: CompositionReport, *, as_json: bool) -> None:
    from mergepipe.cli.render.tailor import composition_json, composition_table

    print(composition_json(report) if as_json else printable_lines(composition_table(report)))


def _require(value: str, values: tuple[str, ...], option: str) -> None:
    if value not in values:
        from mergepipe.errors import RecipeError, did_you_mean

        raise RecipeError.of("option.invalid", option, f"'{value}' is not known", did_you_mean(value, values))
