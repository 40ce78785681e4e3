"""Weights alone, in a directory, as `save_only_model` leaves them, or in one file of `torch.save`."""

from __future__ import annotations

from mergepipe.checkpoints.contract import CheckpointKind
from mergepipe.checkpoints.directory import SAFETENSORS, TORCH, list_names, open_checkpoint
from mergepipe.checkpoints.quantised import refuse_quantised
from mergepipe.checkpoints.torch_file import SUFFIXES, read_torch_weights, read_torch_zip
from mergepipe.errors import unsupported
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import WEIGHT, Framework, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import NO_OPTIMIZER, TrainingFormat, step_of_name
from mergepipe.tailor.formats.hf_trainer import (
    OPTIMIZER_NAME,
    TRAINER_STATE_NAME,
    read_config,
    read_global_step,
    tied_aliases,
)
from mergepipe.tailor.selection import model_units

# --- directories of weights alone, as `save_only_model` leaves them: sources of averages without optimizer state ---


WEIGHTS_FORMAT = "weights-only"
_WEIGHT_NAMES = frozenset(name for files in (SAFETENSORS, TORCH) for name in (files.single, files.index))


def _recognise_weights(store: Store, path: Location) -> bool:
    """Recognise the usual names of weights without an optimizer's; formats that keep more are asked first."""
    names = list_names(store, path)
    return bool(_WEIGHT_NAMES & names) and OPTIMIZER_NAME not in names


def _read_weights(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """Read weights of one step of a run, without the state that training is resumed with; of tensors, nothing."""
    model = open_checkpoint(store, path)
    refuse_quantised(store, model)
    if model.kind is not CheckpointKind.FULL:
        raise unsupported(path, "holds differences from a base, not weights", "name weights")
    entries = [entry for tensor in model.tensors.values() for entry in tensor.stored]
    parameters = {entry.name: entry.shape for entry in entries}
    return TrainingCheckpoint(
        path=path,
        root=path,
        format=WEIGHTS_FORMAT,
        framework=Framework.TRANSFORMERS,
        step=_step_of_folder(store, path, home),
        units=model_units(parameters, tied_aliases(read_config(store, path), parameters)),
        parameters=parameters,
        states={(entry.name, WEIGHT): StoredState.whole(entry.name, WEIGHT, entry) for entry in entries},
        missing=(NO_OPTIMIZER,),
        has_state=False,
    )


def _step_of_folder(store: Store, path: Location, home: Location) -> int:
    if is_file(store, path / TRAINER_STATE_NAME):
        return read_global_step(store, path)
    step = step_of_name(home.name)
    if step is None:
        message = f"holds weights alone, and neither {TRAINER_STATE_NAME} nor its name says of which step"
        raise unsupported(path, message, "name it by its step, as checkpoint-400")
    return step


WEIGHTS = TrainingFormat(
    WEIGHTS_FORMAT,
    f"{SAFETENSORS.single} (weights alone)",
    _recognise_weights,
    _read_weights,
    state_file=TRAINER_STATE_NAME,
)


# --- one file of `torch.save`, as loops under torchrun and Lightning leave it: its weights, by their names ---


ONE_FILE_FORMAT = "torch-file"
_STEPS = ("global_step", "step", "iter_num", "iteration")


def read_one_file(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """Read a file with a state dict, by itself or under `model`, `state_dict` and the like; of tensors, nothing.

    Its optimizer, if there is one, numbers parameters in an order that the file does not tell: it gives weights alone.
    """
    entries = read_torch_weights(store, path).entries
    named = {entry.name: entry for entry in entries}
    in_order = [named[name] for name in model_units(named).names]  # embeddings own what a head is tied to
    owners = {(entry.offset, entry.nbytes): entry.name for entry in reversed(in_order) if entry.nbytes}
    owner_of = {entry.name: owners.get((entry.offset, entry.nbytes), entry.name) for entry in in_order}
    parameters = {name: named[name].shape for name, owner in owner_of.items() if owner == name}
    tied = {name: owner for name, owner in owner_of.items() if owner != name}
    return TrainingCheckpoint(
        path=path,
        root=path,
        format=ONE_FILE_FORMAT,
        step=_step_of_file(read_torch_zip(store, path).root, home),
        units=model_units(parameters, tied),
        parameters=parameters,
        states={(name, WEIGHT): StoredState.whole(name, WEIGHT, named[name]) for name in parameters},
        missing=(NO_OPTIMIZER,),
        has_state=False,
        lender=path.parent,
    )


def _step_of_file(root: object, home: Location) -> int:
    """Return the step that the file or its name tells; 0 where neither does."""
    told = (root.get(key) for key in _STEPS) if isinstance(root, dict) else ()
    stem = home.name.rpartition(".")[0] or home.name
    return next((step for step in told if type(step) is int and step >= 0), step_of_name(stem) or 0)


ONE_FILE = TrainingFormat(
    ONE_FILE_FORMAT, f"a file of torch.save ({', '.join(SUFFIXES)})", is_file, read_one_file
)  # fmt: skip
