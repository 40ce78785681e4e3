"""Lay out DeepSpeed ZeRO files anew: flat groups are concatenated and cut again, for the same ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mergepipe.checkpoints.inert_pickle import Global, PickledTensor, Record
from mergepipe.checkpoints.torch_file import read_torch_zip
from mergepipe.core.blocks import DType, Span, element_count
from mergepipe.recipes.tasks import LayerCount
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.archives import plan_rewritten
from mergepipe.tailor.assignment import StepChoice
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT, TrainingCheckpoint
from mergepipe.tailor.composition_plan import NewTensors
from mergepipe.tailor.copy_plan import FilePlan, Literal, Segment
from mergepipe.tailor.formats.contract import Node, root_of
from mergepipe.tailor.formats.deepspeed import (
    FlatParts,
    base_optimizer_path,
    cut_alone,
    cut_together,
    list_zero_files,
    masters_key,
)
from mergepipe.tailor.pickle_writer import torch_size
from mergepipe.tailor.resized_model import FlatGroup, ResizedModel, new_counter, no_other_layers
from mergepipe.tailor.restacking import in_layers, names_after, restacked_names

_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SUB_GROUP_ELEMENTS = 1_000_000_000  # DeepSpeed's default


def zero_groups(store: Store, skeleton: TrainingCheckpoint, layers: LayerCount) -> tuple[FlatGroup, ...]:
    """Compute the flat groups that the framework makes of the model's parameters; stage 3 cuts them by their size.

    Raises:
        UnsupportedError: the skeleton's groups are not what is known to be made.
    """
    files = list_zero_files(store, skeleton.root)
    if files is None:
        raise no_other_layers(skeleton.path, "is a partial checkpoint of a run with ZeRO")
    if skeleton.stage != 3:
        return tuple(
            FlatGroup(_restacked_group(skeleton, names, layers), number, number)
            for number, names in enumerate(skeleton.flat_groups)
        )
    optimizer_files, _ = files
    optimizer_file = root_of(read_torch_zip(store, optimizer_files[min(optimizer_files)]))
    limit = _sub_group_elements(optimizer_file)
    groups: list[FlatGroup] = []
    cuts_before: list[tuple[str, ...]] = []
    for number, options in enumerate(optimizer_file.at(base_optimizer_path(3)).get("param_groups").elements()):
        members = options.get("params").shape()
        joined: list[str] = []
        for index in members:
            joined += skeleton.flat_groups[index]
        cuts_before += _cut(skeleton.parameters, joined, skeleton.world_size, limit)
        shapes = {name: skeleton.parameters[origin] for name, origin in restacked_names(joined, layers)}
        for names in _cut(shapes, _restacked_group(skeleton, joined, layers), skeleton.world_size, limit):
            groups.append(FlatGroup(names, members[0], number))
    if tuple(cuts_before) != skeleton.flat_groups:
        raise no_other_layers(skeleton.path, f"has flat groups that are not cut by a sub_group_size of {limit:g}")
    return tuple(groups)


def _restacked_group(skeleton: TrainingCheckpoint, names: Sequence[str], layers: LayerCount) -> tuple[str, ...]:
    """Return a group's parameters in the result; it must hold all layers, one after another, or none."""
    held = {skeleton.units.unit_of(name) for name in names if in_layers(name, layers)}
    if held and len(held) < layers.before:
        raise no_other_layers(skeleton.path, f"has groups of single layers, as that of {min(held)}")
    in_order = replace(layers, origins=tuple(range(layers.before)))
    if names_after(names, in_order) != tuple(names):
        raise no_other_layers(skeleton.path, "has groups in which layers do not follow one another")
    return names_after(names, layers)


def _sub_group_elements(optimizer_file: Node) -> float:
    """Return `sub_group_size` of the configuration that the checkpoint was saved with."""
    stated: object = optimizer_file.mapping().get("ds_config")
    for key in ("zero_optimization", "sub_group_size"):
        stated = stated.get(key) if isinstance(stated, dict) else None
    return stated if isinstance(stated, int | float) else _SUB_GROUP_ELEMENTS


def _cut(
    shapes: Mapping[str, tuple[int, ...]], names: Sequence[str], n_ranks: int, limit: float
) -> Iterator[tuple[str, ...]]:
    """Cut a group of parameters: a flat group ends as soon as a rank's part of it has `limit` elements."""
    group: list[str] = []
    n_elements = 0
    for name in names:
        group.append(name)
        n_elements += -(-element_count(shapes[name]) // n_ranks)
        if n_elements >= limit:
            yield tuple(group)
            group = []
            n_elements = 0
    if group:
        yield tuple(group)


def zero_files(result: ResizedModel) -> Iterator[FilePlan]:
    files = list_zero_files(result.store, result.skeleton.root)
    if files is None:
        raise AssertionError("its flat groups were read")
    optimizer_files, model_files = files
    if EXPORT in result.skeleton.kinds:
        yield from result.weight_files(EXPORT)
    for file in model_files.values():
        yield _model_file(result, file)
    for rank, file in optimizer_files.items():
        yield _rank_file(result, file, rank)


def _model_file(result: ResizedModel, file: Location) -> FilePlan:
    """Plan a model file: the module's weights (stages 1 and 2) or their names (stage 3), and the shapes of groups."""
    model = result.model
    archive, root = result.open(file)
    new = NewTensors(archive)
    frozen = root.find("frozen_param_shapes")
    if frozen is not None and frozen.mapping():
        raise no_other_layers(file, f"holds frozen parameters, as {next(iter(frozen.mapping()))}")
    old = root.get("module").mapping()
    module: dict[object, object] = {}
    for name, origin in restacked_names(map(str, old), result.layers):
        state = model.states.get((name, WEIGHT))
        module[name] = old[origin]
        if state is not None:
            module[name] = new.add(result.segments(name, WEIGHT, state.dtype), state.dtype, state.shape)
    for alias, owner in model.units.tied.items():
        if alias in module:
            module[alias] = module[owner]
    old.clear()
    old.update(module)
    buffers = root.find("buffer_names")
    if buffers is not None:
        names = [node.text() for node in buffers.elements()]
        root.mapping()["buffer_names"] = list(names_after(names, result.layers))
    shapes: list[object] = []
    for group in result.groups:
        shapes.append({name: torch_size(model.parameters[name]) for name in group.names})
    root.mapping()["param_shapes"] = shapes
    return plan_rewritten(result.name_of(file), archive, root.value, new.members)


@dataclass(frozen=True, slots=True)
class _Partition:
    """A rank's part of a flat group: parameters, their elements and places; its elements, and padding among them."""

    parts: tuple[tuple[str, Span, int], ...]
    n_elements: int
    n_padding: int


def _partition(result: ResizedModel, group: Sequence[str], rank: int) -> _Partition:
    skeleton = result.skeleton
    n_ranks = skeleton.world_size
    shapes = {name: result.model.parameters[name] for name in group}
    sizes = [element_count(shape) for shape in shapes.values()]
    if skeleton.stage == 3:
        shares = [-(-size // n_ranks) for size in sizes]
        return _Partition(_held(cut_alone(shapes, shares, rank)), sum(shares), 0)
    share = -(-sum(sizes) // (2 * n_ranks)) * 2
    n_padding = share * n_ranks - sum(sizes)
    if n_padding >= share:
        raise no_other_layers(skeleton.path, f"has a group of {sum(sizes)} elements for {n_ranks} ranks")
    is_last = rank == n_ranks - 1
    return _Partition(_held(cut_together(shapes, share, rank)), share, n_padding if is_last else 0)


def _held(parts: FlatParts) -> tuple[tuple[str, Span, int], ...]:
    """Return the parts of a rank that hold elements."""
    return tuple(part for part in parts if part[1].n_elements)


def _rank_file(result: ResizedModel, file: Location, rank: int) -> FilePlan:
    """Plan one rank's optimizer file with the structure of the skeleton's."""
    stage = result.skeleton.stage
    archive, root = result.open(file)
    new = NewTensors(archive)
    optimizer = root.get("optimizer_state_dict")
    states = root.at(base_optimizer_path(stage)).get("state")
    masters = [node.tensor() for node in optimizer.get(masters_key(stage)).elements()]
    flats: list[object] = []
    entries: dict[object, object] = {}
    for number, group in enumerate(result.groups):
        partition = _partition(result, group.names, rank)
        flats.append(_flat(result, new, FP32, masters[group.like].dtype, partition, is_trimmed=True))
        entry = states.find(group.like)
        if entry is not None:
            choice = result.step_of.get(group.names[0])
            states_after: dict[object, object] = {}
            for kind, node in entry.items():
                states_after[kind] = _entry(result, new, node, kind, partition, choice)
            entries[number] = states_after
        if stage != 3:
            _describe_partition(optimizer, number, partition, len(group.names))
    optimizer.mapping()[masters_key(stage)] = flats
    base = root.at(base_optimizer_path(stage))
    base.mapping()["state"] = entries
    for number, options in enumerate(base.get("param_groups").elements() if stage == 3 else ()):
        options.mapping()["params"] = [n for n, group in enumerate(result.groups) if group.options == number]
    return plan_rewritten(result.name_of(file), archive, root.value, new.members)


def _entry(
    result: ResizedModel, new: NewTensors, node: Node, kind: object, partition: _Partition, choice: StepChoice | None
) -> object:
    """Make one state of a flat group in the form of the skeleton's."""
    value = node.value
    if kind == "step" and choice is not None:
        return new_counter(new, value, choice)
    if isinstance(value, PickledTensor) and value.shape:
        return _flat(result, new, str(kind), value.dtype, partition)
    return value


def _flat(
    result: ResizedModel, new: NewTensors, kind: str, dtype: DType, partition: _Partition, *, is_trimmed: bool = False
) -> PickledTensor:
    """Plan one state of a rank's part of a group as a flat tensor; of the masters, padding is left out."""
    n_elements = partition.n_elements - (partition.n_padding if is_trimmed else 0)
    segments: list[Segment] = []
    end = 0
    for name, span, start in partition.parts:
        segments.append(Literal(bytes((start - end) * dtype.itemsize)))
        segments += result.segments(name, kind, dtype, span)
        end = start + span.n_elements
    segments.append(Literal(bytes((n_elements - end) * dtype.itemsize)))
    return new.add(segments, dtype, (n_elements,))


def _describe_partition(optimizer: Node, number: int, partition: _Partition, n_parameters: int) -> None:
    """Write down how stages 1 and 2 have cut a group."""
    fragments: dict[str, Record] = {}
    for name, span, start in partition.parts:
        fragments[name] = Record(_FRAGMENT, (), {"numel": span.n_elements, "start": start})
    for key, value in (
        ("group_paddings", partition.n_padding),
        ("param_slice_mappings", fragments),
        ("param_alignment_paddings", [0] * n_parameters),
    ):
        node = optimizer.find(key)
        if node is not None and isinstance(node.value, list):
            node.value[number] = value
