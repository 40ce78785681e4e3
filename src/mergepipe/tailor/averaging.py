"""Make a model of one checkpoint, or average several: into a model, a checkpoint to resume from, a running average."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mergepipe
from mergepipe.checkpoints.architecture_names import name_problems
from mergepipe.checkpoints.config_files import parse_config
from mergepipe.checkpoints.content_id import rounding_key
from mergepipe.checkpoints.directory import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAMES,
    find_sidecars,
    list_names,
    open_checkpoint,
    read_weight_file,
    stat_present,
)
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.blocks import F32, DType, DTypeKind
from mergepipe.core.display import yaml_document
from mergepipe.core.rounding import RoundingMode
from mergepipe.errors import (
    CorruptError,
    LimitError,
    NotFoundError,
    RecipeError,
    invalid_option,
    library,
    mismatched,
    unsupported,
)
from mergepipe.options import ExportOptions, TailorOptions
from mergepipe.recipes.output_config import shape_contradictions, with_dtype
from mergepipe.recipes.references import text_with_relative_paths
from mergepipe.recipes.yaml_source import parse_yaml
from mergepipe.reports import ProgressCallback
from mergepipe.snapshots.manifest import MANIFEST_NAME, AverageRecord, CompositeManifest, is_composite, read_composite
from mergepipe.snapshots.shards import TensorSpec, plan_shards
from mergepipe.snapshots.whole_output import check_place
from mergepipe.storage.contract import CONFIG_BYTES, Store, is_file
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores
from mergepipe.tailor.assignment import DERIVED_KINDS, Assignment, choose_steps, state_to_copy
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT, StoredState, TrainingCheckpoint, differences
from mergepipe.tailor.composition import CompositionReport, Job, check_same_run, publish
from mergepipe.tailor.composition_plan import SHARD_BYTES, CompositionPlan, SkeletonChanges, unpacked, weight_files
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Literal, Segment, is_rounded, patch_states
from mergepipe.tailor.formats import (
    open_source_checkpoint,
    open_source_checkpoints,
    open_training_checkpoint,
    refuse_unlisted,
)
from mergepipe.tailor.formats.hf_trainer import WEIGHTS_FORMAT, read_config
from mergepipe.tailor.model_names import TensorView, Views, tensor_views
from mergepipe.tailor.recipes import (
    AVERAGE_KEY,
    DEFAULT_ALPHA,
    AverageRequest,
    OptimizerState,
    normalised,
    scheme_weights,
)
from mergepipe.tailor.saving.frameworks import current_ranks
from mergepipe.tailor.unmerged_adapter import alone, find_adapter, folded, read_settings

MOST_CHECKPOINTS = 128
CARD_NAME = "README.md"


def average(
    request: AverageRequest, out: Location | None, options: TailorOptions, on_progress: ProgressCallback | None = None
) -> CompositionReport:
    """Average and publish; see `tailor.api.average` and, of one checkpoint, `tailor.api.export`.

    Without `out` only structure and step counters are read.
    """
    started = time.perf_counter()
    store = Stores()
    request, left_out = _without_composites(store, request)
    averaging = replace(open_averaging(store, request), left_out=left_out)
    if out is None:
        plan = averaging.plan()
        return CompositionReport(plan, None, None, time.perf_counter() - started, averaging.record)
    check_place(out, [source.path for source in averaging.sources], force=options.force)
    return publish(store, averaging.job(request.to_yaml(), out), out, options, on_progress, started)


def _without_composites(store: Store, request: AverageRequest) -> tuple[AverageRequest, tuple[Location, ...]]:
    """Leave out composites that stand among checkpoints of the run, as `run/checkpoint-*` matches them; return them."""
    for path in request.checkpoints:
        refuse_unlisted(path)
    composites = tuple(path for path in request.checkpoints if is_composite(store, path))
    if not composites or len(composites) == len(request.checkpoints):
        return request, ()
    if not isinstance(request.weights, str):
        message = "is a composite made by `mergepipe tailor`, and every checkpoint needs a weight"
        raise mismatched(composites[0], message, "leave it out, with its weight")
    checkpoints = tuple(path for path in request.checkpoints if path not in composites)
    return replace(request, checkpoints=checkpoints), composites


def open_averaging(store: Store, request: AverageRequest) -> Averaging:
    """Open the checkpoints, oldest first, and give each its weight; reads no tensor data."""
    count = len(request.checkpoints)
    if count < (1 if request.is_model else 2):
        hint = "an average to resume from needs two or more checkpoints" if count else "name one or more"
        raise invalid_option("checkpoints", f"{count} given", hint)
    if count > MOST_CHECKPOINTS:
        message = f"{count} given, at most {MOST_CHECKPOINTS} are averaged at once"
        raise LimitError.of("option.out-of-range", "checkpoints", message, "give every second one")
    if request.alpha is not None and request.weights != "ema":
        raise RecipeError.of("option.conflict", "--alpha", "only the weights 'ema' use it", "leave it out")
    rounding = RoundingMode.STOCHASTIC if request.is_stochastic else None
    for option, value in (("--dtype", request.dtype), ("--rounding", rounding), ("--config", request.config)):
        if value is not None and not request.is_model:
            message = f"a checkpoint to resume from (optimizer: {request.optimizer.value}) has that of the newest"
            raise RecipeError.of("option.conflict", option, message, "leave it out, or give optimizer 'none'")
    if isinstance(request.weights, str):
        scheme = scheme_weights(request.weights, count, DEFAULT_ALPHA if request.alpha is None else request.alpha)
    elif len(request.weights) != count:
        raise invalid_option("--weights", f"{len(request.weights)} weights for {count} checkpoints", "give one each")
    opened = open_source_checkpoints(store, request.checkpoints)
    order = sorted(range(count), key=lambda index: opened[index].step)
    ordered = tuple(opened[index] for index in order)
    sources, adapter = _prepared(store, request, ordered)
    for older, newer in pairwise(sources):
        if older.step == newer.step:
            raise mismatched(newer.path, f"is of step {newer.step}, and so is {older.path}", "give each step once")
        for reason in differences(sources[-1], older):
            raise mismatched(older.path, reason)
    check_same_run(store, sources)
    if not isinstance(request.weights, str):
        scheme = normalised([request.weights[index] for index in order], "--weights")
    newest = sources[-1]
    views, notice = views_of(store, newest, request.config) if adapter is None else _own_views(newest, adapter)
    averaging = Averaging(
        store, request, sources, scheme, views, notice,
        request.weights if isinstance(request.weights, str) else "given", adapter=adapter,
    )  # fmt: skip
    for source in sources:
        check_whole(averaging, source)
    return averaging


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The adapter of the newest checkpoint: what it is, and the content of its configuration, which `origin` gives."""

    text: str
    settings: bytes
    origin: str


def _prepared(
    store: Store, request: AverageRequest, sources: tuple[TrainingCheckpoint, ...]
) -> tuple[tuple[TrainingCheckpoint, ...], _Adapter | None]:
    """Fold the adapters of checkpoints into their bases, or return an adapter alone where the request says so.

    Raises:
        MergePipeError: an adapter cannot be folded, or there is none where one is asked for.
    """
    prepared: list[TrainingCheckpoint] = []
    newest: _Adapter | None = None
    for source in sources:
        adapter = find_adapter(source)
        if adapter is None:
            if request.is_adapter:
                raise unsupported(source.path, "has no adapter of PEFT", "leave out --adapter")
            prepared.append(source)
            continue
        if not request.is_model:
            message = f"holds {adapter.text}: the average of factors is not that of their products"
            raise unsupported(source.path, message, "leave out --optimizer, which averages the models")
        settings, origin = read_settings(store, adapter, request)
        newest = _Adapter(adapter.text, settings, origin)
        if request.is_adapter:
            prepared.append(alone(adapter))
        else:
            config = read_config(store, request.config or source.lender or source.path)
            prepared.append(folded(store, adapter, settings, config))
    return tuple(prepared), newest


def _own_views(source: TrainingCheckpoint, adapter: _Adapter) -> tuple[Views, str]:
    """Return the tensors of a checkpoint under their own names, and a notice about its adapter."""
    views = {name: TensorView(name) for name in source.weight_shapes}
    return views, f"the checkpoint holds {adapter.text}; it is scaled as {adapter.origin} says"


def check_whole(averaging: Averaging, source: TrainingCheckpoint) -> None:
    """Refuse a checkpoint that lacks something needed: of a model, all weights; to resume from, everything."""
    if not averaging.request.is_model:
        if source.missing:
            hint = "an average needs complete checkpoints"
            hint += "; without --optimizer weights alone are enough" if source.format == WEIGHTS_FORMAT else ""
            raise mismatched(source.path, f"lacks {source.missing[0]}", hint)
        return
    weights = {name: averaging.stored_value(source, name, WEIGHT) for name in averaging.newest.weight_shapes}
    cut = next((name for name, state in weights.items() if state is None or state.gaps), None)
    pieces = (piece for state in weights.values() if state is not None for piece in state.pieces)
    files = dict.fromkeys(file for piece in pieces for file in piece.files)
    gone = next((file for file in files if not is_file(averaging.store, file)), None)
    if cut is not None or gone is not None:
        lacking = f"file {gone.name}" if gone is not None else (*source.missing, f"weights of {cut}")[0]
        raise mismatched(source.path, f"lacks {lacking}", "a model needs all weights of its checkpoint")


@dataclass(frozen=True, slots=True)
class Averaging:
    """Opened checkpoints of one run, oldest first, their weights, and the names of a model's tensors.

    Of a running average, which is the first source, `folded` are the steps in the result with their weights there.
    `left_out` are composites that were listed with them.
    """

    store: Store
    request: AverageRequest
    sources: tuple[TrainingCheckpoint, ...]
    weights: tuple[float, ...]
    views: Views
    notice: str = ""
    scheme: str = "given"
    folded: tuple[tuple[int, float], ...] = ()
    adapter: _Adapter | None = None
    left_out: tuple[Location, ...] = ()

    @property
    def newest(self) -> TrainingCheckpoint:
        return self.sources[-1]

    @property
    def record(self) -> AverageRecord:
        steps, weights = zip(*self.weighed_steps, strict=True)
        return AverageRecord(self.scheme, weights, self.request.optimizer.value, steps)

    @property
    def weighed_steps(self) -> tuple[tuple[int, float], ...]:
        """Every step in the average with its weight, oldest first."""
        return self.folded or tuple((source.step, w) for source, w in zip(self.sources, self.weights, strict=True))

    @property
    def assignment(self) -> Assignment:
        """The newest checkpoint gives all that is not averaged."""
        last = len(self.sources) - 1
        return Assignment(self.sources, last, dict.fromkeys(self.newest.parameters, last))

    def plan(self) -> CompositionPlan:
        """Plan all files; reads structure only."""
        files = self._model_files() if self.request.is_model else self._checkpoint_files()
        steps = () if self.request.is_model else choose_steps(self.assignment)
        notices = [f"{path} is skipped: it is a composite made by `mergepipe tailor`" for path in self.left_out]
        if self.notice and self.request.is_model:
            notices.append(self.notice)
        notices += self._name_notices()
        ordered = tuple(sorted(files, key=lambda plan: plan.name))
        if self.request.is_stochastic and not any(map(is_rounded, ordered)):
            notices.append("rounding: stochastic has no effect: no value is rounded")
        return CompositionPlan(self.assignment, steps, (), ordered, tuple(notices))

    def _name_notices(self) -> list[str]:
        """List how a model's weights differ from those of its architecture.

        Raises:
            MergePipeError: they differ, and the request is strict.
        """
        if not self.request.is_model or self.request.is_adapter:
            return []
        config = read_config(self.store, self.request.config or self.newest.lender or self.newest.path)
        problems = name_problems(config, self.views)
        texts = [] if problems is None else problems.texts()
        if texts and self.request.is_strict:
            raise mismatched(self.newest.path, "; ".join(texts), "without --strict this is a warning")
        return texts

    def job(self, text: str, out: Location) -> Job:
        """Describe the average that is written at `out`, with the recipe `text`."""
        recipe = text_with_relative_paths(text, out.absolute().local_path) if out.is_local else text
        result = partial(made_states, self, home=out)
        return Job(
            recipe,
            self.plan(),
            self.summands,
            result,
            self.weights,
            self.planned_states(),
            self.record,
            self.request.is_stochastic,
        )

    def planned_states(self) -> Mapping[tuple[str, str], StoredState]:
        """Return the states of the result, cut as they will be; their places are others."""
        if not self.request.is_model:
            return self.newest.states
        return {(s.name, WEIGHT): StoredState.planned(s.name, WEIGHT, s.dtype, s.shape) for s in self._specs()}

    def summands(self, name: str, kind: str) -> tuple[StoredState, ...]:
        """Return the states that a state of the result, a model or a checkpoint, is the average of, oldest first.

        One that is no average is the last of them, or the newest checkpoint's where there are none.
        """
        if self.request.is_model:
            return self._tensor(name)
        return self.averaged(name, kind) or (unpacked(self.store, self.newest.states[name, kind]),)

    def averaged(self, name: str, kind: str) -> tuple[StoredState, ...]:
        """Return the states that a state of a checkpoint is the average of; none where it stays the newest's."""
        state = self.newest.states[name, kind]
        is_weight = kind in (FP32, *DERIVED_KINDS)
        if state.dtype.kind is not DTypeKind.FLOAT or not (
            is_weight or self.request.optimizer is OptimizerState.AVERAGE
        ):
            return ()
        return self._values(name, kind)

    def _values(self, name: str, kind: str) -> tuple[StoredState, ...]:
        """Return a state of every checkpoint, outside of archives."""
        values = (self.stored_value(source, name, kind) for source in self.sources)
        return tuple(unpacked(self.store, value) for value in values if value is not None)

    def _tensor(self, name: str) -> tuple[StoredState, ...]:
        """Return a model's tensor of every checkpoint; a running average, the first source, has the model's names."""
        view = self.views[name]
        if not self.folded or len(self.sources) == 1:
            return tuple(view.of(value) for value in self._values(view.stored, WEIGHT))
        newest = replace(self, sources=self.sources[1:], folded=())
        return (self.sources[0].states[name, WEIGHT], *newest._tensor(name))

    def stored_value(self, source: TrainingCheckpoint, name: str, kind: str) -> StoredState | None:
        """Return the state of a checkpoint that counts for a state of the result: of weights, the masters."""
        if name in source.untrained:
            return source.untrained[name]
        owner = self.newest.units.tied.get(name, name)
        has_master = kind in DERIVED_KINDS and (owner, FP32) in self.newest.states
        return source.states.get((owner, FP32)) if has_master else state_to_copy(source, name, kind)

    # --- a checkpoint to resume from

    def _checkpoint_files(self) -> Iterable[FilePlan]:
        """Plan the newest checkpoint's files with averaged values in their places."""
        changes = SkeletonChanges(self.store, self.newest)
        for (name, kind), target in self.newest.states.items():
            values = self.averaged(name, kind)
            if values:
                changes.state(values, target, self.weights)
        return changes.plans()

    # --- a model

    def _model_files(self) -> Iterator[FilePlan]:
        """Plan safetensors of the weights, a model card, and copies of configuration and tokenizer."""
        specs = self._specs()
        is_adapter = self.adapter is not None and self.request.is_adapter
        shards = plan_shards(specs, SHARD_BYTES)
        if is_adapter:
            shards = plan_shards(specs, sum(spec.nbytes for spec in specs), single=ADAPTER_NAMES[0])
        yield from weight_files(shards, self._segments)
        dtypes = sorted({spec.dtype.recipe_name for spec in specs})
        yield FilePlan(CARD_NAME, (Literal(_model_card(self, dtypes)),))
        if self.adapter is not None and is_adapter:
            yield FilePlan(ADAPTER_CONFIG_NAME, (Literal(self.adapter.settings),))
            return
        lender = self.request.config or self.newest.lender or self.newest.path
        names = find_sidecars(self.store, lender, list_names(self.store, lender))
        if self.request.config is not None and CONFIG_NAME not in names:
            raise NotFoundError.of("model.not-found", lender, f"there is no {CONFIG_NAME}", "name a model's folder")
        for name in names:
            path = lender / name
            copied = CopyRange(path, 0, self.store.size_bytes(path), is_skeleton=True)
            yield FilePlan(name, (Literal(self._config(path, specs)) if name == CONFIG_NAME else copied,))

    def _config(self, path: Location, specs: Sequence[TensorSpec]) -> bytes:
        """Return the configuration, which must be of this model, with the dtype of the weights."""
        raw = self.store.read_small(path, CONFIG_BYTES)
        contradictions = shape_contradictions(parse_config(raw, path), {spec.name: spec.shape for spec in specs})
        for contradiction in contradictions:
            raise mismatched(path, contradiction, "give --config with the model that was trained")
        dtypes = {spec.dtype for spec in specs if spec.dtype.kind is DTypeKind.FLOAT}
        return with_dtype(raw, dtypes.pop()) if len(dtypes) == 1 else raw

    def _specs(self) -> list[TensorSpec]:
        """The model's tensors: parameters in the dtype of the request, else in that of the stored weights."""
        shapes = self.newest.weight_shapes
        views = self.views.items()
        return [TensorSpec(name, self._dtype(view.stored), view.shape or shapes[view.stored]) for name, view in views]

    def _dtype(self, name: str) -> DType:
        kinds = (self.newest.states.get((name, kind)) for kind in (EXPORT, WEIGHT, FP32))
        stored = next(state for state in (self.newest.untrained.get(name), *kinds) if state is not None).dtype
        return self.request.dtype or stored if stored.kind is DTypeKind.FLOAT else stored

    def _segments(self, spec: TensorSpec) -> Iterator[Segment]:
        target = StoredState.planned(spec.name, WEIGHT, spec.dtype, spec.shape)
        values = self._tensor(spec.name)
        is_average = len(values) > 1 and spec.dtype.kind is DTypeKind.FLOAT
        key = rounding_key(0, spec.name) if self.request.is_stochastic else 0
        weights = self.weights if is_average else (1.0,)
        patches = patch_states(values if is_average else values[-1:], target, weights, key)
        yield from (patch.segment for _, patch in patches)


def views_of(store: Store, newest: TrainingCheckpoint, config: Location | None) -> tuple[Views, str]:
    """Find a model's tensors in the stored ones by the configuration; return them, and a notice if there is one."""
    return tensor_views(newest.weight_shapes, read_config(store, config or newest.lender or newest.path))


def _model_card(averaging: Averaging, dtypes: Sequence[str]) -> bytes:
    """Write the card of a model: no path of this machine is in it."""
    newest = averaging.newest
    has_masters = any(kind == FP32 for _, kind in newest.states)
    weighed = averaging.weighed_steps
    steps = ", ".join(str(step) for step, _ in weighed)
    title = f"# Weights of step {steps} of a training run"
    if len(weighed) > 1:
        title = f"# Average of {len(weighed)} checkpoints of a training run"
    made_of = "float32 masters" if has_masters else "weights"
    program = "transformers"
    if averaging.request.is_adapter:
        title = f"# Adapter of step {steps} of a training run"
        program = "peft"
    elif averaging.adapter is not None:
        made_of = "weights, with the adapter that was trained folded in,"
    lines = ["---", f"library_name: {program}", "tags:", "- mergepipe", "---", title, ""]
    lines += [
        f"Made by MergePipe {mergepipe.__version__} from the {made_of} of step {steps} ({newest.format}), written as "
        f"{', '.join(dtypes)}.",
        "",
    ]
    if len(weighed) > 1:
        lines += ["| step | weight |", "|---|---|"]
        lines += [*(f"| {step} | {weight:.6g} |" for step, weight in weighed), ""]
    lines += [f"Every input and digest is listed in `{MANIFEST_NAME}`."]
    return "".join(f"{line}\n" for line in lines).encode()


def made_states(averaging: Averaging, made: Location, home: Location) -> Mapping[tuple[str, str], StoredState]:
    """Open what was written."""
    store = averaging.store
    if averaging.request.is_adapter:
        name = ADAPTER_NAMES[0]
        entries = read_weight_file(store, made, name, stat_present(store, made, name)).entries
        return {(entry.name, WEIGHT): StoredState.whole(entry.name, WEIGHT, entry) for entry in entries}
    if averaging.request.is_model:
        return StoredState.of_model(open_checkpoint(store, made), WEIGHT)
    opened = open_training_checkpoint(averaging.store, made, home)
    if opened.missing or opened.step != averaging.newest.step:
        raise CorruptError.of("output.damaged", home.name, f"is at step {opened.step}, lacks {opened.missing[:1]}")
    return opened.states


# --- a running average of a training run: its finished checkpoints, folded in the background, each once ---


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
            raise RecipeError.of("option.conflict", "alpha", "only the shape 'ema' uses it", "leave it out")
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
        base: Any = library("transformers", "Averager.callback", "train").TrainerCallback

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
        check_place(self._out, [newest.path], force=options.force)
        weights = self._weights(len(done) + 1)
        request = AverageRequest((newest.path,), dtype=F32, config=self._config)
        (newest,), adapter = _prepared(store, request, (newest,))
        views, notice = views_of(store, newest, self._config) if adapter is None else _own_views(newest, adapter)
        averaging = Averaging(store, request, (newest,), (1.0,), views, notice, adapter=adapter)
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
            raise mismatched(self._out, "is not a running average", "name another folder")
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
        shapes = newest.weight_shapes
        states = {}
        for name, view in averaging.views.items():
            tensor, shape = tensors.get(name), view.shape or shapes[view.stored]
            if tensor is None or len(tensors) != len(averaging.views) or tensor.shape != shape:
                held = f"shape {tensor.shape}" if tensor is not None else f"not among the {len(tensors)} averaged"
                message = f"{name} has shape {shape}, in {self._out}: {held}"
                raise mismatched(newest.path, message, "an average needs checkpoints of one model")
            (entry,) = tensor.stored
            states[name, WEIGHT] = StoredState.whole(name, WEIGHT, entry)
        return replace(newest, path=self._out, root=self._out, format=WEIGHTS_FORMAT, step=step, states=states)


def _recipe(record: CompositeManifest | None, checkpoint: Location, weights: tuple[float, ...]) -> str:
    """Return the recipe that averages all these checkpoints at once."""
    earlier: Any = parse_yaml(Location.parse("recipe"), record.recipe).root if record is not None else {}
    paths = [*map(str, earlier.get(AVERAGE_KEY, {}).get("checkpoints", [])), str(checkpoint)]
    content = {"checkpoints": paths, "weights": list(weights), "dtype": F32.recipe_name}
    return yaml_document({AVERAGE_KEY: content}, width=120)
