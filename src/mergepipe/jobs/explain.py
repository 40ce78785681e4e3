"""Explain a plan or a snapshot: which experts are read where and why, planned and realized. Reads no tensor data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from mergepipe.checkpoints.content_id import digest_of_files
from mergepipe.checkpoints.contract import CheckpointKind
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, element_count
from mergepipe.errors import NotFoundError, did_you_mean
from mergepipe.jobs.plan import read_plan
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.planning.overlap import overlaps_of
from mergepipe.planning.plan import Access, Plan, Runs, format_runs
from mergepipe.planning.selection import layer_of
from mergepipe.recipes.tasks import Action
from mergepipe.reports import BlockUse, ExpertShare, Explanation, LayerShare, Overlap, TensorUse
from mergepipe.runs.budget import analysis_advice, blocks_by_level, level_name, verdict_of
from mergepipe.runs.snapshots import find_snapshot_path, read_manifest_value
from mergepipe.runs.stored_plan import plan_of
from mergepipe.runs.work import KnownStatistics
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

READ, FREE, OMITTED = "read", "free", "omitted"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One merged tensor with its runs of blocks per expert; a full merge has every block in `blocks`.

    Experts that take no part have no access.
    """

    name: str
    n_blocks: int
    access: tuple[Access | None, ...]
    probability: float = 1.0  # that a block was drawn for a sample

    def touched(self) -> Runs:
        """Runs of blocks that at least one expert contributed to."""
        present = [access for access in self.access if access is not None]
        return joined(chain.from_iterable(access.blocks for access in present))


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
    tensors = _planned(plan) if plan is not None else _full_merge_tensors(manifest) if manifest is not None else ()
    sources = plan.models if plan is not None else manifest.inputs if manifest is not None else ()
    models = [(source.model, source.path) for source in sources if source.role == "expert"]
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
        block_elements=DEFAULT_BLOCK_ELEMENTS if plan is None else plan.block_elements,
        blocks=sum(tensor.n_blocks for tensor in tensors),
        touched=sum(_count(tensor.touched()) for tensor in tensors),
        experts=_expert_shares(tensors, models, plan, manifest),
        layers=_layer_shares(tensors, len(models)),
        tensors=() if pattern is None else _tensor_uses(tensors, pattern, [name for name, _ in models], plan),
        fallbacks=() if plan is None else plan.fallbacks,
        adjustments=() if plan is None else plan.adjustments,
        verdict=None if plan is None else verdict_of(plan),
        sampling=None if plan is None else plan.sampling,
        recipe_notices=() if plan is None else plan.recipe_notices,
        advice=() if plan is None else analysis_advice(plan),
    )


def _planned(plan: Plan) -> tuple[_Tensor, ...]:
    n_experts = sum(model.role == "expert" for model in plan.models)
    return tuple(
        _Tensor(
            tensor.name,
            -(-tensor.n_elements // plan.block_elements),
            tuple(tensor.access_of(e) for e in range(n_experts)),
            tensor.probability,
        )
        for tensor in plan.tensors
    )


def _full_merge_tensors(manifest: Manifest) -> tuple[_Tensor, ...]:
    """List the tensors of a full merge: every block of every expert, on the default grid."""
    n_experts = sum(source.role == "expert" for source in manifest.inputs)
    tensors = []
    for tensor in manifest.tensors:
        if tensor.action == Action.MERGE.value:
            n_blocks = -(-element_count(tensor.shape) // DEFAULT_BLOCK_ELEMENTS)
            access = Access(((0, n_blocks),) if n_blocks else ())
            tensors.append(_Tensor(tensor.name, n_blocks, (access,) * n_experts))
    return tuple(tensors)


def _expert_shares(
    tensors: Sequence[_Tensor], models: Sequence[tuple[str, str]], plan: Plan | None, manifest: Manifest | None
) -> tuple[ExpertShare, ...]:
    planned = [model for model in plan.models if model.role == "expert"] if plan is not None else None
    realized = [source.read_bytes for source in manifest.inputs if source.role == "expert"] if manifest else None
    shares = []
    for e, (model, path) in enumerate(models):
        counts = [_counts(tensor, e) for tensor in tensors]
        read, free, omitted = (sum(count[kind] for count in counts) for kind in range(3))
        shares.append(
            ExpertShare(
                model=model,
                path=path,
                read=read,
                free=free,
                omitted=omitted,
                full_bytes=None if planned is None else planned[e].full_cost_bytes,
                planned_bytes=None if planned is None else planned[e].planned_bytes,
                realized_bytes=None if realized is None else realized[e],
                in_part=sum(stop - start for access in _accesses(tensors, e) for start, stop, _ in access.levels),
                levels=blocks_by_level(_accesses(tensors, e)),
            )
        )
    return tuple(shares)


def _accesses(tensors: Iterable[_Tensor], e: int) -> list[Access]:
    """Yield the accesses of an expert, for the tensors it contributes to."""
    return [access for tensor in tensors if (access := tensor.access[e]) is not None]


def _counts(tensor: _Tensor, e: int) -> tuple[int, int, int]:
    """Count the blocks of an expert that are read, free and omitted."""
    access = tensor.access[e]
    if access is None:
        return 0, 0, 0
    read, free = _count(access.blocks), _count(access.free)
    return read, free, tensor.n_blocks - read - free


def _layer_shares(tensors: Sequence[_Tensor], n_experts: int) -> tuple[LayerShare, ...]:
    """Sum the shares by layer, in numeric order, tensors outside layers last."""
    by_layer: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        by_layer.setdefault(layer_of(tensor.name), []).append(tensor)
    ordered = sorted(by_layer.items(), key=lambda item: (not item[0], int(item[0] or 0)))
    return tuple(
        LayerShare(
            layer=layer,
            blocks=sum(tensor.n_blocks for tensor in inside),
            touched=sum(_count(tensor.touched()) for tensor in inside),
            taking_part=tuple(sum(sum(_counts(t, e)[:2]) for t in inside) for e in range(n_experts)),
            levels=blocks_by_level(a for e in range(n_experts) for a in _accesses(inside, e)),
        )
        for layer, inside in ordered
    )


def _reasons(plan: Plan | None) -> tuple[Callable[[_Tensor], str], str]:
    """Return a function that says why blocks of a tensor are read, and why others are omitted."""
    if plan is None:
        return lambda _: "a full merge reads everything", ""
    if plan.planned_bytes == 0:
        return lambda _: "", "the budget holds no block"
    if plan.sampling is not None:
        return lambda tensor: _drawn(tensor, plan.seed), "not drawn: it stays as the base"
    spent = f"the budget of {plan.budget_bytes} bytes was spent first, by policy '{plan.policy}'"
    return lambda _: f"chosen by policy '{plan.policy}'", spent


def _drawn(tensor: _Tensor, seed: int) -> str:
    if tensor.probability >= 1:
        return "all of the tensor is in the sample"
    drawn = f"drawn with probability {tensor.probability:.3g}, seed {seed}"
    return f"{drawn}; the merged delta is multiplied by {1 / tensor.probability:.3g}"


def _tensor_uses(
    tensors: Sequence[_Tensor], pattern: str, names: Sequence[str], plan: Plan | None
) -> tuple[TensorUse, ...]:
    reading, omitted = _reasons(plan)
    chosen = [tensor for tensor in tensors if fnmatchcase(tensor.name, pattern)]
    if not chosen:
        hint = did_you_mean(pattern, [tensor.name for tensor in tensors])
        raise NotFoundError.of("tensor.not-found", "--tensor", f"no merged tensor matches '{pattern}'", hint)
    return tuple(
        TensorUse(
            tensor.name, tensor.n_blocks, format_runs(tensor.touched()),
            tuple(use for e, name in enumerate(names) for use in _uses(tensor, e, name, reading(tensor), omitted)),
        )
        for tensor in chosen
    )  # fmt: skip


def _uses(tensor: _Tensor, e: int, model: str, reading: str, why_omitted: str) -> Iterable[BlockUse]:
    access = tensor.access[e]
    if access is None:
        return
    in_part = joined((start, stop) for start, stop, _ in access.levels)
    in_full = joined(run for start, stop in access.blocks for run in _gaps_inside(in_part, start, stop))
    if in_full:
        yield BlockUse(model, READ, format_runs(in_full), reading)
    for level in sorted({level for _, _, level in access.levels}):
        runs = joined((start, stop) for start, stop, block_level in access.levels if block_level == level)
        yield BlockUse(model, f"{READ} at level {level}", format_runs(runs), f"{level_name(level)}; {reading}")
    if access.free:
        yield BlockUse(model, FREE, format_runs(access.free), "equal to the base's, known without reading")
    omitted = _gaps(access.runs, tensor.n_blocks)
    if omitted:
        yield BlockUse(model, OMITTED, format_runs(omitted), why_omitted)


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return the union of half-open runs: sorted, disjoint, joined where they touch."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return tuple(union)


def _gaps(runs: Runs, n_blocks: int) -> Runs:
    """Return the parts of `[0, n_blocks)` outside `runs` (sorted, disjoint)."""
    edges = [0, *chain.from_iterable(runs), n_blocks]
    return joined((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def _gaps_inside(runs: Runs, start: int, stop: int) -> Runs:
    """Return the parts of `[start, stop)` outside `runs`."""
    inside = [(max(a, start) - start, min(b, stop) - start) for a, b in runs if a < stop and start < b]
    return tuple((a + start, b + start) for a, b in _gaps(tuple(inside), stop - start))


def _count(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)
