"""What a run of a merge is given: its settings, the catalog where there is one, and the `MergeWork` of its inputs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import sub
from pathlib import Path
from typing import TypeVar

import numpy as np

from mergepipe.catalog.catalog import Catalog, is_catalog_error
from mergepipe.catalog.statistics_file import STATISTICS_NAME, StatisticsFile, parse_statistics, statistics_path
from mergepipe.checkpoints.codes import Requantised
from mergepipe.checkpoints.content_id import content_digest, content_id
from mergepipe.checkpoints.contract import Checkpoint, LeveledTensor, files_of
from mergepipe.checkpoints.open_files import open_files, pin_files
from mergepipe.core.units import format_bytes, format_seconds
from mergepipe.engine.known_quantities import ExpertQuantities, KnownQuantities
from mergepipe.engine.planned_access import PlannedAccess
from mergepipe.engine.work import EngineOptions, MergeWork, OutputPlan, plan_output
from mergepipe.errors import MergePipeError, OutputError, RecipeError
from mergepipe.operators.base import MagnitudeCut, OperatorInput, RecipeRule, is_calibrated
from mergepipe.operators.registry import operator_named
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.options import DEFAULT_SHARD_BYTES, MergeOptions, catalog_home, engine_options, home_of
from mergepipe.planning.budget import OnOmit
from mergepipe.planning.plan import Plan
from mergepipe.recipes.tasks import Action, MergeTask
from mergepipe.reports import KeptShare, ProgressCallback
from mergepipe.runs.inputs import Inputs
from mergepipe.runs.model_card import BaseModelIds, parse_base_model_ids
from mergepipe.snapshots.manifest import FILE_SUFFIXES
from mergepipe.snapshots.shards import SINGLE_NAME, SUFFIX, index_name
from mergepipe.storage.contract import BESIDE, STATISTICS_BYTES, Store, is_file
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import ANYWHERE, output_place, refuse_file_name

# --- the settings of a run, and how the options of a call give them ---


NO_IDS = BaseModelIds()


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """One merge run: its options, and where it publishes: at `out`; for a remote `destination` it stages there.

    `base_model_ids` are ids on the Hub that the user states. `file` is the name of an output that is one file. With a
    `plan_key` the plan is kept beside the unfinished output, see `stored_plan`. `tried_expert_bytes` were read under
    budgets of which the result was not good enough. `started` is when the run began, by `perf_counter`.
    """

    options: MergeOptions
    engine: EngineOptions
    base_model_ids: BaseModelIds = NO_IDS
    on_progress: ProgressCallback | None = None
    out: Path = Path()
    destination: Location | None = None
    file: str = ""
    plan_key: str = ""
    tried_expert_bytes: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def home(self) -> Path | None:
        """The catalog's directory; None runs without a catalog."""
        return catalog_home(self.options)

    @property
    def begun_anew(self) -> MergeSettings:
        """The settings of a run that resumes none."""
        return replace(self, options=replace(self.options, resume=False))

    @property
    def place(self) -> Path | Location:
        """Where the output is published."""
        return self.destination or self.out

    @property
    def beside(self) -> str:
        """How the manifest names weight files before their own names."""
        return BESIDE if self.file else ""


def settings_without_output(options: MergeOptions, on_progress: ProgressCallback | None = None) -> MergeSettings:
    """Return the settings of a merge, which begins now, into a place that the caller adds."""
    return MergeSettings(options, engine_options(options), parse_base_model_ids(options.base_model_ids), on_progress)


def merge_settings(
    options: MergeOptions, out: str | Path, on_progress: ProgressCallback | None = None
) -> MergeSettings:
    """Return the settings of a merge into `out`, which begins now; an output in a bucket is staged on this machine."""
    settings = settings_without_output(options, on_progress)
    location = output_place(out, ANYWHERE)
    is_file_name = location.suffix in FILE_SUFFIXES and location.is_local and not index_name(location.name)
    if not is_file_name:
        refuse_file_name(location)
    elif settings.options.shard_bytes is not None:
        message = "is one file, and a size of shards is given"
        raise RecipeError.of("option.conflict", location, message, "leave the size out, or name a folder")
    if location.is_local:
        return replace(settings, out=location.without_detours().local_path, file=location.name if is_file_name else "")
    from mergepipe.snapshots.object_upload import check_replaceable, staging_place

    check_replaceable(location, force=settings.options.force)
    return replace(settings, out=staging_place(location, home_of(settings.options.home)), destination=location)


# --- use the catalog where there is one: its first failure becomes a notice; look up statistics by content ---


T = TypeVar("T")


class CatalogLink:
    """An optional catalog: its first failure becomes a notice, and from then on it is not used.

    Where it is `required`, trouble is an error. `home` is its directory, None where it is not used.
    """

    def __init__(self, home: Path | None, *, required: bool = False) -> None:
        self.notices: list[str] = []
        self.home = home
        self._required = required

    def use(self, action: Callable[[Catalog], T]) -> T | None:
        """Call `action` with the catalog; return None where no catalog is usable."""
        if self.home is None:
            return None
        try:
            return action(Catalog(self.home))
        except MergePipeError as error:
            if self._required or not is_catalog_error(error):
                raise
            self.notices.append(f"the catalog is not used: {error}")
            self.home = None
            return None


class KnownStatistics:
    """The statistics on record of experts whose content, and their base's, is known; digests are not taken here.

    Those of the `home` folder are an analysis made there, or a file that its owner put there. With `beside`, a file
    `mergepipe.stats` in an expert's folder counts too, for the content that this very expert has: of other models such
    a file proves nothing. What is wrong with a file becomes one of `notices`, and the file is not used.
    """

    def __init__(self, store: Store, home: Path | None, notices: list[str], *, beside: bool) -> None:
        self._store = store
        self._home = home
        self._notices = notices
        self._beside = beside
        self._files: dict[Location, StatisticsFile | None] = {}
        self._pairs: dict[tuple[int, int], tuple[StatisticsFile | None, Checkpoint, Checkpoint]] = {}

    def file(self, expert: Checkpoint, base: Checkpoint) -> StatisticsFile | None:
        """Return what is on record of an expert against a base; None if nothing is."""
        pair = id(expert), id(base)
        if pair not in self._pairs:
            place = expert.root / STATISTICS_NAME if self._beside else None
            file = self.of_contents(content_digest(expert), content_digest(base), place)
            self._pairs[pair] = file, expert, base  # which live as long as their ids are keys
        return self._pairs[pair][0]

    def of_task(self, inputs: Inputs, task: MergeTask, slot: int) -> TensorStatistics | None:
        """Return what is on record of one expert of a task."""
        name = inputs.pair_name(task, slot)
        models = (task.expert_models[slot], task.base_model)
        file = None if name is None else self.file(*(inputs.checkpoints[model] for model in models))
        statistics = None if file is None or name is None else file.tensors.get(name)
        fits = statistics is not None and statistics.grid.n_elements == task.base.n_elements
        return statistics if fits else None

    def of_contents(self, expert: str | None, base: str | None, place: Location | None = None) -> StatisticsFile | None:
        """Return what is on record of a content against a base's, by their digests; None if nothing is."""
        if expert is None or base is None:
            return None
        home = None if self._home is None else Location.local(statistics_path(self._home, expert, base))
        files = (self._read(where) for where in (home, place) if where is not None)
        return next((f for f in files if f is not None and (f.expert.digest, f.base.digest) == (expert, base)), None)

    def _read(self, place: Location) -> StatisticsFile | None:
        if place not in self._files:
            self._files[place] = None
            try:
                if is_file(self._store, place):
                    self._files[place] = parse_statistics(self._store.read_small(place, STATISTICS_BYTES), place)
            except MergePipeError as error:
                self._notices.append(f"statistics are not used: {error}")
        return self._files[place]


ONE_FILE_BYTES = 1 << 62


# --- the work of a merge, and what it keeps ---


def merge_work(
    inputs: Inputs, output: OutputPlan, plan: Plan | None, seed: int, store: Store, link: CatalogLink
) -> MergeWork:
    """Build the work of merging `output` by `plan`, or in full without one.

    A plan's seed overrides `seed`. What `link` has on record of the experts is not read or reduced again.
    """
    checkpoints = [checkpoint for _, _, checkpoint in inputs.leaves()]
    encoded = (t for checkpoint in checkpoints for t in checkpoint.tensors.values() if isinstance(t, LeveledTensor))
    paths = files_of(source for task in output.tasks for source in (task.base, *task.experts)) | files_of(encoded)
    known = KnownStatistics(store, link.home, link.notices, beside=False)
    work = MergeWork(
        output,
        inputs.recipe.operator.name,
        seed if plan is None else plan.seed,
        _content_ids(inputs, plan, paths, checkpoints, store, known),
        pin_files(store, paths, checkpoints),
        inputs.repeats,
    )
    if plan is None:
        return replace(work, recorded=_recorded(work, inputs, known))
    access = PlannedAccess({tensor.name: tensor for tensor in plan.tensors}, plan.block_elements)
    return replace(work, access=access, renormalize=plan.on_omit == OnOmit.RENORMALIZE)


def output_of(inputs: Inputs, shard_bytes: int | None, file: str = "") -> OutputPlan:
    """Lay out the output: shards of a size, by default as many as the base's one file has, or all in one `file`."""
    base = inputs.base
    if file and base.components:
        message = f"is one file, and {base.path} has weights in {', '.join(sorted(base.components))}"
        hint = "name a folder, or name files as the models (BASE/model.safetensors) to merge those alone"
        raise OutputError.of("output.place", file, message, hint)
    if file or (shard_bytes is None and base.path != base.root):
        return plan_output(
            inputs.resolution.tasks, ONE_FILE_BYTES, single=file if file.endswith(SUFFIX) else SINGLE_NAME
        )
    return plan_output(inputs.resolution.tasks, shard_bytes or DEFAULT_SHARD_BYTES, base.components)


def _content_ids(
    inputs: Inputs,
    plan: Plan | None,
    paths: set[Location],
    checkpoints: Sequence[Checkpoint],
    store: Store,
    known: KnownStatistics,
) -> dict[int, str]:
    """Return the content ids that key randomness, by model; experts that the plan leaves out are not read."""
    if not operator_named(inputs.recipe.operator.name).is_random:
        return {}
    models, planned = inputs.expert_models, {}
    if plan is not None:
        planned = {model: m.content_id for model, m in enumerate(plan.models) if m.content_id is not None}
        models = tuple(models[e] for e in sorted(used_experts(plan)))
    sampled = files_of(t for model in inputs.expert_models for t in inputs.checkpoints[model].tensors.values())
    ids = dict.fromkeys(inputs.expert_models, "") | planned
    with open_files(store, paths | sampled, checkpoints) as files:  # dropped tensors are sampled too
        for model in (model for model in models if model not in planned):
            expert = inputs.checkpoints[model]
            on_record = known.file(expert, inputs.base)
            ids[model] = content_id(expert, files) if on_record is None else on_record.expert.content_id
    return ids


def used_experts(plan: Plan) -> set[int]:
    """Return the plan's experts of which any block is used."""
    return {
        e for tensor in plan.tensors for e, access in zip(tensor.models, tensor.access, strict=True) if access.blocks
    }


def _recorded(work: MergeWork, inputs: Inputs, known: KnownStatistics) -> Mapping[str, KnownQuantities]:
    """Look up the quantities of tensors that must be reduced first, where statistics of all their experts are known."""
    recorded = {}
    for task in work.output.tasks:
        if not task.experts or not task.base.n_elements:
            continue
        if work.operator.reduction(task.operator_input()) is None:
            continue
        statistics = [known.of_task(inputs, task, slot) for slot in range(len(task.experts))]
        experts = tuple(ExpertQuantities.of(one) for one in statistics if one is not None)
        if len(experts) == len(statistics):
            recorded[task.name] = KnownQuantities(experts)
    return recorded


def kept_shares(inputs: Inputs) -> tuple[KeptShare, ...]:
    """Return what a merge in full keeps of each expert that its rule cuts by magnitude, in the recipe's order."""
    operator, models = operator_named(inputs.recipe.operator.name), inputs.recipe.inputs()
    keeps_largest = isinstance(operator, RecipeRule) and getattr(operator.operator, "trims", False)
    kept, elements = Counter[int](), Counter[int]()
    for task in inputs.resolution.tasks:
        trims = task.action is not Action.COPY and task.experts and task.base.n_elements
        match operator.reduction(task.operator_input()) if trims else None:
            case MagnitudeCut(kept_E, dropped_E):
                counts = tuple(map(sub, kept_E, dropped_E)) if dropped_E else kept_E
            case None if trims and keeps_largest:
                counts = (task.base.n_elements,) * len(task.experts)
            case _:
                continue
        for model, n_kept in zip(task.expert_models, counts, strict=True):
            kept[model] += n_kept
            elements[model] += task.base.n_elements
    return tuple(KeptShare(models[model].text, kept[model], elements[model]) for model in sorted(elements))


def spectral_inputs(tasks: Sequence[MergeTask]) -> list[OperatorInput]:
    """Return the operator's inputs of each tensor that a spectral step follows."""
    inputs = [task.operator_input() for task in tasks if task.experts]
    return [one for one in inputs if is_calibrated(one)]


def spectral_cost(tasks: Sequence[MergeTask]) -> str:
    """Say what the spectral step of a merge takes at most, by the speed of this machine; empty where there is none."""
    inputs = spectral_inputs(tasks)
    if not inputs:
        return ""
    from mergepipe.operators.spectral import calibration_cost, measured_flop_per_second

    costs = [calibration_cost(one) for one in inputs]
    flop, nbytes = sum(flop for flop, _ in costs), max(nbytes for _, nbytes in costs)
    time, memory = format_seconds(flop / measured_flop_per_second()), format_bytes(nbytes)
    matrices = f"spectral step on {len(costs)} of {len(tasks)} tensors"
    return f"{matrices}: at most {flop:.2g} FLOP, about {time} here, {memory} for the largest beside --memory"


def requantisation_error(inputs: Inputs) -> float | None:
    """Return the relative RMS error of quantising the result as the base is.

    0.0 where all are the base's own; None where nothing is stored so, or not by this process.
    """
    sources = (task.base for task in inputs.resolution.tasks)
    squares = [s.shared["squares"] for s in sources if isinstance(s, Requantised) and "squares" in s.shared]
    error, numbers = sum(squares, np.zeros(2)).tolist()
    return float(f"{math.sqrt(error / numbers) if numbers else 0.0:.3g}") if squares else None


def tensor_bytes_by_file(usage: Usage) -> Counter[str]:
    """Sum the bytes requested of tensors by file, headers excluded."""
    requested_bytes: Counter[str] = Counter()
    for (file, purpose), nbytes in usage.by_file.items():
        if purpose is not Purpose.METADATA:
            requested_bytes[file] += nbytes
    return requested_bytes


def tensor_bytes_read(checkpoint: Checkpoint, bytes_by_file: Counter[str]) -> int:
    """Sum the bytes requested of a checkpoint's tensors; indices of encoded ones are included."""
    if checkpoint.encoded is None:
        files = set(map(str, files_of(checkpoint.tensors.values())))
    else:
        files = {str(file) for file in (*checkpoint.encoded.files, checkpoint.encoded.index_file)}
    return sum(bytes_by_file[file] for file in files)
