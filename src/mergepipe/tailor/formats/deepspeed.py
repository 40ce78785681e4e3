"""DeepSpeed: ZeRO (stages 1 to 3), flat optimizer partitions as byte ranges of parameters; universal directories."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.directory import is_adapter, is_plain_name, list_names, open_checkpoint
from mergepipe.checkpoints.inert_pickle import PickledTensor, Record
from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_zip
from mergepipe.core.blocks import Span, element_count
from mergepipe.errors import MergePipeError, NotFoundError, damaged, unsupported
from mergepipe.storage.contract import LATEST_BYTES, Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import (
    EXPORT,
    FP32,
    WEIGHT,
    AdamStep,
    Framework,
    PicklePath,
    Piece,
    StoredState,
    TrainingCheckpoint,
)
from mergepipe.tailor.formats.contract import (
    Node,
    TrainingFormat,
    joined_counter,
    located,
    optimizer_tensors,
    read_counter,
    refuse_foreign_states,
    root_of,
)
from mergepipe.tailor.formats.hf_trainer import TRAINER_STATE_NAME, read_global_step
from mergepipe.tailor.selection import model_units

ZERO_FORMAT = "deepspeed-zero"
LATEST_NAME = "latest"
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt", re.ASCII)
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt", re.ASCII)
_FOREIGN_FILE = re.compile(r"layer_\d+.*model_states\.pt|.*expp?_?rank_\d+.*\.pt|expert_\d+.*\.pt|.*_expert_.*\.pt")
_OFFLOADED_NAME = "offloaded_tensors"

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def list_zero_files(store: Store, folder: Location) -> tuple[dict[int, Location], dict[int, Location]] | None:
    """Return a directory's optimizer and model files by rank; None when it holds no ZeRO optimizer file."""
    names = [entry.name for entry in store.list(folder)]
    optimizer = {match: name for name in names if (match := _OPTIMIZER_FILE.fullmatch(name))}
    if not optimizer:
        return None
    if _OFFLOADED_NAME in names:
        raise unsupported(folder, f"optimizer state is in {_OFFLOADED_NAME}/, from NVMe")
    models = _sorted_models(folder, names, tuple(optimizer))
    return {int(match[1]): folder / name for match, name in optimizer.items()}, models


def _sorted_models(folder: Location, names: Sequence[str], optimizer: Sequence[re.Match[str]]) -> dict[int, Location]:
    """Return the model files by rank, in order; refuse files of other kinds of parallelism."""
    model = [match for name in names if (match := _MODEL_FILE.fullmatch(name))]
    parallel = [match.string for match in (*optimizer, *model) if int(match[2])]
    parallel += [name for name in names if _FOREIGN_FILE.fullmatch(name)]
    if parallel:
        raise unsupported(folder, f"{parallel[0]!r} belongs to tensor, pipeline or expert parallel training")
    if not model:
        raise NotFoundError.of("checkpoint.incomplete", folder, "there is no *_model_states.pt file")
    return dict(sorted((int(match[1] or 0), folder / match.string) for match in model))


def read_zero(store: Store, folder: Location) -> TrainingCheckpoint:
    """Read a DeepSpeed tag directory; of tensors, only step counters are read."""
    files = list_zero_files(store, folder)
    if files is None:
        raise NotFoundError.of("checkpoint.incomplete", folder, "there is no zero_pp_rank_*_optim_states.pt file")
    optimizer_files, models = files
    archives = {rank: read_torch_zip(store, path) for rank, path in models.items()}
    model_archive, *others = archives.values()
    model = root_of(model_archive)
    ranks = {rank: read_torch_zip(store, path) for rank, path in sorted(optimizer_files.items())}
    for optimizer in map(_optimizer_of, ranks.values()):
        paddings = optimizer.find("param_alignment_paddings")
        if paddings is not None and any(item.value for group in paddings.elements() for item in group.elements()):
            message = "its flat groups are padded between parameters"  # which would be read as values
            raise unsupported(paddings.file, message, "save without zero_optimization.parameter_alignment")
    step = model.get("global_steps").integer()
    for archive in others:
        other_step = root_of(archive).get("global_steps").integer()
        if other_step != step:
            message = f"is of step {other_step}, {model.file} is of step {step}"
            raise damaged(archive.file, message, "copy the files of one save again")
    stage = _stage(_optimizer_of(next(iter(ranks.values()))))
    world_size = _world_size(ranks, model)
    groups = _flat_groups(model)
    opened = _checkpoint(folder, archives, stage, groups, lambda _: _states(ranks, groups, stage, world_size))
    missing_ranks = sorted(set(range(world_size)) - ranks.keys())
    saving = range(world_size if stage == 3 else 1)
    missing = [f"the model file of rank {rank}" for rank in saving if rank not in models]
    return replace(
        opened,
        steps=tuple(_steps(ranks, groups, stage)),
        missing=(
            *(f"the optimizer file of rank {rank}" for rank in missing_ranks),
            *missing,
            *(() if missing_ranks else opened.missing),
        ),
    )


def _checkpoint(
    folder: Location,
    archives: Mapping[int, TorchArchive],
    stage: int,
    groups: Sequence[Shapes],
    read_states: Callable[[Shapes], Iterable[StoredState]],
) -> TrainingCheckpoint:
    """Make the checkpoint of the model files by rank and of states, without step counters.

    `read_states` takes all parameters: those of the groups and, in stages 1 and 2, the module's own beside them.
    """
    archive = next(iter(archives.values()))
    model = root_of(archive)
    grouped = {name: shape for group in groups for name, shape in group.items()}
    shared = {alias: owner.text() for alias, owner in model.get("shared_params").named_items()}
    weights = {} if stage == 3 else dict(module_weights(model, archive))
    ungrouped = {name: s.shape for name, s in weights.items() if name not in grouped and name not in shared}
    parameters = {**grouped, **ungrouped}
    states = {(s.parameter, s.kind): s for s in read_states(parameters)}
    kinds = dict.fromkeys(kind for name, kind in states if name in grouped) or (FP32,)
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=ZERO_FORMAT,
        framework=Framework.DEEPSPEED,
        stage=stage,
        world_size=model.get("dp_world_size").integer(),
        step=model.get("global_steps").integer(),
        units=model_units(parameters, {alias: owner for alias, owner in shared.items() if owner in parameters}),
        parameters=parameters,
        states=states | {(name, WEIGHT): state for name, state in weights.items() if name in parameters},
        flat_groups=tuple(map(tuple, groups)),
        missing=tuple(
            f"{kind} of {name}"
            for name in grouped
            for kind in kinds
            if (state := states.get((name, kind))) is None or state.gaps
        ),
        untrained={n: s for n, s in _untrained(archives) if n not in parameters} if stage == 3 else {},
    )


def base_optimizer_path(stage: int | None) -> tuple[str, str]:
    """Return the path, inside an optimizer file, of the state of the optimizer that ZeRO wraps."""
    return "optimizer_state_dict", "optimizer_state_dict" if stage == 3 else "base_optimizer_state"


def masters_key(stage: int | None) -> str:
    """Return the key, among an optimizer file's states, of the masters of every flat group."""
    return "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"


def zero_stage(optimizer: Node) -> int:
    """Return the ZeRO stage that an optimizer's state records."""
    node = optimizer.get("zero_stage")
    stage = node.value
    if isinstance(stage, Record) and stage.kind.name == "ZeroStageEnum" and len(stage.args) == 1:
        stage = stage.args[0]
    if not isinstance(stage, int) or stage not in (1, 2, 3):
        raise unsupported(f"{node.file}: {node.path}", "the ZeRO stage is not 1, 2 or 3")
    return stage


def _optimizer_of(archive: TorchArchive) -> Node:
    """What an optimizer file holds beside the version and the like."""
    return root_of(archive).get("optimizer_state_dict")


def _stage(optimizer: Node) -> int:
    """The ZeRO stage, which must fit the keys."""
    stage = zero_stage(optimizer)
    expected = masters_key(stage)
    if expected not in optimizer.mapping():
        raise unsupported(optimizer.file, f"a stage {stage} checkpoint without {expected!r} (elastic, or too old)")
    return stage


def _world_size(ranks: Mapping[int, TorchArchive], model: Node) -> int:
    """The number of partitions, which every rank and the model file must agree on."""
    recorded = model.get("dp_world_size").integer()
    for rank, archive in ranks.items():
        node = _optimizer_of(archive).get("partition_count")
        counts = {n.integer() for n in node.elements()} if isinstance(node.value, list) else {node.integer()}
        if counts != {recorded}:
            raise node.error(f"the partition counts are {sorted(counts)[:4]}, the model file says {recorded} ranks")
        if rank >= recorded:
            raise node.error(f"rank {rank} of {recorded}")
    return recorded


def _flat_groups(model: Node) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Return the shapes of each flat group's parameters in their order, from `param_shapes` alone."""
    groups = []
    seen: set[str] = set()
    for group in model.get("param_shapes").elements():
        shapes = {}
        for name, node in group.named_items():
            if name in seen:
                raise node.error(f"parameter {name[:80]!r} is in two places")
            seen.add(name)
            shapes[name] = node.shape()
        groups.append(shapes)
    return tuple(groups)


FlatParts: TypeAlias = Iterator[tuple[str, Span, int]]
"""Parameters with a rank's elements of each, which may be none, and their place in its partition of the group."""


def cut_together(shapes: Shapes, share: int, rank: int) -> FlatParts:
    """Cut parameters in sequence into parts of `share` elements across their boundaries, as stages 1 and 2 do."""
    begin, start = rank * share, 0
    for name, shape in shapes.items():
        first = min(max(begin - start, 0), element_count(shape))
        stop = max(first, min(begin + share - start, element_count(shape)))
        yield name, Span(first, stop), start + first - begin
        start += element_count(shape)


def cut_alone(shapes: Shapes, shares: Sequence[int], rank: int) -> FlatParts:
    """Cut each parameter alone into parts of its share, as stage 3 does; a partition has a rank's in sequence."""
    start = 0
    for (name, shape), share in zip(shapes.items(), shares, strict=True):
        first = min(rank * share, element_count(shape))
        yield name, Span(first, min(first + share, element_count(shape))), start
        start += share


def module_weights(model: Node, archive: TorchArchive) -> Iterator[tuple[str, StoredState]]:
    """Yield the module's own tensors (stages 1 and 2), aliases included."""
    for name, node in model.get("module").named_items():
        if isinstance(node.value, PickledTensor):
            yield name, StoredState.whole(name, WEIGHT, located(archive, node))


def _untrained(archives: Mapping[int, TorchArchive]) -> Iterator[tuple[str, StoredState]]:
    """Yield what the model files of stage 3, by rank, hold: buffers, whole in each, and frozen weights, in parts.

    Source: `parse_model_states` and `_zero3_merge_frozen_params` of DeepSpeed's `zero_to_fp32`.
    """
    first = next(iter(archives.values()))
    yield from ((name, state) for name, state in module_weights(root_of(first), first) if state.n_elements)
    shapes = root_of(first).find("frozen_param_shapes")
    for name, node in shapes.named_items() if shapes is not None else ():
        tensors = {}
        for rank, archive in archives.items():
            tensors[rank] = located(archive, root_of(archive).get("frozen_param_fragments").get(name))
        yield name, _frozen(name, node.shape(), tensors)


def _frozen(name: str, shape: tuple[int, ...], parts: Mapping[int, TensorEntry]) -> StoredState:
    """Join the ranks' parts of a frozen weight, which are of one size and padded behind its end."""
    pieces, first = [], next(iter(parts.values()))
    for rank, part in parts.items():
        if (part.n_elements, part.dtype) != (first.n_elements, first.dtype):
            raise _lies(part, f"{part.n_elements} elements of {part.dtype.name}, {first.file.name} has others")
        start = rank * part.n_elements
        stop = min(start + part.n_elements, element_count(shape))
        if start < stop:
            pieces.append(Piece(part.file, part.offset, (stop - start) * part.dtype.itemsize, Span(start, stop)))
    return StoredState(name, WEIGHT, first.dtype, shape, tuple(pieces))


def _states(
    ranks: Mapping[int, TorchArchive], groups: Sequence[Shapes], stage: int, world_size: int
) -> Iterator[StoredState]:
    """Yield every state of every parameter out of the flat tensors of all ranks, in the order of the groups.

    A master may be trimmed to what is not padding (stages 1 and 2); nothing else may be short or long.
    """
    for index, shapes in enumerate(groups):
        sizes = [element_count(shape) for shape in shapes.values()]
        shares = [-(-size // world_size) for size in sizes]
        padded = sum(shares) if stage == 3 else -(-sum(sizes) // (2 * world_size)) * 2  # of one rank's partition
        firsts: dict[str, TensorEntry] = {}
        pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        for rank, archive in ranks.items():
            cut = cut_alone(shapes, shares, rank) if stage == 3 else cut_together(shapes, padded, rank)
            parts = [part for part in cut if part[1].n_elements]
            for kind, tensor in _flat_tensors(archive, stage, index, len(groups)):
                needed = padded
                if stage != 3 and kind == FP32:
                    needed = max(0, min(padded, sum(sizes) - rank * padded))
                if len(tensor.shape) != 1 or not needed <= tensor.n_elements <= padded:
                    raise _lies(tensor, f"its shape is {tensor.shape}; {padded} elements are needed")
                if tensor.dtype != firsts.setdefault(kind, tensor).dtype:
                    raise _lies(firsts[kind], "ranks hold different dtypes")
                itemsize = tensor.dtype.itemsize
                for name, span, start in parts:
                    place, nbytes = tensor.offset + start * itemsize, span.n_elements * itemsize
                    pieces[name, kind].append(Piece(tensor.file, place, nbytes, span))
        for kind, first in firsts.items():
            for name, shape in shapes.items():
                yield StoredState(name, kind, first.dtype, shape, tuple(pieces[name, kind]))


def _flat_tensors(archive: TorchArchive, stage: int, group: int, n_groups: int) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the flat tensors of one group in one rank's file, by kind."""
    optimizer = _optimizer_of(archive)
    masters = optimizer.get(masters_key(stage)).elements()
    if len(masters) != n_groups:
        raise optimizer.error(f"{len(masters)} flat groups, the model file lists {n_groups}")
    yield FP32, located(archive, masters[group])
    entry = _base_optimizer(archive, stage).get("state").find(group)
    if entry is not None:
        yield from ((kind, tensor) for kind, tensor in optimizer_tensors(archive, entry) if tensor.shape)


def _base_optimizer(archive: TorchArchive, stage: int) -> Node:
    node = root_of(archive).at(base_optimizer_path(stage))
    if isinstance(node.value, list):
        raise unsupported(node.file, "an elastic ZeRO checkpoint")
    return node


def _steps(ranks: Mapping[int, TorchArchive], groups: Sequence[Iterable[str]], stage: int) -> Iterator[AdamStep]:
    """Read one step counter for each group, the same on every rank.

    It lies in the group's state or, of fused optimizers, in the options of its parameter group.
    """
    for index, group in enumerate(groups):
        steps = []
        for archive in ranks.values():
            base, place = _base_optimizer(archive, stage), "state"
            entry = base.get("state").find(index)
            node = entry.find("step") if entry is not None else None
            if node is None:
                options, place = base.get("param_groups").elements(), "param_groups"
                node = options[index].find("step") if index < len(options) else None
            if node is not None:
                steps.append(read_counter(archive, node, (*base_optimizer_path(stage), place, index, "step")))
        if steps:
            yield joined_counter(steps, group)


def _lies(tensor: TensorEntry, message: str) -> MergePipeError:
    return damaged(f"{tensor.file}: {tensor.name}", message)


def _recognise(store: Store, path: Location) -> bool:
    """Recognise the format by optimizer files, or by the file that names a tag."""
    return list_zero_files(store, path) is not None or is_file(store, path / LATEST_NAME)


def _open(store: Store, path: Location, _home: Location) -> TrainingCheckpoint:
    """Open a tag directory, a save directory with its `latest`, or a Trainer's with one inside; see `read_zero`."""
    is_tag = not is_file(store, path / TRAINER_STATE_NAME) and list_zero_files(store, path) is not None
    return read_zero(store, path) if is_tag else _open_save(store, path, LATEST_NAME, read_zero)


def _open_save(
    store: Store, path: Location, name: str, read: Callable[[Store, Location], TrainingCheckpoint]
) -> TrainingCheckpoint:
    """Open the tag that the file `name` of a save directory names; in a Trainer's both must be of one step."""
    opened = replace(read(store, _read_latest(store, path / name)), path=path)
    if not is_file(store, path / TRAINER_STATE_NAME):
        return opened
    step = read_global_step(store, path)
    if opened.step != step:
        raise damaged(path, f"the Trainer is at step {step}, DeepSpeed at step {opened.step}")
    return with_export(store, replace(opened, framework=Framework.TRANSFORMERS))


def with_export(store: Store, checkpoint: TrainingCheckpoint) -> TrainingCheckpoint:
    """Add the safetensors copy of the weights, where the Trainer wrote one; one of an adapter alone is none."""
    names = list_names(store, checkpoint.path)
    if is_adapter(names) or not any(name.endswith(".safetensors") for name in names):
        return checkpoint
    exported = StoredState.of_model(open_checkpoint(store, checkpoint.path), EXPORT)
    wrong = [
        name
        for (name, _), state in exported.items()
        if checkpoint.parameters.get(checkpoint.units.tied.get(name, name), state.shape) != state.shape
    ]
    if wrong:
        raise damaged(checkpoint.path, f"{wrong[0]!r} has another shape in the safetensors")
    return replace(checkpoint, states=MappingProxyType({**checkpoint.states, **exported}))


def _read_latest(store: Store, file: Location) -> Location:
    """Return the tag directory that `latest`, or a file like it, names."""
    tag = store.read_small(file, LATEST_BYTES).decode("utf-8", "replace").strip()
    if not is_plain_name(tag):
        raise damaged(file, "does not name a directory in the same folder")
    if not is_folder(store, file.parent / tag):
        raise NotFoundError.of("checkpoint.incomplete", file, f"names {tag!r}, which is not there")
    return file.parent / tag


ZERO = TrainingFormat(
    ZERO_FORMAT,
    f"zero_pp_rank_*_optim_states.pt or {LATEST_NAME} (DeepSpeed ZeRO)",
    _recognise,
    _open,
    state_file=TRAINER_STATE_NAME,
    records_step=True,
    partial_frameworks=frozenset({Framework.TRANSFORMERS}),
)


# --- universal directories: every state of every parameter in a file of its own, for any number of ranks ---


UNIVERSAL_FORMAT = "deepspeed-universal"
LATEST_UNIVERSAL_NAME = "latest_universal"
STATES_FOLDER = "zero"
OPTIMIZER_STATE_NAME = "optimizer_state.pt"
STEP_NAME = "step.pt"
PARAMETER_KEY = "param"
SHARED_STEP: PicklePath = ("optimizer_state_dict", "state", 0, "step")
"""Stage 3 keeps one counter, in the file of the optimizer's options; stages 1 and 2 one beside every parameter."""


def read_universal(store: Store, folder: Location) -> TrainingCheckpoint:
    """Read a universal tag directory; of tensors, only step counters are read."""
    files = _sorted_models(folder, [entry.name for entry in store.list(folder)], ())
    archives = {rank: read_torch_zip(store, path) for rank, path in files.items()}
    archive = next(iter(archives.values()))
    model = root_of(archive)
    options = read_torch_zip(store, folder / STATES_FOLDER / OPTIMIZER_STATE_NAME)
    stage = zero_stage(Node(options.root, OPTIMIZER_STATE_NAME))
    groups = _flat_groups(model)
    opened = _checkpoint(
        folder, archives, stage, groups,
        lambda parameters: (s for p in parameters.items() for s in _universal_states(store, folder, *p)),
    )  # fmt: skip
    steps: Iterable[AdamStep] = _group_steps(store, folder, options, groups)
    if stage == 3:
        node = root_of(options).at(SHARED_STEP)
        steps = [read_counter(options, node, SHARED_STEP, tuple(opened.parameters))]
    return replace(opened, format=UNIVERSAL_FORMAT, steps=tuple(steps))


def _universal_states(store: Store, folder: Location, name: str, shape: tuple[int, ...]) -> Iterator[StoredState]:
    """The states in a parameter's directory; stage 3 writes them flat."""
    if not is_plain_name(name) or not is_folder(store, folder / STATES_FOLDER / name):
        return
    place = folder / STATES_FOLDER / name
    names = sorted(entry.name for entry in store.list(place) if entry.name.endswith(".pt") and entry.name != STEP_NAME)
    kinds = [file.removesuffix(".pt") for file in names]
    refuse_foreign_states(frozenset(kinds), place)
    for kind, file in zip(kinds, names, strict=True):
        archive = read_torch_zip(store, place / file)
        node = Node(archive.root, f"{name}/{file}")
        if not isinstance(node.value, PickledTensor):
            key = next((str(key) for key in node.mapping() if key not in (PARAMETER_KEY, "cat_dim")), None)
            if key is not None:
                raise unsupported(node.file, f"{key!r} belongs to tensor or expert parallel training")
            node = node.get(PARAMETER_KEY)
        tensor = located(archive, node)
        if tensor.n_elements != element_count(shape):
            raise damaged(place / file, f"has shape {tensor.shape}, the parameter has {shape}")
        yield StoredState.whole(name, kind, tensor, shape)


def _group_steps(
    store: Store, folder: Location, options: TorchArchive, groups: Sequence[Mapping[str, object]]
) -> Iterator[AdamStep]:
    """Read one counter for each group: DeepSpeed refuses a group whose parameters' counters differ."""
    listed = Node(options.root, OPTIMIZER_STATE_NAME).get("param_groups").elements()
    for number, group in enumerate(groups):
        places = [folder / STATES_FOLDER / name / STEP_NAME for name in group if is_plain_name(name)]
        opened = (read_torch_zip(store, place) for place in places if is_file(store, place))
        steps = [read_counter(archive, root_of(archive), ()) for archive in opened]
        if number < len(listed) and (node := listed[number].find("step")) is not None:
            steps.append(read_counter(options, node, ("param_groups", number, "step")))
        if steps:
            yield joined_counter(steps, group)


def _is_universal(store: Store, path: Location) -> bool:
    """Recognise the format by its files; where both tags are named, `latest` is the one that is resumed."""
    if is_file(store, path / LATEST_UNIVERSAL_NAME):
        return not is_file(store, path / LATEST_NAME)
    return is_folder(store, path / STATES_FOLDER) and is_file(store, path / STATES_FOLDER / OPTIMIZER_STATE_NAME)


def _open_universal(store: Store, path: Location, _home: Location) -> TrainingCheckpoint:
    """Open a tag directory, a save directory with its `latest_universal`, or a Trainer's; see `read_universal`."""
    is_save = is_file(store, path / LATEST_UNIVERSAL_NAME)
    return _open_save(store, path, LATEST_UNIVERSAL_NAME, read_universal) if is_save else read_universal(store, path)


UNIVERSAL = TrainingFormat(
    UNIVERSAL_FORMAT,
    f"{LATEST_UNIVERSAL_NAME} or {STATES_FOLDER}/{OPTIMIZER_STATE_NAME} (DeepSpeed universal)",
    _is_universal,
    _open_universal,
    state_file=TRAINER_STATE_NAME,
    records_step=True,
)
