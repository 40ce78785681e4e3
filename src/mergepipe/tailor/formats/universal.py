"""DeepSpeed universal directories: every state of every parameter in a file of its own, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mergepipe.checkpoints.directory import is_plain_name
from mergepipe.checkpoints.inert_values import PickledTensor
from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_zip
from mergepipe.core.blocks import element_count
from mergepipe.errors import damaged, unsupported
from mergepipe.storage.contract import Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import FP32, WEIGHT, AdamStep, Framework, PicklePath, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import Node, TrainingFormat, read_counter, refuse_foreign_states, root_of
from mergepipe.tailor.formats.deepspeed import (
    LATEST_NAME,
    check_trainer_step,
    model_files,
    module_weights,
    read_latest,
    with_export,
    with_untrained,
    zero_stage,
)
from mergepipe.tailor.formats.hf_trainer import TRAINER_STATE_NAME
from mergepipe.tailor.selection import model_units

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
    first, *others = model_files(store, folder)
    archive = read_torch_zip(store, first)
    model = root_of(archive)
    options = read_torch_zip(store, folder / STATES_FOLDER / OPTIMIZER_STATE_NAME)
    stage = zero_stage(Node(options.root, OPTIMIZER_STATE_NAME))
    groups = tuple(
        {name: node.shape() for name, node in group.named_items()} for group in model.get("param_shapes").elements()
    )
    tied = {alias: owner.text() for alias, owner in model.get("shared_params").named_items()}
    weights = {} if stage == 3 else dict(module_weights(model, archive))
    grouped = {name: shape for group in groups for name, shape in group.items()}
    parameters = grouped | {n: s.shape for n, s in weights.items() if n not in grouped and n not in tied}
    states = {
        (s.parameter, s.kind): s for name, shape in parameters.items() for s in _states(store, folder, name, shape)
    }
    states |= {(name, WEIGHT): state for name, state in weights.items() if name in parameters}
    kinds = dict.fromkeys(kind for name, kind in states if name in grouped and kind != WEIGHT)
    opened = TrainingCheckpoint(
        path=folder,
        root=folder,
        format=UNIVERSAL_FORMAT,
        framework=Framework.DEEPSPEED,
        stage=stage,
        world_size=model.get("dp_world_size").integer(),
        step=model.get("global_steps").integer(),
        units=model_units(parameters, tied),
        parameters=parameters,
        states=states,
        steps=_shared_step(store, options, tuple(grouped))
        if stage == 3
        else tuple(_group_steps(store, folder, options, groups)),
        flat_groups=tuple(map(tuple, groups)),
        missing=tuple(
            f"{kind} of {name}" for name in grouped for kind in kinds or (FP32,) if (name, kind) not in states
        ),
    )  # fmt: skip
    return with_untrained(opened, [archive, *(read_torch_zip(store, path) for path in others)])


def _states(store: Store, folder: Location, name: str, shape: tuple[int, ...]) -> Iterator[StoredState]:
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
        tensor = archive.locate(node.tensor(), node.path)
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
        steps = [read_counter(store, archive, root_of(archive), ()) for archive in opened]
        if number < len(listed) and (node := listed[number].find("step")) is not None:
            steps.append(read_counter(store, options, node, ("param_groups", number, "step")))
        if len({step.value for step in steps}) > 1:
            values = sorted({step.value for step in steps})
            raise damaged(folder, f"parameters of one group are at steps {values}")
        if steps:
            cells = tuple(cell for step in steps for cell in step.cells)
            entries = tuple(entry for step in steps for entry in step.entries)
            yield replace(steps[0], parameters=tuple(group), cells=cells, entries=entries)


def _shared_step(store: Store, options: TorchArchive, names: tuple[str, ...]) -> tuple[AdamStep, ...]:
    node = Node(options.root, OPTIMIZER_STATE_NAME).at(SHARED_STEP)
    return (read_counter(store, options, node, SHARED_STEP, names),)


def _recognise(store: Store, path: Location) -> bool:
    """Recognise the format by its files; where both tags are named, `latest` is the one that is resumed."""
    if is_file(store, path / LATEST_UNIVERSAL_NAME):
        return not is_file(store, path / LATEST_NAME)
    return is_folder(store, path / STATES_FOLDER) and is_file(store, path / STATES_FOLDER / OPTIMIZER_STATE_NAME)


def _open(store: Store, path: Location, _home: Location) -> TrainingCheckpoint:
    """Open a tag directory, a save directory with its `latest_universal`, or a Trainer's; see `read_universal`."""
    if not is_file(store, path / LATEST_UNIVERSAL_NAME):
        return read_universal(store, path)
    opened = replace(read_universal(store, read_latest(store, path, LATEST_UNIVERSAL_NAME)), path=path)
    if not is_file(store, path / TRAINER_STATE_NAME):
        return opened
    check_trainer_step(store, opened)
    return with_export(store, replace(opened, framework=Framework.TRANSFORMERS))


UNIVERSAL = TrainingFormat(
    UNIVERSAL_FORMAT,
    f"{LATEST_UNIVERSAL_NAME} or {STATES_FOLDER}/{OPTIMIZER_STATE_NAME} (DeepSpeed universal)",
    _recognise,
    _open,
    state_file=TRAINER_STATE_NAME,
    records_step=True,
)
