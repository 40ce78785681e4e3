"""The work of a merge: its `MergeWork` made from opened inputs, and what it keeps, costs and reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import sub

import numpy as np

from mergepipe.checkpoints.adapted_tensors import Adapted
from mergepipe.checkpoints.content_id import content_id
from mergepipe.checkpoints.contract import Checkpoint, LeveledTensor, files_of
from mergepipe.checkpoints.open_files import open_files, pin_files
from mergepipe.checkpoints.requantised import Requantised
from mergepipe.core.rounding import LEAST_KEPT, RoundingMode, Survival, holds_results
from mergepipe.core.units import format_bytes, format_seconds
from mergepipe.engine.known_quantities import ExpertQuantities, KnownQuantities
from mergepipe.engine.planned_access import PlannedAccess
from mergepipe.engine.tensor_work import result_rounding
from mergepipe.engine.work import MergeWork, OutputPlan, plan_output
from mergepipe.errors import OutputError
from mergepipe.operators.base import MagnitudeCut, OperatorInput
from mergepipe.operators.recipe_rule import RecipeRule, is_calibrated
from mergepipe.operators.registry import operator_named
from mergepipe.options import DEFAULT_SHARD_BYTES
from mergepipe.planning.budget import OnOmit
from mergepipe.planning.plan import Plan
from mergepipe.recipes.tasks import Action, MergeTask
from mergepipe.reports import KeptShare, SurvivingChange
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs
from mergepipe.runs.known_statistics import KnownStatistics
from mergepipe.snapshots.shards import SINGLE_NAME, SUFFIX, TensorDigest
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import Location

ONE_FILE_BYTES = 1 << 62


def merge_work(
    inputs: Inputs, output: OutputPlan, plan: Plan | None, seed: int, store: Store, link: CatalogLink
) -> MergeWork:
    """Build the work of merging `output` by `plan`, or in full without one.

    A plan's seed overrides `seed`. What `link` has on record of the experts is not read or reduced again.
    """
    seed = seed if plan is None else plan.seed
    is_stochastic = inputs.recipe.rounding is RoundingMode.STOCHASTIC
    rounding_seed = seed if is_stochastic else None
    output = replace(output, tasks=tuple(_rounded(task, rounding_seed) for task in output.tasks))
    checkpoints = [checkpoint for _, _, checkpoint in inputs.leaves()]
    encoded = (t for checkpoint in checkpoints for t in checkpoint.tensors.values() if isinstance(t, LeveledTensor))
    paths = files_of(source for task in output.tasks for source in (task.base, *task.experts)) | files_of(encoded)
    known = KnownStatistics(store, link.home, link.notices, beside=False)
    work = MergeWork(
        output,
        inputs.recipe.operator.name,
        seed,
        _content_ids(inputs, plan, paths, checkpoints, store, known),
        pin_files(store, paths, checkpoints),
        inputs.repeats,
        is_stochastic=is_stochastic,
    )
    if plan is None:
        return replace(work, recorded=_recorded(work, inputs, known))
    access = PlannedAccess({tensor.name: tensor for tensor in plan.tensors}, plan.block_elements)
    return replace(work, access=access, renormalize=plan.on_omit == OnOmit.RENORMALIZE)


def _rounded(task: MergeTask, seed: int | None) -> MergeTask:
    """Return a task whose base is the sum of weights and an adapter, rounded as it is computed, with that rounding."""
    if not isinstance(task.base, Adapted) or task.base.dtype != task.dtype or holds_results(task.dtype):
        return task
    return replace(task, base=replace(task.base, rounding=result_rounding(task, seed)))


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


def surviving_change(
    inputs: Inputs, tasks: Sequence[MergeTask], digests: Sequence[TensorDigest]
) -> SurvivingChange | None:
    """Return what rounding kept of the change of each tensor that it can lose some of, and in all; None without any."""
    measured = [(task, digest.survival) for task, digest in zip(tasks, digests, strict=True)]
    shares = {task.name: survival.share for task, survival in measured}
    total = Survival.total(survival for _, survival in measured).share
    if total is None:
        return None
    dtypes = sorted({task.dtype.recipe_name for task, survival in measured if survival.share is not None})
    known = {name: share for name, share in shares.items() if share is not None}
    return SurvivingChange(" and ".join(dtypes), inputs.recipe.rounding.value, total, known)


def rounding_notices(inputs: Inputs, tasks: Sequence[MergeTask], kept: SurvivingChange | None) -> Iterator[str]:
    """Warn where rounding lost much of the change, or where it is to be stochastic and nothing is rounded."""
    is_stochastic = inputs.recipe.rounding is RoundingMode.STOCHASTIC
    if is_stochastic and all(task.action is Action.COPY or holds_results(task.dtype) for task in tasks):
        yield "rounding: stochastic has no effect: no result is rounded"
    if kept is not None and not is_stochastic and kept.share < LEAST_KEPT:
        rest = "--rounding stochastic keeps it on average, the dtype float32 in full"
        yield f"rounding {kept}: what is smaller than half a step of the dtype is lost; {rest}"


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
