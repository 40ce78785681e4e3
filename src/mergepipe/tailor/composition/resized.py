"""Plan composites of restacked models that have other parameters than the skeleton: files are laid out anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe.checkpoints.formats.inert_values import PickledTensor
from mergepipe.checkpoints.formats.torch_zip import read_torch_zip
from mergepipe.core.blocks import DType, Span
from mergepipe.snapshots.shards import INDEX_NAME, TensorSpec, plan_shards
from mergepipe.storage.contract import Store
from mergepipe.tailor.checkpoint import WEIGHT
from mergepipe.tailor.composition.archives.archive_rewrite import ArchiveRewrite
from mergepipe.tailor.composition.composition_plan import (
    CompositionPlan,
    PatchCollector,
    pack_step,
    plan_file,
    state_segments,
)
from mergepipe.tailor.composition.copy.plan import FilePlan, Literal, Segment
from mergepipe.tailor.composition.request.assignment import Assignment
from mergepipe.tailor.composition.request.restack import restacked_names
from mergepipe.tailor.composition.skeleton_files import SkeletonFile, list_skeleton
from mergepipe.tailor.composition.staleness import StepChoice, choose_steps, staleness_of
from mergepipe.tailor.composition.state_overlay import StateOverlay, apply_edits, overlay_state
from mergepipe.tailor.formats.hf_optimizer import OPTIMIZER_NAME, parameter_groups
from mergepipe.tailor.formats.pickle_node import Node

_WEIGHTS_SUFFIX = ".safetensors"
_ONE_FILE = 1 << 62


def is_weight_file(file: SkeletonFile) -> bool:
    """Whether a file of the skeleton holds its weights for other programs, or lists such files."""
    return file.name == INDEX_NAME or (file.name.endswith(_WEIGHTS_SUFFIX) and "/" not in file.name)


def weight_file(store: Store, assignment: Assignment, kind: str) -> FilePlan:
    """Plan the one safetensors file of the result's weights; `kind` is what they are in the skeleton."""
    states = {name: state for (name, k), state in assignment.model.states.items() if k == kind}
    specs = [TensorSpec(name, state.dtype, state.shape) for name, state in states.items()]
    (shard,) = plan_shards(specs, _ONE_FILE)
    segments: list[Segment] = [Literal(shard.header)]
    for tensor in shard.tensors:
        segments += whole_state(store, assignment, tensor.name, kind, tensor.dtype)
    return FilePlan(shard.name, tuple(segments))


def whole_state(store: Store, assignment: Assignment, name: str, kind: str, dtype: DType) -> Iterator[Segment]:
    """Yield the segments of all elements of a state of the result."""
    stored = assignment.state_of(name, kind)
    return state_segments(store, stored, Span(0, stored.n_elements), dtype)


def plan_resized_hf(store: Store, assignment: Assignment) -> CompositionPlan:
    """Plan a plain Trainer checkpoint of the restacked model."""
    steps = choose_steps(assignment)
    overlay = overlay_state(store, assignment, list_skeleton(store, assignment.skeleton))
    plans = [weight_file(store, assignment, WEIGHT), _optimizer_file(store, assignment, overlay, steps)]
    plans += [
        plan_file(store, file, PatchCollector(store), overlay)
        for file in overlay.files
        if file.name != OPTIMIZER_NAME and not is_weight_file(file)
    ]
    ordered = tuple(sorted(plans, key=lambda plan: plan.name))
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), ordered)


def _optimizer_file(
    store: Store, assignment: Assignment, overlay: StateOverlay, steps: Sequence[StepChoice]
) -> FilePlan:
    """Plan `optimizer.pt`, whose numbers count the restacked model's parameters."""
    skeleton = assignment.skeleton
    archive = read_torch_zip(store, skeleton.root / OPTIMIZER_NAME)
    root = Node(archive.root, OPTIMIZER_NAME)
    apply_edits(overlay.edits_of(archive.file), root)
    rewrite = ArchiveRewrite(archive)
    groups = parameter_groups(store, skeleton.root)
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    counters = {name: choice for choice in steps for name in choice.counter.parameters}
    entries: dict[object, object] = {}
    members: list[list[int]] = []
    for group in groups:
        pairs = restacked_names(group, skeleton.units, assignment.layers or ())
        members.append(list(range(len(entries), len(entries) + len(pairs))))
        for name, before in pairs:
            entry = root.get("state").get(numbers[before])
            entries[len(entries)] = dict(_entry(store, assignment, rewrite, name, entry, counters.get(name)))
    states = root.get("state").mapping()
    states.clear()
    states.update(entries)
    listed = [group for group in root.get("param_groups").elements() if group.get("params").elements()]
    for group_options, group_members in zip(listed, [m for m in members if m], strict=True):
        group_options.mapping()["params"] = group_members
    return rewrite.plan(OPTIMIZER_NAME)


def _entry(
    store: Store, assignment: Assignment, rewrite: ArchiveRewrite, name: str, old: Node, choice: StepChoice | None
) -> Iterator[tuple[object, object]]:
    """Yield the optimizer's states of one parameter, in the form of an entry that there was."""
    for kind, node in old.named_items():
        value = node.value
        if not isinstance(value, PickledTensor):
            yield kind, int(choice.value) if kind == "step" and choice is not None else value
        elif kind == "step" and choice is not None:
            yield kind, rewrite.tensor((Literal(pack_step(choice)),), value.dtype, value.shape)
        else:
            segments = tuple(whole_state(store, assignment, name, kind, value.dtype))
            yield kind, rewrite.tensor(segments, value.dtype, value.shape)
