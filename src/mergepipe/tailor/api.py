"""The Python API of tailor: inspect, check, compose, average, export, diff, and recipes of usual compositions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.errors import LimitError, RecipeError, did_you_mean
from mergepipe.options import AverageOptions, ComposeOptions, ExportOptions
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mergepipe.checkpoints.packed import UnpackedView
    from mergepipe.tailor.average_recipe import AverageRequest
    from mergepipe.tailor.checkpoint_diff import DiffReport
    from mergepipe.tailor.composition import CompositionReport, OnProgress
    from mergepipe.tailor.inspect import InspectReport

DEFAULT_ENDS = 2


def inspect(*paths: str | Path) -> InspectReport:
    """Say what training checkpoints hold and whether parts of them fit together; reads no tensor data.

    Raises:
        MergePipeError: a path is no training checkpoint that can be read.
    """
    from mergepipe.tailor.inspect import inspect_checkpoints

    store = _store()
    return inspect_checkpoints(store, [store.pin(absolute(path)) for path in paths])


def check(
    recipe: str | Path,
    *,
    state_from: str | Path | None = None,
    export: str | None = None,
) -> CompositionReport:
    """Say what a composition would take from where, and how old each part is; reads no tensor data.

    Raises:
        MergePipeError: every problem found, in one error.
    """
    made = ComposeOptions(state_from=state_from, export=export)
    from mergepipe.tailor.composition import check_recipe

    request = _average_request(recipe, made)
    if request is not None:
        from mergepipe.tailor.averaging import check_average

        return check_average(request)
    return check_recipe(Location.of(recipe), made)


def compose(
    recipe: str | Path,
    out: str | Path,
    *,
    options: ComposeOptions | None = None,
    on_progress: OnProgress | None = None,
    **fields: Any,
) -> CompositionReport:
    """Compose a training checkpoint as the recipe says and publish it at `out`, complete or not at all.

    Args:
        options: see `ComposeOptions`; its fields are keywords, too.
        on_progress: called with (phase, bytes done, bytes in all), from the calling thread.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind.
    """
    made = ComposeOptions.of(options, fields)
    from mergepipe.tailor.composition import compose as run

    request = _average_request(recipe, made)
    if request is not None:
        from mergepipe.tailor.averaging import average as run_average

        return run_average(request, Path(out), made, on_progress or (lambda *_: None))
    return run(Location.of(recipe), Path(out), made, on_progress or (lambda *_: None))


def average(
    checkpoints: Sequence[str | Path],
    out: str | Path,
    *,
    options: ExportOptions | None = None,
    on_progress: OnProgress | None = None,
    **fields: Any,
) -> CompositionReport:
    """Average checkpoints of one run, a pass over all of them, and publish the result at `out`.

    Args:
        options: see `AverageOptions`; its fields are keywords, too.
        on_progress: called with (phase, bytes done, bytes in all), from the calling thread.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind.
    """
    made = AverageOptions.of(options, fields)
    from mergepipe.tailor.average_recipe import AverageRequest, OptimizerState, out_dtype, weights_of
    from mergepipe.tailor.averaging import average as run

    request = AverageRequest(
        tuple(absolute(path) for path in checkpoints),
        weights_of(made.weights) if isinstance(made.weights, str) else tuple(map(float, made.weights)),
        made.alpha, OptimizerState(made.optimizer), out_dtype(made.dtype, "--dtype"),
        None if made.config is None else absolute(made.config),
    )  # fmt: skip
    return run(request, Path(out), made, on_progress or (lambda *_: None))


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    options: ExportOptions | None = None,
    on_progress: OnProgress | None = None,
    **fields: Any,
) -> CompositionReport:
    """Make a Hugging Face model of a training checkpoint and publish it at `out`: the average of one.

    Weights are the float32 masters where there are any, rounded once, else the model's own.

    Args:
        checkpoint: of any format; of a partial one, all weights must be there.
        options: see `ExportOptions`; its fields are keywords, too.
        on_progress: called with (phase, bytes done, bytes in all), from the calling thread.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind.
    """
    return average([checkpoint], out, options=ExportOptions.of(options, fields), on_progress=on_progress)


def _average_request(recipe: str | Path, options: ComposeOptions) -> AverageRequest | None:
    """Read a recipe that averages; None where it composes. Options that exclude each other are refused."""
    from mergepipe.tailor.average_recipe import load_average

    composing = {"--state-from": options.state_from is not None, "--export": options.export is not None}
    request = load_average(Location.of(recipe), _store())
    refused = [option for option, is_given in composing.items() if is_given and request is not None]
    if refused:
        raise RecipeError.of("option.invalid", refused[0], "the recipe averages checkpoints", "leave it out")
    return request


def diff(first: str | Path, second: str | Path, *, on_bytes: Callable[[int], None] | None = None) -> DiffReport:
    """Compare two checkpoints unit by unit: relative change of weights, exp_avg and exp_avg_sq.

    Raises:
        MergePipeError: one cannot be read, or they are of different models.
    """
    from mergepipe.tailor.checkpoint_diff import diff_checkpoints
    from mergepipe.tailor.formats.registry import open_training_checkpoint

    store = _store()
    a, b = (open_training_checkpoint(store, store.pin(absolute(path))) for path in (first, second))
    return diff_checkpoints(store, a, b, on_bytes or (lambda *_: None))


def recipe(
    run: str | Path,
    *,
    strategy: str | None = None,
    from_log: str | Path | None = None,
    at: int | None = None,
    ends: int = DEFAULT_ENDS,
    folder: str | Path = ".",
) -> str:
    """Write a recipe over a run's checkpoints: by a strategy, or as its log of partial saves implies.

    What the user should know stands in comments on top.

    Raises:
        RecipeError: not exactly one of `strategy` and `from_log`; a log without `at`; an unknown strategy.
        MergePipeError: as `recipe_text` and `recipe_from_log`.
    """
    from mergepipe.tailor.recipe import Strategy

    if (strategy is None) == (from_log is None):
        raise RecipeError.of("option.invalid", "--strategy", "give either --strategy or --from-log")
    if strategy is not None:
        strategies = [item.value for item in Strategy]
        if strategy not in strategies:
            raise RecipeError.of(
                "option.invalid", "--strategy", f"'{strategy}' is not known", did_you_mean(strategy, strategies)
            )
        return recipe_text(strategy, run, at=at, ends=ends, folder=folder)
    if from_log is None or at is None:
        raise RecipeError.of("option.invalid", "--at", "--from-log needs the step to compose")
    from mergepipe.core.escaping import printable

    text, notes = recipe_from_log(from_log, run, at=at, folder=folder)
    return "".join(f"# {printable(note)}\n" for note in notes) + text


def recipe_text(
    strategy: str, run: str | Path, *, at: int | None = None, ends: int = DEFAULT_ENDS, folder: str | Path = "."
) -> str:
    """Write the recipe of a strategy over a run's newest checkpoints.

    Args:
        strategy: `parity`, `filter`, `paper-parity`, `paper-filter` or `latest`.
        at: the last step to look at; default, any.
        ends: layers at either end that the filters take from the newest checkpoint.
        folder: where the recipe will lie; its paths are relative to that.
    """
    from mergepipe.core.sizes import shown_number
    from mergepipe.tailor.recipe import Strategy, find_checkpoints, strategy_recipe

    if ends < 0:
        raise LimitError.of(
            "option.out-of-range", "--ends", f"{shown_number(ends)} was given", "give a number of layers"
        )

    checkpoints = find_checkpoints(_store(), absolute(run), at)
    return strategy_recipe(Strategy(strategy), checkpoints, ends, Location.of(folder))


def recipe_from_log(
    log: str | Path, run: str | Path, *, at: int, folder: str | Path = "."
) -> tuple[str, tuple[str, ...]]:
    """Write the recipe that a log of partial saves implies: each unit from its newest save at or before step `at`.

    Returns the recipe (paths relative to `folder`) and notes for the user.
    """
    from mergepipe.errors import NotFoundError
    from mergepipe.tailor.log_recipe import composition_from_log_file
    from mergepipe.tailor.recipe import find_checkpoints

    store = _store()
    try:
        units = tuple(find_checkpoints(store, absolute(run), at)[0].units.parameters)
    except NotFoundError:  # the log itself says what is missing
        units = None
    composition = composition_from_log_file(store, absolute(log), absolute(run), at, units=units)
    return composition.to_yaml(absolute(folder)), composition.notes


def absolute(path: str | Path) -> Location:
    """A location that does not depend on the working directory; links are kept."""
    return Location.of(path).normal()


def _store() -> UnpackedView:
    """Make the store that sources are read from, packed ones as their originals."""
    from mergepipe.checkpoints.packed import UnpackedView
    from mergepipe.storage.stores import Stores

    return UnpackedView(Stores())
