"""Explain a plan or a snapshot: which experts are read where and why, by records alone; write masks of its experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import combinations
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import digest_of_files
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable, Unchanged, files_of
from mergepipe.checkpoints.open_files import check_unchanged, decoded, open_files, read_elements
from mergepipe.checkpoints.quantised import MASK_BITS
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, BlockGrid, Span
from mergepipe.core.units import format_bytes
from mergepipe.engine.planned_access import FREE, OMITTED, level_of_blocks
from mergepipe.errors import NotFoundError, RecipeError, UnsupportedError, did_you_mean
from mergepipe.jobs.snapshots import find_snapshot, read_manifest_value, with_inputs_found
from mergepipe.operators.base import NUMBERS_OF
from mergepipe.operators.statistics import N_SKETCH, TensorStatistics
from mergepipe.options import home_of
from mergepipe.planning.plan import ALL, Plan, PlannedTensor
from mergepipe.planning.selection import layer_of
from mergepipe.recipes.tasks import Action, MergeTask
from mergepipe.reports import BlockUse, ExpertMask, ExpertShare, Explanation, LayerShare, Overlap, TensorUse
from mergepipe.runs.adapters import AdapterWriter
from mergepipe.runs.budget import BlockCounts, analysis_advice, blocks_by_level, count_blocks, level_name, verdict_of
from mergepipe.runs.inputs import open_path
from mergepipe.runs.known_statistics import KnownStatistics
from mergepipe.runs.stored_plan import plan_of, read_plan
from mergepipe.runs.touch_map import full_merge_tensors, runs_text
from mergepipe.snapshots.manifest import BASE_ROLE, FILE_SUFFIXES, MANIFEST_NAME, Manifest
from mergepipe.snapshots.staging import Staging, check_target
from mergepipe.storage.contract import BESIDE, Store, is_file
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import output_place
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.stores import Stores


def explain(
    subject: Plan | str | Path,
    *,
    tensor: str | None = None,
    masks: str | Path | None = None,
    home: str | Path | None = None,
) -> Explanation:
    """Explain which experts contribute to which blocks of a plan or a snapshot, and why; reads no tensor data.

    Args:
        subject: a plan, given or stored, or a snapshot: its directory, its sid, or first digits of it.
        tensor: a shell pattern (`model.layers.0.*`); the tensors it matches are explained block by block.
        masks: of a snapshot: the directory to create for a mask of each expert, which the merged model and the base
            restore it with. This reads the merged weights, the base's and the experts'.
    """
    store, folder = Stores(), home_of(home)
    masks_folder = None if masks is None else output_place(masks).local_path
    if isinstance(subject, Plan):
        explanation = explanation_of(Path(), subject, None, tensor)
    else:
        place, manifest = Location.of(subject), None
        is_snapshot = place.name == MANIFEST_NAME or place.suffix in FILE_SUFFIXES
        if not is_snapshot and place.is_local and is_file(store, place):
            decided: Plan | None = read_plan(subject)
        else:
            place = find_snapshot(subject, folder)
            manifest = read_manifest_value(store, place)
            decided = plan_of(manifest, f"{place / MANIFEST_NAME}: plan")
        explanation = explanation_of(place.as_reported, decided, manifest, tensor)
        explanation = replace(explanation, overlaps=_overlaps(store, decided, manifest, folder))
    return explanation if masks_folder is None else _with_masks(explanation, masks_folder, folder)


def _overlaps(store: Store, plan: Plan | None, manifest: Manifest | None, home: Path) -> tuple[Overlap, ...]:
    """Tell what experts have in common by the statistics on record of their contents; nothing without these."""
    models = manifest.inputs if manifest is not None else plan.models if plan is not None else ()
    base = next((digest_of_files(CheckpointKind.FULL, model.files) for model in models if model.role == "base"), None)
    known = KnownStatistics(store, home, [], beside=False)
    experts: dict[str, Mapping[str, TensorStatistics]] = {}
    for model in models:
        digests = [digest_of_files(kind, model.files) for kind in CheckpointKind if model.role == "expert"]
        for file in filter(None, (known.of_contents(digest, base) for digest in digests)):
            experts[model.model] = file.tensors
    return overlaps_of(experts)


def explanation_of(
    path: Path | Location, plan: Plan | None, manifest: Manifest | None, pattern: str | None
) -> Explanation:
    """Explain a plan, a manifest, or a manifest that contains its plan."""
    source: Plan | Manifest
    if plan is not None:
        source = plan
        tensors = plan.tensors
        models = [(model.model, model.path) for model in plan.models if model.role != BASE_ROLE]
        block_elements = plan.block_elements
    elif manifest is not None:
        source = manifest
        tensors = full_merge_tensors(manifest)
        models = [(model.model, model.path) for model in manifest.inputs if model.role != BASE_ROLE]
        block_elements = DEFAULT_BLOCK_ELEMENTS
    else:
        raise ValueError("neither a plan nor a manifest")
    counts = count_blocks(tensors, block_elements, len(models))
    return Explanation(
        kind="plan" if manifest is None else "snapshot",
        path=path,
        sid=None if manifest is None else manifest.sid,
        plan_digest=None if plan is None else plan.digest,
        summary="" if manifest is None else manifest.summary,
        operator=source.operator,
        policy=None if plan is None else plan.policy,
        on_omit=None if plan is None else plan.on_omit,
        seed=source.seed,
        budget_bytes=None if plan is None else plan.budget_bytes,
        planned_bytes=None if plan is None else plan.planned_bytes,
        full_bytes=None if plan is None else plan.full_cost_bytes,
        realized_bytes=None if manifest is None else manifest.realized.expert + manifest.realized.analysis,
        block_elements=block_elements,
        blocks=counts.blocks,
        touched=counts.touched,
        experts=_expert_shares(counts, models, plan, manifest),
        layers=_layer_shares(tensors, block_elements, len(models)),
        tensors=()
        if pattern is None
        else _tensor_uses(tensors, block_elements, pattern, [name for name, _ in models], plan),
        fallbacks=() if plan is None else plan.fallbacks,
        adjustments=() if plan is None else plan.adjustments,
        verdict=None if plan is None else verdict_of(plan),
        sampling=None if plan is None else plan.sampling,
        bound=None if plan is None else plan.bound,
        recipe_notices=() if plan is None else plan.recipe_notices,
        advice=() if plan is None else analysis_advice(plan),
    )


def _expert_shares(
    counts: BlockCounts, models: Sequence[tuple[str, str]], plan: Plan | None, manifest: Manifest | None
) -> tuple[ExpertShare, ...]:
    planned = [model for model in plan.models if model.role == "expert"] if plan is not None else None
    realized = [source.read_bytes for source in manifest.inputs if source.is_expert] if manifest else None
    read_E, free_E, omitted_E, in_part_E = (
        blocks_E.tolist() for blocks_E in (counts.read_E, counts.free_E, counts.omitted_E, counts.in_part_E)
    )
    return tuple(
        ExpertShare(
            model=model,
            path=path,
            read=read_E[e],
            free=free_E[e],
            omitted=omitted_E[e],
            full_bytes=None if planned is None else planned[e].full_cost_bytes,
            planned_bytes=None if planned is None else planned[e].planned_bytes,
            realized_bytes=None if realized is None else realized[e],
            in_part=in_part_E[e],
            levels=blocks_by_level(counts.level_EL[e]),
        )
        for e, (model, path) in enumerate(models)
    )


def _layer_shares(tensors: Sequence[PlannedTensor], block_elements: int, n_experts: int) -> tuple[LayerShare, ...]:
    """Sum the shares by layer, in numeric order, tensors outside layers last."""
    by_layer: dict[str, list[PlannedTensor]] = {}
    for tensor in tensors:
        by_layer.setdefault(layer_of(tensor.name), []).append(tensor)
    shares = []
    for layer, inside in sorted(by_layer.items(), key=lambda item: (not item[0], int(item[0] or 0))):
        counts = count_blocks(inside, block_elements, n_experts)
        taking_part, levels = counts.read_E + counts.free_E, blocks_by_level(counts.level_EL.sum(axis=0))
        shares.append(LayerShare(layer, counts.blocks, counts.touched, tuple(taking_part.tolist()), levels))
    return tuple(shares)


def _reasons(plan: Plan | None) -> tuple[Callable[[PlannedTensor], str], str]:
    """Return a function that says why blocks of a tensor are read, and why others are omitted."""
    if plan is None:
        return lambda _: "a full merge reads everything", ""
    if plan.planned_bytes == 0:
        return lambda _: "", "the budget holds no block"
    if plan.sampling is not None:
        return lambda tensor: _drawn(tensor, plan.seed), "not drawn: it stays equal to the base"
    spent = f"the budget of {format_bytes(plan.budget_bytes)} was spent first, by policy '{plan.policy}'"
    return lambda _: f"chosen by policy '{plan.policy}'", spent


def _drawn(tensor: PlannedTensor, seed: int) -> str:
    if tensor.probability >= 1:
        return "all of the tensor is in the sample"
    if not tensor.probability:
        return ""  # nothing of it is read
    drawn = f"drawn with probability {tensor.probability:.3g}, seed {seed}"
    return f"{drawn}; the merged delta is multiplied by {1 / tensor.probability:.3g}"


def _tensor_uses(
    tensors: Sequence[PlannedTensor], block_elements: int, pattern: str, names: Sequence[str], plan: Plan | None
) -> tuple[TensorUse, ...]:
    reading, omitted = _reasons(plan)
    chosen = [tensor for tensor in tensors if fnmatchcase(tensor.name, pattern)]
    if not chosen:
        hint = did_you_mean(pattern, [tensor.name for tensor in tensors])
        raise NotFoundError.of("tensor.not-found", "--tensor", f"no merged tensor matches '{pattern}'", hint)
    uses = []
    for tensor in chosen:
        levels_EB = level_of_blocks(tensor, BlockGrid(tensor.n_elements, block_elements).n_blocks)
        experts = sorted(zip(tensor.models, levels_EB, strict=True), key=lambda expert: expert[0])
        blocks = tuple(use for e, levels_B in experts for use in _uses(levels_B, names[e], reading(tensor), omitted))
        touched = runs_text(np.any(levels_EB > OMITTED, axis=0))
        uses.append(TensorUse(tensor.name, levels_EB.shape[1], touched, blocks))
    return tuple(uses)


def _uses(levels_B: NDArray[np.int16], model: str, reading: str, why_omitted: str) -> Iterator[BlockUse]:
    present = set(levels_B.tolist())
    for level in filter(present.__contains__, (ALL, *range(1, ALL), FREE, OMITTED)):
        if level == ALL:
            use, why = "read", reading
        elif level == FREE:
            use, why = "free", "equal to the base's, known without reading"
        elif level == OMITTED:
            use, why = "omitted", why_omitted
        else:
            use, why = f"read at level {level}", f"{level_name(level)}; {reading}"
        yield BlockUse(model, use, runs_text(levels_B == level), why)


# --- masks of a snapshot's experts ---


_MASKED_ELEMENTS = 1 << 22  # compared at once; a multiple of 8


def _with_masks(explanation: Explanation, out: Path, home: Path) -> Explanation:
    """Write a mask of each expert of a snapshot into a new folder, and add them to its explanation.

    A bit is set where the merged value is nearer to the expert's than the base's is: no other mask leaves `M_0 + mask
    (M - M_0)` nearer to the expert. A tensor's mask is named after it, with `MASK_BITS` at the end, and read by
    `codes.PackedBits`; where rows are no whole bytes it has the tensor's name, in float16.
    Memory: 128 MiB, and the masks of a tensor.

    Source: Wang et al. 2024 (TALL masks, arXiv 2405.07813), Eq. 4 with threshold 1, against the merged delta; a scale
    for each expert as Huang et al. 2024 (EMR, arXiv 2405.17461), here that of least squares.
    """
    from mergepipe.jobs.replay import open_recorded  # which loads the engine

    if explanation.sid is None:
        raise RecipeError.of("option.conflict", "masks", "a plan has no merged weights", "give a snapshot")
    store, place = Stores(), Location.of(explanation.path)
    manifest = read_manifest_value(store, place)
    inputs = open_recorded(with_inputs_found(manifest, store, home), store)
    if inputs.intermediates:
        message = "its experts were merged by other documents of its recipe, and are not stored"
        raise UnsupportedError.of("recipe.unsupported", place, message, "merge these into separate folders first")
    beside = [place.parent / file.name.removeprefix(BESIDE) for file in manifest.files if file.name.startswith(BESIDE)]
    merged = open_path(store, beside[0] if beside else place)
    resolution = (inputs.plain or inputs).resolution
    tasks = [task for task in resolution.tasks if task.action is Action.MERGE and task.base.n_elements]
    experts = sorted({
        model
        for task in tasks
        for model, parameters in zip(task.expert_models, task.parameters.experts, strict=True)
        if NUMBERS_OF not in parameters
    })  # fmt: skip
    checkpoints = (merged, *(checkpoint for _, _, checkpoint in inputs.leaves()))
    check_target(out, (checkpoint.path for checkpoint in checkpoints), force=None)
    paths = files_of(source for task in tasks for source in (merged.tensors[task.name], task.base, *task.experts))
    names = list[str]()
    for model in experts:
        source = resolution.models[model]
        stem = (source.adapter or source.path).name.removesuffix(".safetensors")
        names.append(stem if stem not in names else f"{stem}-{model}")
    possible = [_mask_of(task) for task in tasks]
    with open_files(store, paths, checkpoints) as files, Staging(out, force=False) as staging, ExitStack() as stack:
        writers = {
            model: stack.enter_context(AdapterWriter(staging.path / f"{name}.safetensors", possible, store.ledger))
            for model, name in zip(experts, names, strict=True)
        }
        written = _write_masks(writers, tasks, merged, files)
        for writer in writers.values():
            writer.finish()
        check_unchanged(store, checkpoints)
        staging.publish()
    masks = (
        replace(mask, model=resolution.models[model].text, file=str(out / f"{name}.safetensors"))
        for model, name, mask in zip(experts, names, written, strict=True)
    )
    return replace(explanation, masks=tuple(masks))


def _mask_of(task: MergeTask) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of a tensor's stored mask."""
    if not task.shape or task.shape[-1] % 8:
        return task.name, task.shape
    return f"{task.name}.{MASK_BITS}", (*task.shape[:-1], task.shape[-1] // 8)


@np.errstate(invalid="ignore")  # infinity less infinity
def _write_masks(
    writers: Mapping[int, AdapterWriter],
    tasks: Sequence[MergeTask],
    merged: Checkpoint,
    files: Mapping[Location, RangeFile],
) -> list[ExpertMask]:
    """Write the masks of all experts, in one pass, without elements that are not finite; the caller says the names."""

    def values(tensor: Readable, span: Span, purpose: Purpose) -> NDArray[np.float32]:
        return decoded(read_elements(tensor, span, files, purpose), tensor.dtype.kernel_code)

    products_E3, n_set_E, n_elements = np.zeros((len(writers), 3)), np.zeros(len(writers), np.int64), 0
    for task in tasks:
        name, shape = _mask_of(task)
        is_packed, experts = name != task.name, dict(zip(task.expert_models, task.experts, strict=True))
        parts = {model: list[NDArray[Any]]() for model in writers}
        for span in BlockGrid(task.base.n_elements, _MASKED_ELEMENTS).spans():
            base_N = values(task.base, span, Purpose.BASE)
            change_N = values(merged.tensors[task.name], span, Purpose.EXPERT) - base_N
            for e, model in enumerate(writers):
                expert, delta_N = experts.get(model), np.zeros_like(base_N)
                if expert is not None and not isinstance(expert, Unchanged):
                    delta_N = values(expert, span, Purpose.EXPERT) - (0 if expert.is_delta else base_N)
                delta_N = np.where(np.isfinite(delta_N) & np.isfinite(change_N), delta_N, 0)
                mask_N = np.abs(delta_N) > np.abs(change_N - delta_N)
                pair_2N = np.stack([np.where(mask_N, change_N, 0), delta_N]).astype(np.float64)
                products_E3[e] += (pair_2N @ pair_2N.T)[[0, 0, 1], [0, 1, 1]]
                n_set_E[e] += mask_N.sum()
                parts[model].append(np.packbits(mask_N, bitorder="little") if is_packed else mask_N.astype(np.float16))
        n_elements += task.base.n_elements
        for model, writer in writers.items():
            writer.append(name, np.concatenate(parts[model]), shape, "U8" if is_packed else "F16")
    shares_E = (n_set_E / max(1, n_elements)).tolist()
    return [_mask_of_products(share, *products) for share, products in zip(shares_E, products_E3.tolist(), strict=True)]


def _mask_of_products(share: float, masked: float, both: float, own: float) -> ExpertMask:
    """Return what a mask keeps, by the inner products of the masked delta and of the expert's, each with itself."""
    lost = 1.0 - both**2 / (masked * own) if masked and own else float(own > 0)
    return ExpertMask("", "", share, both / masked if masked else 1.0, max(0.0, lost) ** 0.5)


# --- tell how much the deltas of experts have in common, by layer, from statistics alone: no tensor is read ---


def overlaps_of(experts: Mapping[str, Mapping[str, TensorStatistics]]) -> tuple[Overlap, ...]:
    """Estimate the overlap of each two experts in each layer, from each one's statistics by tensor.

    Tensors that both have statistics of count, on one grid of blocks. Layers come in numeric order, tensors outside
    of layers last. Memory: 160 bytes for each block of a layer.
    """
    overlaps = []
    for first, second in combinations(experts, 2):
        one, other = experts[first], experts[second]
        by_layer: dict[str, list[str]] = defaultdict(list)
        for name in sorted(one):  # sums depend on the order, and statistics come in that of their completion
            if name in other and one[name].grid == other[name].grid:
                by_layer[layer_of(name)].append(name)
        for layer, names in sorted(by_layer.items(), key=lambda item: (not item[0], int(item[0] or 0))):
            grids = [one[name].grid for name in names]
            sizes_B = np.array([grid.span(b).n_elements for grid in grids for b in range(grid.n_blocks)])
            one_B = np.concatenate([one[name].blocks_B for name in names])
            other_B = np.concatenate([other[name].blocks_B for name in names])
            overlaps.append(_overlap((first, second, layer), one_B, other_B, sizes_B))
    return tuple(overlaps)


def _overlap(
    names: tuple[str, str, str], one_B: NDArray[np.void], other_B: NDArray[np.void], sizes_B: NDArray[np.int64]
) -> Overlap:
    is_defined_B = np.isfinite(one_B["norm"]) & np.isfinite(other_B["norm"])  # else a delta has no direction
    norm_2B = np.stack([one_B["norm"], other_B["norm"]])[:, is_defined_B].astype(np.float64)
    scaled_2BS = np.stack([one_B["sketch"], other_B["sketch"]])[:, is_defined_B] * norm_2B[:, :, np.newaxis]
    gram_22 = np.tensordot(scaled_2BS, scaled_2BS, axes=((1, 2), (1, 2)))
    scale = sqrt(gram_22[0, 0] * gram_22[1, 1])
    cosine = float(np.clip(gram_22[0, 1] / scale, -1.0, 1.0)) if scale else 0.0
    weight_B = norm_2B[0] * norm_2B[1]
    sampled = N_SKETCH * weight_B.sum() ** 2 / np.square(weight_B).sum() if weight_B.any() else np.inf
    changed_2B = np.stack([one_B["changed"], other_B["changed"]]).astype(np.float64)
    is_same_B = (one_B["hash"] == other_B["hash"]).all(axis=1)
    most_B = changed_2B.min(axis=0)
    both_B = np.where(is_same_B, most_B, changed_2B[0] * changed_2B[1] / np.maximum(sizes_B, 1))
    least_B = np.where(is_same_B, most_B, np.maximum(changed_2B.sum(axis=0) - sizes_B, 0.0))
    return Overlap(
        first=names[0],
        second=names[1],
        layer=names[2],
        norms=(float(np.linalg.norm(norm_2B[0])), float(np.linalg.norm(norm_2B[1]))),
        cosine=cosine,
        cosine_error=(1 - cosine**2) / sqrt(sampled),
        changed=(int(changed_2B[0].sum()), int(changed_2B[1].sum())),
        both=float(both_B.sum()),
        both_least=int(least_B.sum()),
        both_most=int(most_B.sum()),
    )
