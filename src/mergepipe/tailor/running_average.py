"""Fold the finished checkpoints of a training run into one running average, in the background, each once."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.blocks import F32
from mergepipe.core.display import yaml_document
from mergepipe.errors import RecipeError, invalid_option, mismatched
from mergepipe.options import ExportOptions
from mergepipe.recipes.yaml_source import parse_yaml
from mergepipe.snapshots.manifest import CompositeManifest, read_composite
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores
from mergepipe.tailor.averaging import Averaging, check_whole, views_of
from mergepipe.tailor.checkpoint import WEIGHT, StoredState, TrainingCheckpoint
from mergepipe.tailor.composition import check_out, check_same_run, publish
from mergepipe.tailor.formats.registry import open_source_checkpoint
from mergepipe.tailor.formats.weights import WEIGHTS_FORMAT
from mergepipe.tailor.recipes import AVERAGE_KEY, DEFAULT_ALPHA, AverageRequest, normalised, scheme_weights
from mergepipe.tailor.saving.frameworks import current_ranks, trainer_callback_base


class Averager:
    """Keeps the average of a run's checkpoints so far as a float32 model at `out`. A context manager, which waits.

    Each fold replaces the folder at once, with its record of the steps in it: a killed process leaves it before or
    after a fold, and the next one goes on from there. A step that is not above the newest in it is left out.

    Rounding: once to float32 a fold, so n folds are within n * 2**-24 of the largest summand.

    Args:
        out: a folder of this machine.
        shape: `sma`, `ema`, `wma`, or a decay's of WSM, which needs `count`.
        alpha: of `ema`; default 0.2.
        count: the number of checkpoints of the whole average; later ones are left out.
        config: a folder that lends configuration and tokenizer; default, the checkpoint itself.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        shape: str = "sma",
        alpha: float | None = None,
        count: int | None = None,
        config: str | Path | None = None,
    ) -> None:
        if alpha is not None and shape != "ema":
            raise RecipeError.of("option.conflict", "alpha", "only the shape 'ema' takes it", "leave it out")
        if count is None and shape.startswith("decay-"):
            raise invalid_option("count", f"'{shape}' needs it", "give the number of checkpoints")
        if count is not None and count < 1:
            raise invalid_option("count", f"{count} was given", "give a number above 0")
        self._out = Location.local(Path(out).absolute())
        self._shape = shape
        self._alpha = DEFAULT_ALPHA if alpha is None else alpha
        self._count = count
        self._config = None if config is None else Location.of(config).normal()
        self._weights(1)  # refuses an unknown shape or alpha before training starts
        self._pool = ThreadPoolExecutor(1, "mergepipe-average")
        self._folding: Future[bool] | None = None

    def __enter__(self) -> Averager:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def fold(self, checkpoint: str | Path) -> Future[bool]:
        """Fold a finished checkpoint in the background, after the one before; the result says whether it was new.

        Raises:
            MergePipeError: the fold before failed; this one is not begun.
        """
        self.wait()
        self._folding = self._pool.submit(self._fold, Location.of(checkpoint).normal())
        return self._folding

    def wait(self) -> None:
        """Wait for the fold that runs.

        Raises:
            MergePipeError: it failed. Raised once; the average is as it was before it.
        """
        folding, self._folding = self._folding, None
        if folding is not None:
            folding.result()

    def callback(self) -> Any:
        """Return a callback of the transformers Trainer that folds each checkpoint once all ranks have saved it.

        Rank 0 folds. It waits for the fold before, and raises its error, ahead of the next save and at the end of
        training: a save may delete older checkpoints.
        """
        averager = self
        base: Any = trainer_callback_base()

        class FoldCheckpoints(base):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if control.should_save:
                    averager.wait()

            on_epoch_end = on_step_end

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                current_ranks().gather(None)
                if state.is_world_process_zero:
                    averager.fold(Path(args.output_dir) / f"checkpoint-{state.global_step}")

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                averager.wait()

        return FoldCheckpoints()

    def _weights(self, n_checkpoints: int) -> tuple[float, ...]:
        """Return the weights of the first checkpoints in the average of them; the newest's is last."""
        weights = scheme_weights(self._shape, self._count or n_checkpoints, self._alpha)
        return normalised(weights[:n_checkpoints], "shape")

    def _fold(self, checkpoint: Location) -> bool:
        started = time.perf_counter()
        store = Stores()
        record = self._record(store)
        done = record.average.steps if record is not None and record.average is not None else ()
        newest = open_source_checkpoint(store, checkpoint)
        if (done and newest.step <= done[-1]) or (self._count is not None and len(done) >= self._count):
            return False
        options = ExportOptions(force=True)
        check_out(self._out, [newest.path], options)
        weights = self._weights(len(done) + 1)
        request = AverageRequest((newest.path,), dtype=F32, config=self._config)
        views, notice = views_of(store, newest, self._config)
        averaging = Averaging(store, request, (newest,), (1.0,), views, notice)
        check_whole(averaging, newest)
        if done:
            running = self._running(averaging, done[-1])
            check_same_run(store, (running, newest))
            averaging = replace(averaging, sources=(running, newest), weights=(1 - weights[-1], weights[-1]))
        averaging = replace(
            averaging, folded=tuple(zip((*done, newest.step), weights, strict=True)), scheme=self._shape
        )
        job = averaging.job(_recipe(record, newest.path, weights), self._out)
        publish(store, job, self._out, options, lambda *_: None, started)
        return True

    def _record(self, store: Stores) -> CompositeManifest | None:
        """Read the record of the average so far, which must be of these weights; None where there is nothing yet."""
        if store.stat(self._out) is None:
            return None
        record = read_composite(store, self._out)
        average = record.average
        if average is None or not average.steps or len(average.steps) != len(average.weights):
            raise mismatched(self._out, "is no running average", "name another folder")
        n_checkpoints = len(average.steps)
        wanted = self._weights(n_checkpoints) if self._count is None or n_checkpoints <= self._count else ()
        is_same = average.scheme == self._shape and len(wanted) == n_checkpoints
        if not is_same or not all(
            math.isclose(a, b, abs_tol=1e-9) for a, b in zip(wanted, average.weights, strict=True)
        ):
            raise mismatched(
                self._out,
                f"averages {n_checkpoints} checkpoints by '{average.scheme}' with other weights than "
                f"'{self._shape}' gives", "name another folder, or give the same shape, alpha and count",
            )  # fmt: skip
        return record

    def _running(self, averaging: Averaging, step: int) -> TrainingCheckpoint:
        """Open the average so far as a checkpoint with the model's names."""
        newest, tensors = averaging.newest, open_checkpoint(averaging.store, self._out).tensors
        states = {}
        for name, view in averaging.views.items():
            tensor, shape = tensors.get(name), view.shape or averaging.shapes[view.stored]
            if tensor is None or len(tensors) != len(averaging.views) or tensor.shape != shape:
                held = f"shape {tensor.shape}" if tensor is not None else f"not among the {len(tensors)} averaged"
                message = f"{name} has shape {shape}, in {self._out}: {held}"
                raise mismatched(newest.path, message, "an average takes checkpoints of one model")
            (entry,) = tensor.stored
            states[name, WEIGHT] = StoredState.whole(name, WEIGHT, entry)
        return replace(newest, path=self._out, root=self._out, format=WEIGHTS_FORMAT, step=step, states=states)


def _recipe(record: CompositeManifest | None, checkpoint: Location, weights: tuple[float, ...]) -> str:
    """Return the recipe that averages all these checkpoints at once."""
    earlier: Any = parse_yaml(Location.parse("recipe"), record.recipe).root if record is not None else {}
    paths = [*map(str, earlier.get(AVERAGE_KEY, {}).get("checkpoints", [])), str(checkpoint)]
    content = {"checkpoints": paths, "weights": list(weights), "dtype": F32.recipe_name}
    return yaml_document({AVERAGE_KEY: content}, width=120)
