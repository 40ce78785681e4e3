"""The Python API of tailor: inspect, check, compose, average, export, diff, and recipes of usual compositions.

The fields of `options` are keywords, too. `on_progress` is called with a `Progress`, from the calling thread; the
public `progress_bar` shows it. What fails raises a `MergePipeError`, with all problems that were found, and leaves
nothing behind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.core.flags import public_call, several
from mergepipe.core.rounding import RoundingMode
from mergepipe.errors import LimitError, did_you_mean, invalid_option
from mergepipe.options import AverageOptions, ComposeOptions, ExportOptions, ModelOptions
from mergepipe.recipes.model_location import locate_model
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import ANYWHERE, folder_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mergepipe.reports import ProgressCallback
    from mergepipe.storage.contract import Store
    from mergepipe.tailor.composition import CompositionReport
    from mergepipe.tailor.inspection import DiffReport, InspectReport
    from mergepipe.tailor.recipes import AverageRequest

DEFAULT_ENDS = 2


def inspect(*paths: str | Path) -> InspectReport:
    """Say what training checkpoints hold and whether parts of them fit together; reads no tensor data.

    Raises:
        MergePipeError: a path is no training checkpoint that can be read.
    """
    from mergepipe.tailor.inspection import inspect_checkpoints

    store = _store()
    return inspect_checkpoints(store, [store.pin(_checkpoint(store, path)) for path in paths])


def check(recipe: str | Path, *, state_from: str | Path | None = None, export: str | None = None) -> CompositionReport:
    """Say what a composition would take from where, and how old each part is; reads no tensor data."""
    return _composed(recipe, None, ComposeOptions(state_from=state_from, export=export))


@public_call(ComposeOptions)
def compose(
    recipe: str | Path,
    out: str | Path,
    *,
    options: ComposeOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> CompositionReport:
    """Compose a training checkpoint as the recipe says and publish it at `out`, complete or not at all."""
    made = ComposeOptions.of(options, fields)
    return _composed(recipe, folder_place(out, ANYWHERE), made, on_progress)


def _composed(
    recipe: str | Path, out: Location | None, options: ComposeOptions, on_progress: ProgressCallback | None = None
) -> CompositionReport:
    """Compose, or average where the recipe says so; options of compositions are refused then."""
    from mergepipe.tailor.composition import compose as run_composition
    from mergepipe.tailor.recipes import load_average

    request = load_average(Location.of(recipe), _store())
    if request is None:
        return run_composition(Location.of(recipe), out, options, on_progress)
    composing = {"--state-from": options.state_from is not None, "--export": options.export is not None}
    refused = [option for option, is_given in composing.items() if is_given]
    if refused:
        raise invalid_option(refused[0], "the recipe averages checkpoints", "leave it out")
    from mergepipe.tailor.averaging import average as run_average

    return run_average(request, out, options, on_progress)


@public_call(AverageOptions)
def average(
    checkpoints: Sequence[str | Path],
    out: str | Path,
    *,
    options: ModelOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> CompositionReport:
    """Average checkpoints of one run, a pass over all of them, and publish the result at `out`.

    Of checkpoints with an adapter of PEFT beside its base the models are averaged that these make together.
    """
    made = AverageOptions.of(options, fields)
    from mergepipe.tailor.averaging import average as run

    return run(_request(checkpoints, made), folder_place(out, ANYWHERE), made, on_progress)


@public_call(ExportOptions)
def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    options: ExportOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> CompositionReport:
    """Make a Hugging Face model of a training checkpoint and publish it at `out`: the average of one.

    Weights are the float32 masters where there are any, rounded once, else the model's own. An adapter of PEFT beside
    its base is folded into it, or written alone (`adapter`).

    Args:
        checkpoint: of any format; of a partial one, all weights must be there.
    """
    made = ExportOptions.of(options, fields)
    from mergepipe.tailor.averaging import average as run

    request = replace(_request([checkpoint], made.common(AverageOptions)), is_adapter=made.adapter)
    return run(request, folder_place(out, ANYWHERE), made, on_progress)


def _request(checkpoints: Sequence[str | Path], options: AverageOptions) -> AverageRequest:
    """Return what to average, as the options say."""
    from mergepipe.tailor.recipes import AverageRequest, OptimizerState, out_dtype, weights_of

    store = _store()
    weights = options.weights
    return AverageRequest(
        tuple(_checkpoint(store, path) for path in several(checkpoints)),
        weights_of(weights) if isinstance(weights, str) else tuple(map(float, weights)),
        options.alpha,
        OptimizerState(options.optimizer),
        out_dtype(options.dtype, "--dtype"),
        None if options.config is None else absolute(options.config),
        None if options.adapter_config is None else absolute(options.adapter_config),
        options.lora_alpha,
        is_strict=options.strict,
        is_stochastic=options.rounding == RoundingMode.STOCHASTIC,
    )


def diff(first: str | Path, second: str | Path, *, on_progress: ProgressCallback | None = None) -> DiffReport:
    """Compare two checkpoints unit by unit: relative change of weights, exp_avg and exp_avg_sq.

    Raises:
        MergePipeError: one cannot be read, or they are of different models.
    """
    from mergepipe.tailor.formats import open_training_checkpoint
    from mergepipe.tailor.inspection import diff_checkpoints

    store = _store()
    a, b = (open_training_checkpoint(store, store.pin(_checkpoint(store, path))) for path in (first, second))
    return diff_checkpoints(store, a, b, on_progress)


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

    Args:
        strategy: `parity`, `filter`, `paper-parity`, `paper-filter` or `latest`, over the newest full checkpoints.
        from_log: a log of partial saves: each unit comes from its newest save at or before step `at`.
        at: the last step to look at; default, any.
        ends: layers at either end that the filters take from the newest checkpoint.
        folder: where the recipe will lie; its paths are relative to that.

    Raises:
        RecipeError: not exactly one of `strategy` and `from_log`; a log without `at`; an unknown strategy.
        NotFoundError: the run has no checkpoint to take units from.
    """
    from mergepipe.core.display import printable
    from mergepipe.core.units import shown_number
    from mergepipe.tailor.inspection import STRATEGIES, composition_from_log_file, find_checkpoints, strategy_recipe

    if (strategy is None) == (from_log is None):
        raise invalid_option("--strategy", "give either --strategy or --from-log")
    if ends < 0:
        message = f"{shown_number(ends)} was given"
        raise LimitError.of("option.out-of-range", "--ends", message, "give a number of layers")
    store = _store()
    place = _checkpoint(store, run)
    if strategy is not None:
        if strategy not in STRATEGIES:
            raise invalid_option("--strategy", f"'{strategy}' is not known", did_you_mean(strategy, STRATEGIES))
        return strategy_recipe(strategy, find_checkpoints(store, place, at), ends, absolute(folder))
    if from_log is None or at is None:
        raise invalid_option("--at", "--from-log needs the step to compose")
    composition = composition_from_log_file(store, absolute(from_log), place, at)
    notes = "".join(f"# {printable(note)}\n" for note in composition.notes)
    return notes + composition.to_yaml(absolute(folder))


def absolute(path: str | Path) -> Location:
    """A location that does not depend on the working directory; links are kept."""
    return Location.of(path).normal()


def _checkpoint(store: Store, path: str | Path) -> Location:
    """The place of a checkpoint that a caller names; see `locate_model`."""
    return locate_model(store, path).normal()


def _store() -> Store:
    from mergepipe.storage.stores import Stores

    return Stores()
