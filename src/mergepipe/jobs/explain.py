"""Explain a plan or a snapshot: which experts are read where and why, planned and realized. Reads no tensor data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import digest_of_files
from mergepipe.checkpoints.contract import CheckpointKind
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, BlockGrid, element_count
from mergepipe.engine.tensor_work import FREE, OMITTED, level_of_blocks
from mergepipe.errors import NotFoundError, did_you_mean
from mergepipe.jobs.plan import read_plan
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.planning.overlap import overlaps_of
from mergepipe.planning.plan import ALL, Access, Plan, PlannedTensor, format_runs, read_alike
from mergepipe.planning.selection import layer_of
from mergepipe.recipes.tasks import Action
from mergepipe.reports import BlockUse, ExpertShare, Explanation, LayerShare, Overlap, TensorUse
from mergepipe.runs.budget import BlockCounts, analysis_advice, blocks_by_level, count_blocks, level_name, verdict_of
from mergepipe.runs.snapshots import find_snapshot_path, read_manifest_value
from mergepipe.runs.stored_plan import plan_of
from mergepipe.runs.work import KnownStatistics
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


def explain_subject(subject_text: str, pattern: str | None, home: Path) -> Explanation:
    """Explain a snapshot (its directory, sid or prefix of the sid) or a stored plan.

    `pattern` chooses tensors that are told of block by block, by a shell pattern over their names.
    """
    store, place, plan = Stores(), Location.of(subject_text), None
    if place.name != MANIFEST_NAME and is_file(store, place):
        path, plan, manifest = Path(subject_text), read_plan(store, place), None
    else:
        path = find_snapshot_path(subject_text, home)
        manifest = read_manifest_value(store, Location.local(path))
        plan = plan_of(manifest, f"{path / MANIFEST_NAME}: plan")
    explanation = explanation_of(path, plan, manifest, pattern)
    return replace(explanation, overlaps=_overlaps(store, plan, manifest, home))


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


def explanation_of(path: Path, plan: Plan | None, manifest: Manifest | None, pattern: str | None) -> Explanation:
    """Explain a plan, a manifest, or a manifest that contains its plan."""
    source = plan if plan is not None else manifest
    if source is None:
        raise ValueError("neither a plan nor a manifest")
    tensors = plan.tensors if plan is not None else _full_merge_tensors(manifest) if manifest is not None else ()
    sources = plan.models if plan is not None else manifest.inputs if manifest is not None else ()
    models = [(source.model, source.path) for source in sources if source.role == "expert"]
    block_elements = DEFAULT_BLOCK_ELEMENTS if plan is None else plan.block_elements
    counts = count_blocks(tensors, block_elements, len(models))
    return Explanation(
        kind="plan" if manifest is None else "snapshot",
        path=path,
        sid=None if manifest is None else manifest.sid,
        plan_digest=None if plan is None else plan.digest,
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
        recipe_notices=() if plan is None else plan.recipe_notices,
        advice=() if plan is None else analysis_advice(plan),
    )


def _full_merge_tensors(manifest: Manifest) -> tuple[PlannedTensor, ...]:
    """List the tensors of a full merge as if they were planned: every block of every expert, on the default grid."""
    n_experts = sum(source.role == "expert" for source in manifest.inputs)
    tensors = []
    for tensor in manifest.tensors:
        if tensor.action == Action.MERGE.value:
            n_elements = element_count(tensor.shape)
            n_blocks = BlockGrid(n_elements, DEFAULT_BLOCK_ELEMENTS).n_blocks
            reads = read_alike(Access(((0, n_blocks),) if n_blocks else ()), n_experts)
            tensors.append(PlannedTensor(tensor.name, n_elements, 0, tuple(range(n_experts)), reads))
    return tuple(tensors)


def _expert_shares(
    counts: BlockCounts, models: Sequence[tuple[str, str]], plan: Plan | None, manifest: Manifest | None
) -> tuple[ExpertShare, ...]:
    planned = [model for model in plan.models if model.role == "expert"] if plan is not None else None
    realized = [source.read_bytes for source in manifest.inputs if source.role == "expert"] if manifest else None
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
        return lambda tensor: _drawn(tensor, plan.seed), "not drawn: it stays as the base"
    spent = f"the budget of {plan.budget_bytes} bytes was spent first, by policy '{plan.policy}'"
    return lambda _: f"chosen by policy '{plan.policy}'", spent


def _drawn(tensor: PlannedTensor, seed: int) -> str:
    if tensor.probability >= 1:
        return "all of the tensor is in the sample"
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
        touched = _runs_text(np.any(levels_EB > OMITTED, axis=0))
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
        yield BlockUse(model, use, _runs_text(levels_B == level), why)


def _runs_text(is_in_B: NDArray[np.bool_]) -> str:
    """Format the blocks that are in a set as runs."""
    edges = np.flatnonzero(np.diff(is_in_B, prepend=False, append=False)).tolist()
    return format_runs(tuple(zip(edges[::2], edges[1::2], strict=True)))
