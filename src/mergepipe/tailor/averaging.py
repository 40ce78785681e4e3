"""Make a model of one checkpoint, or an average of several: a model, or a checkpoint to resume from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import mergepipe
from mergepipe.checkpoints.directory import find_sidecars, list_names, open_checkpoint, parse_config
from mergepipe.checkpoints.packed import UnpackedView
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.blocks import DType, DTypeKind, Span
from mergepipe.errors import CorruptError, LimitError, MergePipeError, MismatchError, NotFoundError, RecipeError
from mergepipe.options import TailorOptions
from mergepipe.recipes.output_tensors import shape_contradictions, with_dtype
from mergepipe.recipes.references import text_with_relative_paths
from mergepipe.snapshots.composite import AverageRecord, SelfCheck, Thoroughness
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.snapshots.shards import ShardLayout, TensorSpec, index_files, plan_shards
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.limits import CONFIG_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores
from mergepipe.tailor.assignment import DERIVED_KINDS, Assignment, choose_steps, state_to_copy
from mergepipe.tailor.average_recipe import DEFAULT_ALPHA, AverageRequest, OptimizerState, normalised, scheme_weights
from mergepipe.tailor.checkpoint import (
    EXPORT,
    FP32,
    WEIGHT,
    Piece,
    StateReader,
    StoredState,
    TrainingCheckpoint,
    differences,
)
from mergepipe.tailor.composition import (
    READERS,
    CompositionReport,
    Job,
    OnProgress,
    check_out,
    check_same_run,
    compared_batches,
    publish,
)
from mergepipe.tailor.composition_plan import CompositionPlan, PatchCollector, StateOverlay, plan_file, unpacked
from mergepipe.tailor.copy_plan import (
    CopyRange,
    FilePlan,
    Literal,
    Segment,
    joined,
    patch_states,
)
from mergepipe.tailor.copy_writer import cast_bytes, values_of
from mergepipe.tailor.formats.hf_trainer import WEIGHTS_FORMAT, read_config, weight_state
from mergepipe.tailor.formats.registry import open_training_checkpoint
from mergepipe.tailor.sources import list_skeleton, open_source_checkpoints
from mergepipe.tailor.titan_names import TensorNames, hugging_face_names, with_rotated_halves

MOST_CHECKPOINTS = 128
CARD_NAME = "README.md"
_SHARD_BYTES = 5_000_000_000
_MEMBER = Location.parse("member")


def average(
    request: AverageRequest, out: Location, options: TailorOptions, on_progress: OnProgress
) -> CompositionReport:
    """Average and publish; see `tailor.api.average` and, of one checkpoint, `tailor.api.export`."""
    started = time.perf_counter()
    store = UnpackedView(Stores())
    averaging = open_averaging(store, request)
    check_out(out, [source.path for source in averaging.sources], options)
    return publish_average(averaging, request.to_yaml(), out, options, on_progress, started)


def publish_average(
    averaging: Averaging, text: str, out: Location, options: TailorOptions, on_progress: OnProgress, started: float
) -> CompositionReport:
    """Write an average, compare it with its sources and publish it with the recipe `text`."""
    store, plan = averaging.store, averaging.plan()
    with AverageCheck(averaging, Thoroughness(options.self_check)) as check:
        if not store.has_packed:  # whose blocks are decoded for the average itself, in its order
            check.read_ahead()

        def compare(directory: Path, advance: Callable[[], None]) -> SelfCheck:
            return check.compare(Location.local(directory), out, advance)

        recipe = text_with_relative_paths(text, out.absolute().local_path) if out.is_local else text
        return publish(store, Job(recipe, plan, out, compare, averaging.record), options, on_progress, started)


def check_average(request: AverageRequest) -> CompositionReport:
    """Report what an average would do; reads structure and step counters only."""
    started = time.perf_counter()
    averaging = open_averaging(UnpackedView(Stores()), request)
    plan = averaging.plan()
    return CompositionReport(plan, None, None, time.perf_counter() - started, averaging.record)


def open_averaging(store: UnpackedView, request: AverageRequest) -> Averaging:
    """Open the checkpoints, oldest first, and give each its weight; reads no tensor data."""
    count = len(request.checkpoints)
    if count < (1 if request.is_model else 2):
        hint = "an average to resume from takes two or more" if count else "name one or more"
        raise RecipeError.of("option.invalid", "checkpoints", f"{count} given", hint)
    if count > MOST_CHECKPOINTS:
        raise LimitError.of(
            "option.out-of-range", "checkpoints", f"{count} given, at most {MOST_CHECKPOINTS} are averaged at once",
            "give every second one",
        )  # fmt: skip
    _check_options(request)
    if isinstance(request.weights, str):
        scheme = scheme_weights(request.weights, count, DEFAULT_ALPHA if request.alpha is None else request.alpha)
    elif len(request.weights) != count:
        raise RecipeError.of(
            "option.invalid",
            "--weights",
            f"{len(request.weights)} weights for {count} checkpoints",
            "give one each",
        )
    opened = open_source_checkpoints(store, request.checkpoints)
    order = sorted(range(count), key=lambda index: opened[index].step)
    sources = tuple(opened[index] for index in order)
    _check_fit(sources)
    check_same_run(store, sources)
    if not isinstance(request.weights, str):
        scheme = normalised([request.weights[index] for index in order], "--weights")
    newest = sources[-1]
    averaging = Averaging(
        store, request, sources, scheme, model_names(store, newest, request.config),
        request.weights if isinstance(request.weights, str) else "given",
    )  # fmt: skip
    for source in sources:
        check_whole(averaging, source)
    return averaging


def _check_options(request: AverageRequest) -> None:
    """Refuse options that have no effect beside the others."""
    if request.alpha is not None and request.weights != "ema":
        raise RecipeError.of("option.conflict", "--alpha", "only the weights 'ema' take it", "leave it out")
    for option, value in (("--dtype", request.dtype), ("--config", request.config)):
        if value is not None and not request.is_model:
            message = f"a checkpoint to resume from (optimizer: {request.optimizer.value}) is made as the newest is"
            raise RecipeError.of("option.conflict", option, message, "leave it out, or give optimizer 'none'")


def check_whole(averaging: Averaging, source: TrainingCheckpoint) -> None:
    """Refuse a checkpoint that lacks something needed: of a model, all weights; to resume from, everything."""
    if not averaging.request.is_model:
        if source.missing:
            hint = "an average takes complete checkpoints"
            hint += "; without --optimizer it takes weights alone" if source.format == WEIGHTS_FORMAT else ""
            raise MismatchError.of("checkpoint.mismatch", source.path, f"lacks {source.missing[0]}", hint)
        return
    weights = {name: averaging.stored_value(source, name, WEIGHT) for name in averaging.shapes}
    cut = next((name for name, state in weights.items() if state is None or state.gaps), None)
    files = dict.fromkeys(piece.file for state in weights.values() if state is not None for piece in state.pieces)
    gone = next((file for file in files if not is_file(averaging.store, file)), None)
    if cut is not None or gone is not None:
        lacking = f"file {gone.name}" if gone is not None else (*source.missing, f"weights of {cut}")[0]
        raise MismatchError.of(
            "checkpoint.mismatch", source.path, f"lacks {lacking}", "a model takes all weights of its checkpoint"
        )


def _check_fit(sources: Sequence[TrainingCheckpoint]) -> None:
    """Refuse checkpoints that are not different steps of one run."""
    for older, newer in pairwise(sources):
        if older.step == newer.step:
            raise MismatchError.of(
                "checkpoint.mismatch",
                newer.path,
                f"is of step {newer.step}, as {older.path} is",
                "give each step once",
            )
        for reason in differences(sources[-1], older):
            raise MismatchError.of("checkpoint.mismatch", older.path, reason)


@dataclass(frozen=True, slots=True)
class Averaging:
    """Opened checkpoints of one run, oldest first, their weights, and the names of a model's tensors.

    Of a running average, which is the first source, `folded` are the steps in the result with their weights there.
    """

    store: UnpackedView
    request: AverageRequest
    sources: tuple[TrainingCheckpoint, ...]
    weights: tuple[float, ...]
    tensor_names: TensorNames
    scheme: str = "given"
    folded: tuple[tuple[int, float], ...] = ()

    @property
    def newest(self) -> TrainingCheckpoint:
        return self.sources[-1]

    @property
    def names(self) -> Mapping[str, str]:
        """The stored name of each of a model's tensors."""
        return self.tensor_names.stored

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of a model's tensors, by their stored names."""
        untrained = {name: state.shape for name, state in self.newest.untrained.items()}
        return {**self.newest.parameters, **untrained}

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
        return CompositionPlan(self.assignment, steps, (), tuple(sorted(files, key=lambda plan: plan.name)))

    def planned_states(self) -> Mapping[tuple[str, str], StoredState]:
        """Return the states of the result, cut as they will be; their places are others."""
        if not self.request.is_model:
            return self.newest.states
        return {(spec.name, WEIGHT): _whole_state(spec) for spec in self._specs()}

    def summands(self, name: str, kind: str) -> tuple[StoredState, ...]:
        """Return the states that a state of the result, a model or a checkpoint, is the average of, oldest first.

        One that is no average is the last of them, or the newest checkpoint's where there are none.
        """
        return self._values(self.names[name], WEIGHT) if self.request.is_model else self.averaged(name, kind)

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
        values = ((source, self.stored_value(source, name, kind)) for source in self.sources)
        return tuple(self._laid_out(source, name, value) for source, value in values if value is not None)

    def _laid_out(self, source: TrainingCheckpoint, name: str, value: StoredState) -> StoredState:
        """Return a state outside of archives and, of a model, with its rows in the order of transformers."""
        raw, head_size = unpacked(self.store, value), self.tensor_names.head_sizes.get(name)
        if head_size is None or not self.request.is_model or source.format == WEIGHTS_FORMAT:
            return raw
        return with_rotated_halves(raw, head_size)

    def stored_value(self, source: TrainingCheckpoint, name: str, kind: str) -> StoredState | None:
        """Return the state of a checkpoint that counts for a state of the result: of weights, the masters."""
        if name in source.untrained:
            return source.untrained[name]
        owner = self.newest.units.tied.get(name, name)
        has_master = kind in DERIVED_KINDS and (owner, FP32) in self.newest.states
        return source.states.get((owner, FP32)) if has_master else state_to_copy(source, name, kind)

    # --- a checkpoint to resume from

    def _checkpoint_files(self) -> Iterator[FilePlan]:
        """Plan the newest checkpoint's files with averaged values in their places."""
        patches = PatchCollector(self.store)
        for (name, kind), target in self.newest.states.items():
            values = self.averaged(name, kind)
            if values:
                patches.state(values, target, self.weights)
        overlay = StateOverlay(list_skeleton(self.store, self.newest))
        return (plan_file(self.store, file, patches, overlay) for file in overlay.files)

    # --- a model

    def _model_files(self) -> Iterator[FilePlan]:
        """Plan safetensors of the weights, a model card, and copies of configuration and tokenizer."""
        specs = self._specs()
        shards = plan_shards(specs, _SHARD_BYTES)
        for shard in shards:
            yield FilePlan(shard.name, tuple(joined(self._shard(shard))))
        for name, content in index_files(shards).items():
            yield FilePlan(name, (Literal(content),))
        dtypes = sorted({spec.dtype.recipe_name for spec in specs})
        yield FilePlan(CARD_NAME, (Literal(_model_card(self, dtypes)),))
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
            raise MismatchError.of(
                "checkpoint.mismatch", path, contradiction, "give --config with the model that was trained"
            )
        dtypes = {spec.dtype for spec in specs if spec.dtype.kind is DTypeKind.FLOAT}
        return with_dtype(raw, dtypes.pop()) if len(dtypes) == 1 else raw

    def _specs(self) -> list[TensorSpec]:
        """The model's tensors: parameters in the dtype of the request, else in that of the stored weights."""
        shapes = self.shapes
        return [TensorSpec(name, self._dtype(stored), shapes[stored]) for name, stored in self.names.items()]

    def _dtype(self, name: str) -> DType:
        kinds = (self.newest.states.get((name, kind)) for kind in (EXPORT, WEIGHT, FP32))
        stored = next(state for state in (self.newest.untrained.get(name), *kinds) if state is not None).dtype
        return self.request.dtype or stored if stored.kind is DTypeKind.FLOAT else stored

    def _shard(self, shard: ShardLayout) -> Iterator[Segment]:
        yield Literal(shard.header)
        for spec in shard.tensors:
            target = _whole_state(spec)
            values = self._values(self.names[spec.name], WEIGHT)
            is_average = len(values) > 1 and spec.dtype.kind is DTypeKind.FLOAT
            patches = patch_states(values, target, self.weights) if is_average else patch_states(values[-1:], target)
            yield from (patch.segment for _, patch in patches)


def model_names(store: Store, newest: TrainingCheckpoint, config: Location | None) -> TensorNames:
    """Name a model's tensors as transformers does, where the stored names and the configuration say how."""
    names = names_without_wrappers([*newest.parameters, *newest.untrained])
    return hugging_face_names(names, read_config(store, config or newest.lender or newest.path))


_WRAPPERS = frozenset({"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ROOTS = ("model.", "transformer.", "lm_head.")


def names_without_wrappers(stored: Sequence[str]) -> dict[str, str]:
    """Map the names that a model's tensors have by themselves to those that a trainer's wrappers gave them.

    Left out are the parts that torch.compile, FSDP and Lightning add anywhere, `module.` of DDP in front of all names,
    and one part in front of all names where a model's own follow it, as in `model.model.layers.0` of a LightningModule.
    """
    names = {".".join(part for part in name.split(".") if part not in _WRAPPERS): name for name in stored}
    front = {name.partition(".")[0] for name in names}
    rests = {name.partition(".")[2]: stored_name for name, stored_name in names.items()}
    if front == {"module"} or (len(front) == 1 and any(rest.startswith(_ROOTS) for rest in rests)):
        names = rests
    return names if len(names) == len(stored) else {name: name for name in stored}


def _model_card(averaging: Averaging, dtypes: Sequence[str]) -> bytes:
    """Write the card of a model: no path of this machine is in it."""
    newest = averaging.newest
    has_masters = any(kind == FP32 for _, kind in newest.states)
    weighed = averaging.weighed_steps
    steps = ", ".join(str(step) for step, _ in weighed)
    title = f"# Weights of step {steps} of a training run"
    if len(weighed) > 1:
        title = f"# Average of {len(weighed)} checkpoints of a training run"
    lines = ["---", "library_name: transformers", "tags:", "- mergepipe", "---", title, ""]
    lines += [
        f"Made by MergePipe {mergepipe.__version__} from the {'float32 masters' if has_masters else 'weights'} of step "
        f"{steps} ({newest.format}), written as {', '.join(dtypes)}.",
        "",
    ]
    if len(weighed) > 1:
        lines += ["| step | weight |", "|---|---|"]
        lines += [*(f"| {step} | {weight:.6g} |" for step, weight in weighed), ""]
    lines += [f"Every input and digest is listed in `{MANIFEST_NAME}`."]
    return "".join(f"{line}\n" for line in lines).encode()


def _whole_state(spec: TensorSpec) -> StoredState:
    """Make the state of a model's tensor: all of it in one piece."""
    place = Piece(_MEMBER, 0, spec.nbytes, Span(0, spec.nbytes // spec.dtype.itemsize))
    return StoredState(spec.name, WEIGHT, spec.dtype, spec.shape, (place,) if spec.nbytes else ())


# --- compare a finished average with its sources: samples of every contiguous piece, or everything ---


_TOLERANCES = {"F64": 2.0**-20, "F32": 2.0**-20, "BF16": 2.0**-7, "F16": 2.0**-9}
_MOST_AHEAD = 1 << 20  # elements, each with its tolerance: 16 MiB


class AverageCheck:
    """Compares a finished average with its sources, samples of which may be read ahead. A context manager."""

    def __init__(self, averaging: Averaging, thoroughness: Thoroughness) -> None:
        self._averaging = averaging
        self._thoroughness = thoroughness
        self._reader = StateReader(averaging.store)
        n_threads = READERS if thoroughness is Thoroughness.SAMPLED else 1  # whole blocks of all sources are large
        self._pool = ThreadPoolExecutor(n_threads, "mergepipe-tailor-check")
        self._ahead: dict[tuple[str, str], Future[_Wanted]] = {}

    def __enter__(self) -> AverageCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def read_ahead(self) -> None:
        """Begin to read the samples of the sources, of at most `_MOST_AHEAD` elements; the output need not be there."""
        if self._thoroughness is not Thoroughness.SAMPLED:
            return
        n_elements = 0
        for key, planned in self._averaging.planned_states().items():
            for spans in compared_batches(planned, self._thoroughness):
                n_elements += sum(span.n_elements for span in spans)
                if n_elements > _MOST_AHEAD:
                    return
                self._ahead[key] = self._pool.submit(self._wanted, key, spans, planned.dtype)

    def compare(self, made: Location, home: Location, advance: Callable[[], None]) -> SelfCheck:
        """Compare what was written with averages in float64, and everything else with the newest checkpoint."""
        if self._thoroughness is Thoroughness.OFF:
            return SelfCheck(self._thoroughness, 0, 0, 0)
        states = _made_states(self._averaging, made, home)
        n_elements = 0
        for compared in self._pool.map(self._state, states, states.values()):
            n_elements += compared
            advance()
        return SelfCheck(self._thoroughness, len(states), n_elements, 0)

    def _state(self, key: tuple[str, str], made: StoredState) -> int:
        """Compare one state with its sources, from any thread; return how many elements were compared."""
        made = unpacked(self._averaging.store, made)
        ahead = self._ahead.pop(key, None)
        n_elements = 0
        for spans in compared_batches(made, self._thoroughness):
            wanted = None if ahead is None else ahead.result()
            if wanted is None or (wanted.spans, wanted.dtype) != (spans, made.dtype):
                wanted = self._wanted(key, spans, made.dtype)
            is_same = wanted.agrees(self._reader.read(made, *spans), made.parameter)
            if not is_same.all():
                raise _differs(made, spans, int(np.argmin(is_same)))
            n_elements += len(is_same)
        return n_elements

    def _wanted(self, key: tuple[str, str], spans: Sequence[Span], dtype: DType) -> _Wanted:
        """Read what elements of a state of the result must be, as values of `dtype`."""
        summands = self._averaging.summands(*key)
        if len(summands) < 2 or dtype.kind is not DTypeKind.FLOAT:
            state = summands[-1] if summands else unpacked(self._averaging.store, self._averaging.newest.states[key])
            stored = cast_bytes(self._reader.read(state, *spans), state.dtype, dtype, state.parameter)
            return _Wanted(spans, dtype, stored.reshape(-1, dtype.itemsize), None)
        n_elements = sum(span.n_elements for span in spans)
        averages, largest = np.zeros(n_elements), np.zeros(n_elements)
        with np.errstate(invalid="ignore"):
            for weight, state in zip(self._averaging.weights, summands, strict=True):
                summand = values_of(self._reader.read(state, *spans), state.dtype, state.parameter).astype(np.float64)
                averages += weight * summand
                np.maximum(largest, np.abs(summand), out=largest)
        return _Wanted(spans, dtype, averages, _TOLERANCES[dtype.name] * largest)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the elements in `spans` must be: averages in float64 and how far off they may be, or bytes a row."""

    spans: Sequence[Span]
    dtype: DType
    values: NDArray[np.float64] | NDArray[np.uint8]
    distances: NDArray[np.float64] | None

    def agrees(self, raw: NDArray[np.uint8], parameter: str) -> NDArray[np.bool_]:
        """Compare elements with their expected values, within the rounding of the dtype; what is not finite agrees."""
        if self.distances is None:
            return np.asarray((raw.reshape(self.values.shape) == self.values).all(axis=1))
        made = values_of(raw, self.dtype, parameter).astype(np.float64)
        with np.errstate(invalid="ignore"):
            close = np.abs(made - self.values) <= self.distances
        return np.asarray(close | ~np.isfinite(self.values))


def _made_states(averaging: Averaging, made: Location, home: Location) -> Mapping[tuple[str, str], StoredState]:
    if averaging.request.is_model:
        entries = open_checkpoint(averaging.store, made).tensors.values()
        return {(e.name, WEIGHT): weight_state(e, WEIGHT) for t in entries for e in t.stored}
    opened = open_training_checkpoint(averaging.store, made, home)
    if opened.missing or opened.step != averaging.newest.step:
        raise CorruptError.of("output.damaged", home.name, f"is at step {opened.step}, lacks {opened.missing[:1]}")
    return opened.states


def _differs(made: StoredState, spans: Sequence[Span], place: int) -> MergePipeError:
    """Make the error for the element at `place` of all that was compared."""
    ends = np.cumsum([span.n_elements for span in spans])
    span = spans[int(np.searchsorted(ends, place, side="right"))]
    return CorruptError.of(
        "output.damaged", made.parameter,
        f"{made.kind} differs from its sources in elements [{span.start}, {span.stop})",
        "nothing was published; check the sources, then report it",
    )  # fmt: skip
