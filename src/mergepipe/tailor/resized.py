"""Plan composites whose model has other parameters than the skeleton: files that hold tensors are laid out anew."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.inert_pickle import Global, PickledTensor, Record
from mergepipe.checkpoints.torch_file import TorchArchive, Window, read_torch_zip
from mergepipe.core.blocks import DType, Span, element_count
from mergepipe.errors import MergePipeError, unsupported
from mergepipe.recipes.tasks import LayerCount
from mergepipe.snapshots.shards import TensorSpec, plan_shards
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.archives import InertPickler, new_archive, plan_rewritten, torch_size
from mergepipe.tailor.assignment import Assignment, StepChoice, choose_steps, staleness_of
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT, TrainingCheckpoint
from mergepipe.tailor.composition_plan import (
    SHARD_BYTES,
    CompositionPlan,
    NewTensors,
    SkeletonChanges,
    apply_edits,
    follow_layers,
    pack_step,
    state_segments,
    take_state,
    weight_files,
)
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Literal, Segment
from mergepipe.tailor.formats.contract import Node, root_of
from mergepipe.tailor.formats.dcp import DCP_FORMAT, METADATA_NAME, read_dcp_metadata, tensor_keys
from mergepipe.tailor.formats.deepspeed import (
    ZERO_FORMAT,
    base_optimizer_path,
    cut_alone,
    cut_together,
    list_zero_files,
    masters_key,
)
from mergepipe.tailor.formats.hf_trainer import HF_FORMAT, OPTIMIZER_NAME, numbered_parameters, read_config
from mergepipe.tailor.restacking import in_layers, restacked_names

_INDEX_SUFFIX = ".index.json"
_STACK_WEIGHTS = "stack the weights alone: merge the models by this recipe"


def plan_resized(store: Store, assignment: Assignment) -> CompositionPlan:
    """Plan the composite of a model with other layers than the skeleton has, in the skeleton's format.

    Files without tensors are the skeleton's, changed as in any composite.
    """
    skeleton = assignment.skeleton
    if skeleton.format not in _LAYOUTS or assignment.layers is None:
        raise _refusal(skeleton.path, f"is of format {skeleton.format}")
    changes = SkeletonChanges(store, skeleton)
    take_state(changes, assignment)
    follow_layers(changes, assignment)
    groups = _flat_groups(store, skeleton, assignment.layers) if skeleton.format == ZERO_FORMAT else ()
    steps = choose_steps(assignment, [group.names for group in groups] or None)
    for choice in steps:
        changes.step_in_pickles(choice)
    result = _Result(changes, assignment, assignment.layers, groups, steps)
    made = {plan.name: plan for plan in _LAYOUTS[skeleton.format](result)}
    old_files = {file for state in skeleton.states.values() for piece in state.pieces for file in piece.files}
    for name, copied in changes.files.items():
        if name not in made and copied.file not in old_files and not name.endswith(_INDEX_SUFFIX):
            made[name] = changes.plan(name)
    ordered = tuple(made[name] for name in sorted(made))
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), ordered)


def _refusal(path: Location, message: str, hint: str = _STACK_WEIGHTS) -> MergePipeError:
    return unsupported(path, f"{message}: a model with other layers is not made of it", hint)


@dataclass(frozen=True, slots=True)
class _FlatGroup:
    """A flat group of ZeRO: its parameters in order.

    `like` is the number of a group of the skeleton whose states have the same form, `options` that of its options.
    """

    names: tuple[str, ...]
    like: int
    options: int


@dataclass(frozen=True)
class _Result:
    """The composite to lay out: changes of the skeleton's files, where every state comes from, and its flat groups."""

    changes: SkeletonChanges
    assignment: Assignment
    layers: LayerCount
    groups: tuple[_FlatGroup, ...]
    steps: tuple[StepChoice, ...]

    @property
    def store(self) -> Store:
        return self.changes.store

    @property
    def model(self) -> TrainingCheckpoint:
        return self.assignment.model

    @property
    def skeleton(self) -> TrainingCheckpoint:
        return self.assignment.skeleton

    @cached_property
    def step_of(self) -> Mapping[str, StepChoice]:
        """The step counter of every parameter."""
        return {name: choice for choice in self.steps for name in choice.counter.parameters}

    def name_of(self, file: Location) -> str:
        """Return the name that a file of the skeleton has in the composite."""
        return next(name for name, copied in self.changes.files.items() if copied.file == file)

    def segments(self, name: str, kind: str, dtype: DType, span: Span | None = None) -> tuple[Segment, ...]:
        """Return what copies the elements `span` of a state, all of them by default, from its source."""
        return state_segments(self.store, self.assignment.state_of(name, kind), dtype, span)

    def open(self, file: Location) -> tuple[TorchArchive, Node]:
        """Read an archive of the skeleton; return it, and its value with the changes of the state."""
        archive = read_torch_zip(self.store, file)
        root = root_of(archive)
        apply_edits(root, self.changes.edits[file])
        return archive, root

    def weight_files(self, kind: str) -> Iterator[FilePlan]:
        """Plan safetensors of all weights, which are states of that kind."""
        states = {name: state for (name, stored_kind), state in self.model.states.items() if stored_kind == kind}
        specs = [TensorSpec(name, state.dtype, state.shape) for name, state in states.items()]
        shards = plan_shards(specs, SHARD_BYTES)
        return weight_files(shards, lambda spec: self.segments(spec.name, kind, spec.dtype))


# --- the Trainer's optimizer.pt, whose numbers count the model's parameters ---


def _trainer_files(result: _Result) -> Iterator[FilePlan]:
    yield from result.weight_files(WEIGHT)
    folder = result.skeleton.root
    archive, root = result.open(folder / OPTIMIZER_NAME)
    new = NewTensors(archive)
    config = read_config(result.store, folder)
    names = numbered_parameters(folder, config, open_checkpoint(result.store, folder), root)
    number_of = {name: number for number, name in enumerate(names)}
    entries: dict[object, object] = {}
    n_parameters = 0
    for group in root.get("param_groups").elements():
        before = [names[node.integer()] for node in group.get("params").elements()]
        pairs = restacked_names(before, result.layers)
        group.mapping()["params"] = list(range(n_parameters, n_parameters + len(pairs)))
        for number, (name, origin) in enumerate(pairs, n_parameters):
            entry = root.get("state").find(number_of[origin])
            if entry is not None:
                entries[number] = dict(_trainer_entry(result, new, name, entry))
        n_parameters += len(pairs)
    root.mapping()["state"] = entries
    yield plan_rewritten(result.name_of(archive.file), archive, root.value, new.members)


def _trainer_entry(result: _Result, new: NewTensors, name: str, old: Node) -> Iterator[tuple[str, object]]:
    """Yield the optimizer's states of one parameter, in the form of an entry of the skeleton's."""
    for kind, node in old.named_items():
        value = node.value
        if kind == "step":
            yield kind, _step_value(new, value, result.step_of[name])
        elif isinstance(value, PickledTensor):
            yield kind, new.add(result.segments(name, kind, value.dtype), value.dtype, value.shape)
        else:
            yield kind, value


def _step_value(new: NewTensors, old: object, choice: StepChoice) -> object:
    """Make a step counter in the form of another: a number, or a tensor of one element."""
    if isinstance(old, PickledTensor):
        return new.add([Literal(pack_step(choice))], old.dtype, old.shape)
    return int(choice.value)


# --- DeepSpeed ZeRO: flat groups are concatenated and cut again, for the same ranks ---


_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SUB_GROUP_ELEMENTS = 1_000_000_000  # DeepSpeed's default


def _flat_groups(store: Store, skeleton: TrainingCheckpoint, layers: LayerCount) -> tuple[_FlatGroup, ...]:
    """Compute the flat groups that the framework makes of the model's parameters; stage 3 cuts them by their size.

    Raises:
        UnsupportedError: the skeleton's groups are not what is known to be made.
    """
    files = list_zero_files(store, skeleton.root)
    if files is None:
        raise _refusal(skeleton.path, "is a partial checkpoint of a run with ZeRO")
    if skeleton.stage != 3:
        return tuple(
            _FlatGroup(_restacked_group(skeleton, names, layers), number, number)
            for number, names in enumerate(skeleton.flat_groups)
        )
    optimizer_files, _ = files
    optimizer_file = root_of(read_torch_zip(store, optimizer_files[min(optimizer_files)]))
    limit = _sub_group_elements(optimizer_file)
    groups: list[_FlatGroup] = []
    cuts_before: list[tuple[str, ...]] = []
    for number, options in enumerate(optimizer_file.at(base_optimizer_path(3)).get("param_groups").elements()):
        members = [node.integer() for node in options.get("params").elements()]
        joined = [name for index in members for name in skeleton.flat_groups[index]]
        cuts_before += _cut(skeleton.parameters, joined, skeleton.world_size, limit)
        shapes = {name: skeleton.parameters[origin] for name, origin in restacked_names(joined, layers)}
        for names in _cut(shapes, _restacked_group(skeleton, joined, layers), skeleton.world_size, limit):
            groups.append(_FlatGroup(names, members[0], number))
    if tuple(cuts_before) != skeleton.flat_groups:
        raise _refusal(skeleton.path, f"has flat groups that are not cut by a sub_group_size of {limit:g}")
    return tuple(groups)


def _restacked_group(skeleton: TrainingCheckpoint, names: Sequence[str], layers: LayerCount) -> tuple[str, ...]:
    """Return a group's parameters in the result; it must hold all layers, one after another, or none."""
    held = {skeleton.units.unit_of(name) for name in names if in_layers(name, layers)}
    if held and len(held) < layers.before:
        raise _refusal(skeleton.path, f"has groups of single layers, as that of {min(held)}")
    in_order = replace(layers, origins=tuple(range(layers.before)))
    if [name for name, _ in restacked_names(names, in_order)] != list(names):
        raise _refusal(skeleton.path, "has groups in which layers do not follow one another")
    return tuple(name for name, _ in restacked_names(names, layers))


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


def _zero_files(result: _Result) -> Iterator[FilePlan]:
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


def _model_file(result: _Result, file: Location) -> FilePlan:
    """Plan a model file: the module's weights (stages 1 and 2) or their names (stage 3), and the shapes of groups."""
    model = result.model
    archive, root = result.open(file)
    new = NewTensors(archive)
    frozen = root.find("frozen_param_shapes")
    if frozen is not None and frozen.mapping():
        raise _refusal(file, f"holds frozen parameters, as {next(iter(frozen.mapping()))}")
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
        root.mapping()["buffer_names"] = [name for name, _ in restacked_names(names, result.layers)]
    shapes = [{name: torch_size(model.parameters[name]) for name in group.names} for group in result.groups]
    root.mapping()["param_shapes"] = shapes
    return plan_rewritten(result.name_of(file), archive, root.value, new.members)


@dataclass(frozen=True, slots=True)
class _Partition:
    """A rank's part of a flat group: parameters, their elements and places; its elements, and padding among them."""

    parts: tuple[tuple[str, Span, int], ...]
    n_elements: int
    n_padding: int


def _partition(result: _Result, group: Sequence[str], rank: int) -> _Partition:
    skeleton = result.skeleton
    n_ranks = skeleton.world_size
    shapes = {name: result.model.parameters[name] for name in group}
    sizes = [element_count(shape) for shape in shapes.values()]
    if skeleton.stage == 3:
        shares = [-(-size // n_ranks) for size in sizes]
        parts = cut_alone(shapes, shares, rank)
        return _Partition(tuple(part for part in parts if part[1].n_elements), sum(shares), 0)
    share = -(-sum(sizes) // (2 * n_ranks)) * 2
    n_padding = share * n_ranks - sum(sizes)
    if n_padding >= share:
        raise _refusal(skeleton.path, f"has a group of {sum(sizes)} elements for {n_ranks} ranks")
    parts = cut_together(shapes, share, rank)
    is_last = rank == n_ranks - 1
    return _Partition(tuple(part for part in parts if part[1].n_elements), share, n_padding if is_last else 0)


def _rank_file(result: _Result, file: Location, rank: int) -> FilePlan:
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
            entries[number] = {kind: _entry(result, new, node, kind, partition, choice) for kind, node in entry.items()}
        if stage != 3:
            _describe_partition(optimizer, number, partition, len(group.names))
    optimizer.mapping()[masters_key(stage)] = flats
    base = root.at(base_optimizer_path(stage))
    base.mapping()["state"] = entries
    for number, options in enumerate(base.get("param_groups").elements() if stage == 3 else ()):
        options.mapping()["params"] = [n for n, group in enumerate(result.groups) if group.options == number]
    return plan_rewritten(result.name_of(file), archive, root.value, new.members)


def _entry(
    result: _Result, new: NewTensors, node: Node, kind: object, partition: _Partition, choice: StepChoice | None
) -> object:
    """Make one state of a flat group in the form of the skeleton's."""
    value = node.value
    if kind == "step" and choice is not None:
        return _step_value(new, value, choice)
    if isinstance(value, PickledTensor) and value.shape:
        return _flat(result, new, str(kind), value.dtype, partition)
    return value


def _flat(
    result: _Result, new: NewTensors, kind: str, dtype: DType, partition: _Partition, *, is_trimmed: bool = False
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
    return new.add([segment for segment in segments if segment.nbytes], dtype, (n_elements,))


def _describe_partition(optimizer: Node, number: int, partition: _Partition, n_parameters: int) -> None:
    """Write down how stages 1 and 2 have cut a group."""
    fragments = {
        name: Record(_FRAGMENT, (), {"numel": span.n_elements, "start": start}) for name, span, start in partition.parts
    }
    for key, value in (
        ("group_paddings", partition.n_padding),
        ("param_slice_mappings", fragments),
        ("param_alignment_paddings", [0] * n_parameters),
    ):
        node = optimizer.find(key)
        if node is not None and isinstance(node.value, list):
            node.value[number] = value


# --- torch DCP: stored items are copied whole, under the keys of the model ---


_PARAMETER_LIST = re.compile(r"(?:.*\.)?param_groups\.\d+\.params", re.ASCII)
_PARAMETER_OPTION = re.compile(r"(?:.*\.)?param_groups\.(?P<parameter>.+)\.[^.]+", re.ASCII)  # flattened options


def _dcp_files(result: _Result) -> Iterator[FilePlan]:
    partial = next((source for source in result.assignment.sources if source.is_partial), None)
    if partial is not None:
        raise _refusal(partial.path, "is partial", "compose a complete checkpoint first, and stack the layers of that")
    yield from _DcpFiles(result).plans()


@dataclass(frozen=True, slots=True)
class _Item:
    """One stored item: its entry of the index, and its place."""

    index: Record
    info: Record
    file: Location
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Directory:
    """What a DCP directory's metadata says of each key, and the keys of its tensors by parameter and kind."""

    described: Mapping[object, object]
    planned: Mapping[object, object]
    items: Mapping[str, list[_Item]]
    keys: Mapping[tuple[str, str], str]


def _read_directory(store: Store, folder: Location) -> _Directory:
    root = Node(read_dcp_metadata(store, folder), METADATA_NAME).fields("Metadata")
    items: dict[str, list[_Item]] = {}
    for index, node in root.get("storage_data").items():
        fields = node.fields("_StorageInfo")
        key = Node(index, node.file, node.path).fields("MetadataIndex").get("fqn").text()
        if not isinstance(index, Record) or not isinstance(node.value, Record):
            raise AssertionError("the checkpoint was read")
        file = (folder.absolute() / fields.get("relative_path").text()).normal()
        item = _Item(index, node.value, file, fields.get("offset").integer(), fields.get("length").integer())
        items.setdefault(key, []).append(item)
    planned = root.find("planner_data")
    described = root.get("state_dict_metadata").mapping()
    return _Directory(described, {} if planned is None else planned.mapping(), items, tensor_keys(store, folder))


class _DcpFiles:
    """Collects stored items in files named as those that they come from, and the metadata that finds them there."""

    def __init__(self, result: _Result) -> None:
        self._result = result
        self._files: dict[str, list[Segment]] = {}
        self._sizes: dict[str, int] = {}
        self._described: dict[object, object] = {}
        self._planned: dict[object, object] = {}
        self._stored: dict[object, object] = {}
        sources = result.assignment.sources
        self._directories = [_read_directory(result.store, source.path) for source in sources]
        self._skeleton = self._directories[result.assignment.skeleton_index]

    def plans(self) -> Iterator[FilePlan]:
        """Plan the files of items and the metadata."""
        model = self._result.model
        counted = [(name, "step") for counter in model.steps for name in counter.parameters]
        for name, kind in (*model.states, *counted):
            self._take(name, kind)
        of_model = {*self._skeleton.keys.values()}
        for key in self._skeleton.described:
            if isinstance(key, str) and key not in of_model:
                self._keep(key)
        for file, segments in self._files.items():
            yield FilePlan(file, tuple(segments))
        metadata = read_dcp_metadata(self._result.store, self._result.skeleton.path)
        fields = Node(metadata, METADATA_NAME).fields("Metadata").mapping()
        fields["state_dict_metadata"] = self._described
        fields["storage_data"] = self._stored
        if fields.get("planner_data") is not None:
            fields["planner_data"] = self._planned
        yield FilePlan(METADATA_NAME, (Literal(InertPickler().dump(metadata)),))

    def _take(self, name: str, kind: str) -> None:
        """Copy the items of a tensor of the model from its source."""
        assignment = self._result.assignment
        origin = assignment.origin(name)
        owner = self._result.model.units.tied.get(name, name)
        source = self._directories[assignment.source_of[owner]]
        old = source.keys[origin, kind]
        form = self._skeleton.keys[origin, kind]
        key = _renamed(form, origin, name)
        self._describe(key, source.described[old], form, origin, name)
        for item in source.items.get(old, ()):
            self._store(key, item, (CopyRange(item.file, item.offset, item.nbytes, is_skeleton=False),))

    def _keep(self, key: str) -> None:
        """Copy what is no tensor of the model: options of a parameter to every position that it gets."""
        skeleton = self._result.skeleton
        pairs = restacked_names(skeleton.parameters, self._result.layers)
        option = _PARAMETER_OPTION.fullmatch(key)
        if option is not None and option["parameter"] in skeleton.parameters:
            for name, origin in pairs:
                if origin == option["parameter"]:
                    self._copy(key, origin, name)
            return
        if any(name != origin and origin in key for name, origin in pairs):
            raise _refusal(skeleton.path, f"holds {key} for each parameter", "save it without")
        self._copy(key, "", "")

    def _copy(self, key: str, origin: str, name: str) -> None:
        """Copy the skeleton's items of a key under that of the parameter `name`; lists name the model's parameters."""
        copied = _renamed(key, origin, name)
        self._describe(copied, self._skeleton.described[key], key, origin, name)
        for item in self._skeleton.items.get(key, ()):
            segments: tuple[Segment, ...] = (CopyRange(item.file, item.offset, item.nbytes, is_skeleton=True),)
            if _PARAMETER_LIST.fullmatch(key):
                segments = self._listed(item)
            self._store(copied, item, segments)

    def _listed(self, item: _Item) -> tuple[Segment, ...]:
        """Write a group's list of parameters anew."""
        archive = read_torch_zip(self._result.store, item.file, Window(item.file, item.offset, item.nbytes))
        names = [node.text() for node in root_of(archive).elements()]
        restacked = [name for name, _ in restacked_names(names, self._result.layers)]
        return new_archive(item.file.name, archive.stem, restacked, ()).segments

    def _describe(self, key: str, described: object, form: str, origin: str, name: str) -> None:
        self._described[key] = described
        path = self._skeleton.planned.get(form)
        if isinstance(path, tuple):
            parts = (_renamed(part, origin, name) if isinstance(part, str) else part for part in path)
            self._planned[key] = tuple(parts)

    def _store(self, key: str, item: _Item, segments: tuple[Segment, ...]) -> None:
        file = item.file.name
        offset = self._sizes.get(file, 0)
        nbytes = sum(segment.nbytes for segment in segments)
        self._files.setdefault(file, []).extend(segments)
        self._sizes[file] = offset + nbytes
        place = {"relative_path": file, "offset": offset, "length": nbytes}
        self._stored[_with(item.index, {"fqn": key})] = _with(item.info, place)


def _renamed(text: str, origin: str, name: str) -> str:
    """Put a parameter's name in the place of the one that it has in its source."""
    head, old, tail = text.rpartition(origin) if origin else (text, "", "")
    return head + name + tail if old else text


def _with(record: Record, fields: Mapping[str, object]) -> Record:
    if not isinstance(record.state, dict):
        raise AssertionError("the checkpoint was read")
    return replace(record, state={**record.state, **fields})


_LAYOUTS: Mapping[str, Callable[[_Result], Iterator[FilePlan]]] = MappingProxyType({
    HF_FORMAT: _trainer_files, ZERO_FORMAT: _zero_files, DCP_FORMAT: _dcp_files,
})  # fmt: skip
