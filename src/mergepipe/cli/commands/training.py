"""Commands on training checkpoints: `tailor inspect`, `export`, `average`, `check`, `compose`, `recipe`, `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import click

from mergepipe.cli.app import OutOption, OutPath, RecipePath, command
from mergepipe.cli.commands.merging import RECIPE_ENDINGS, refuse_swapped
from mergepipe.cli.printing import DEBUG
from mergepipe.cli.progress import OnProgress
from mergepipe.core.display import Displayed, printable_lines
from mergepipe.core.flags import Argument, Flag
from mergepipe.options import EXPORT, STATE_FROM, STRATEGIES, AverageOptions, ComposeOptions, ExportOptions
from mergepipe.tailor import api

Checkpoints: TypeAlias = Annotated[list[str], Argument("CKPT...", "Training checkpoints: directories.")]
Checkpoint: TypeAlias = Annotated[str, Argument("CKPT", "A training checkpoint: a directory, or a file.")]


@command("mergepipe tailor inspect run/checkpoint-400 run/checkpoint-500", name="tailor inspect")
def inspect(checkpoints: Checkpoints) -> Displayed:
    """Print the contents of training checkpoints, and whether parts of them fit together.

    Reads no tensor data.
    """
    return api.inspect(*checkpoints)


@command("mergepipe tailor check tailor.yml", name="tailor check")
def check(
    recipe: RecipePath,
    *,
    state_from: Annotated[str | None, STATE_FROM] = None,
    export: Annotated[str | None, EXPORT] = None,
) -> Displayed:
    """Print the source and the age of each part of a composition.

    Reads no tensor data. Lists all problems at once.
    """
    return api.check(recipe, state_from=state_from, export=export)


@command("mergepipe tailor compose tailor.yml composed/", name="tailor compose")
def compose(recipe: RecipePath, out: OutPath, *, options: ComposeOptions, on_progress: OnProgress) -> Displayed:
    """Compose a training checkpoint into OUT, as RECIPE says.

    Slices of a recipe put layers, with their optimizer state, in other positions or in another number. OUT appears when
    it is complete and has been compared with its sources, or not at all.
    """
    refuse_swapped(recipe, out, RECIPE_ENDINGS)
    return api.compose(recipe, out, options=options, on_progress=on_progress)


@command("mergepipe tailor average run/checkpoint-* -o averaged/", name="tailor average")
def average(checkpoints: Checkpoints, *, out: OutOption, options: AverageOptions, on_progress: OnProgress) -> Displayed:
    """Average checkpoints of one run: a model, or a checkpoint to resume from.

    Reads checkpoints of the Trainer, DeepSpeed and torch DCP directly, each byte once, in bounded memory.
    """
    return api.average(checkpoints, out, options=options, on_progress=on_progress)


@command("mergepipe tailor export run/checkpoint-500 -o model/", name="tailor export")
def export(checkpoint: Checkpoint, *, out: OutOption, options: ExportOptions, on_progress: OnProgress) -> Displayed:
    """Export an ordinary model from a training checkpoint, in bounded memory.

    Weights are the float32 masters if there are any, rounded once. CKPT may have any format that tailor reads.
    """
    return api.export(checkpoint, out, options=options, on_progress=on_progress)


@command("mergepipe tailor recipe --run run/ --strategy parity > tailor.yml", name="tailor recipe")
def recipe(
    *,
    run: Annotated[str, Flag("The directory that holds the run's checkpoints.", metavar="DIR")],
    strategy: Annotated[
        str | None,
        Flag(
            "For full checkpoints: parity, filter, paper-parity, paper-filter or latest.",
            metavar="NAME",
            choices=STRATEGIES,
        ),
    ] = None,
    from_log: Annotated[
        str | None, Flag("For partial checkpoints: make the recipe from this log.", metavar="LOG")
    ] = None,
    at: Annotated[int | None, Flag("Use checkpoints up to this step.", metavar="STEP")] = None,
    ends: Annotated[int, Flag("Layers at either end that the filter strategies save each time.", metavar="K")] = 2,
    debug: Annotated[bool, DEBUG] = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Print a recipe that composes the newest checkpoints of a run.

    Its paths are relative to the working directory: save the recipe there.
    """
    text = api.recipe(run, strategy=strategy, from_log=from_log, at=at, ends=ends, folder=Path.cwd())
    print(printable_lines(text), end="")


@command("mergepipe tailor diff run/checkpoint-400 composed/", name="tailor diff")
def diff(context: click.Context, first: Checkpoint, second: Checkpoint) -> Displayed:
    """Print how much two checkpoints differ, unit by unit: weights, exp_avg, exp_avg_sq.

    Prints relative changes `|B - A| / |A|`. Reads every byte of both once, in bounded memory.
    """
    return api.diff(first, second, on_progress=lambda _: context.obj.report())
