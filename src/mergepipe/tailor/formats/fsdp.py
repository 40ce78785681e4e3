"""FSDP checkpoints of Accelerate and the Trainer: sharded as two DCP directories, or full in two files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mergepipe.checkpoints.inert_values import PickledTensor
from mergepipe.checkpoints.torch_file import StoredTensor, read_torch_zip
from mergepipe.errors import damaged
from mergepipe.storage.contract import Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import WEIGHT, Framework, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import TrainingFormat
from mergepipe.tailor.formats.dcp import METADATA_NAME, dcp_checkpoint, read_tensors
from mergepipe.tailor.formats.deepspeed import with_export
from mergepipe.tailor.formats.hf_trainer import (
    TRAINER_STATE_NAME,
    optimizer_states,
    optimizer_step,
    rank_count,
    read_global_step,
)
from mergepipe.tailor.formats.pickle_node import Node
from mergepipe.tailor.selection import model_units

FSDP_FORMAT = "accelerate-fsdp"
FOLDERS = {"pytorch_model_fsdp_0": "optimizer_0", "model": "optim"}
"""DCP directories of weights, and of the optimizer beside them: those of Accelerate and of NeMo Automodel."""
HF_FILES = ".hf_metadata"
"""Where Automodel keeps configuration and tokenizer, in the directory of the weights."""
WEIGHTS_NAME, OPTIMIZER_NAME = "pytorch_model_fsdp.bin", "optimizer.bin"


def read_sharded(store: Store, folder: Location, weights: str, home: Location) -> TrainingCheckpoint:
    """Read a checkpoint of sharded state dicts, weights alone too; of tensors, only step counters are read."""
    tensors = list(read_tensors(store, folder / weights))
    if is_folder(store, folder / FOLDERS[weights]):
        tensors += read_tensors(store, folder / FOLDERS[weights])
    files = folder / weights / HF_FILES
    opened = dcp_checkpoint(store, folder, tensors, home)
    return replace(opened, lender=files if is_folder(store, files) else None)


def sharded_weights(store: Store, folder: Location) -> str | None:
    """Return the directory that holds sharded weights; None where there is none."""
    return next((name for name in FOLDERS if is_file(store, folder / name / METADATA_NAME)), None)


def read_full(store: Store, folder: Location) -> TrainingCheckpoint:
    """Read a checkpoint of full state dicts, whose optimizer names parameters; of tensors, only counters are read."""
    model = read_torch_zip(store, folder / WEIGHTS_NAME)
    weights = {
        name: model.locate(node.value, node.path)
        for name, node in Node(model.root, WEIGHTS_NAME).named_items()
        if isinstance(node.value, PickledTensor)
    }
    archive = read_torch_zip(store, folder / OPTIMIZER_NAME)
    entries = dict(Node(archive.root, OPTIMIZER_NAME).get("state").named_items())
    unknown = next((name for name in entries if name not in weights), None)
    if unknown is not None:
        raise damaged(folder, f"{unknown[:80]!r} of the optimizer is not among the weights")
    tied = dict(_aliases(weights, entries))
    parameters = {name: tensor.shape for name, tensor in weights.items() if name not in tied}
    states = {
        (name, WEIGHT): StoredState.whole(name, WEIGHT, weights[name]) for name in parameters
    }  # an alias has its owner's bytes
    steps = []
    for name, entry in entries.items():
        for state in optimizer_states(entry, archive, name, weights[name].shape):
            states[name, state.kind] = state
        step = optimizer_step(store, entry, archive, name, ("state", name, "step"))
        steps += [step] if step is not None else []
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=FSDP_FORMAT,
        world_size=rank_count(store, folder),
        step=int(max((step.value for step in steps), default=0)),
        units=model_units(parameters, tied),
        parameters=parameters,
        states=states,
        steps=tuple(steps),
        missing=tuple(f"optimizer state of {name}" for name in parameters if name not in entries),
    )


def _aliases(weights: dict[str, StoredTensor], trained: dict[str, Node]) -> Iterator[tuple[str, str]]:
    """Weights that share their bytes with one that is trained, as (alias, owner)."""
    owners = {(weights[name].storage_key, weights[name].offset): name for name in trained}
    for name, tensor in weights.items():
        owner = owners.get((tensor.storage_key, tensor.offset))
        if name not in trained and owner is not None and tensor.n_elements:
            yield name, owner


def _recognise(store: Store, path: Location) -> bool:
    """Recognise the format by its model and optimizer, in two directories or two files."""
    is_sharded = sharded_weights(store, path) is not None
    return is_sharded or (is_file(store, path / WEIGHTS_NAME) and is_file(store, path / OPTIMIZER_NAME))


def _open(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """See `read_sharded` and `read_full`; the Trainer's state tells the step, where it is."""
    weights = sharded_weights(store, path)
    opened = read_full(store, path) if weights is None else read_sharded(store, path, weights, home)
    opened = replace(opened, format=FSDP_FORMAT)
    if not is_file(store, path / TRAINER_STATE_NAME):
        return opened
    step = read_global_step(store, path)
    return with_export(store, replace(opened, step=step, framework=Framework.TRANSFORMERS))


FSDP = TrainingFormat(
    FSDP_FORMAT,
    f"{'/, '.join(FOLDERS)}/ or {WEIGHTS_NAME} (FSDP of Accelerate, Automodel)",
    _recognise,
    _open,
    state_file=TRAINER_STATE_NAME,
)
