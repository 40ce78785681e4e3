"""Sharded checkpoints of other trainers: FSDP of Accelerate and Automodel, Megatron-Core and NeMo (`torch_dist`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from mergepipe.checkpoints.inert_values import PickledTensor
from mergepipe.checkpoints.torch_file import StoredTensor, read_torch_zip
from mergepipe.core.strict_json import shown
from mergepipe.errors import NotFoundError, damaged, unsupported
from mergepipe.storage.contract import LATEST_BYTES, Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import EXP_AVG, EXP_AVG_SQ, FP32, WEIGHT, Framework, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import Node, TrainingFormat, step_of_name
from mergepipe.tailor.formats.dcp import METADATA_NAME, count_writers, dcp_checkpoint, read_tensors, tensor_state
from mergepipe.tailor.formats.deepspeed import with_export
from mergepipe.tailor.formats.hf_trainer import (
    TRAINER_STATE_NAME,
    optimizer_states,
    optimizer_step,
    rank_count,
    read_global_step,
    read_json,
)
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


# --- Megatron-Core and NeMo (`torch_dist`): DCP files whose tensors have Megatron's names ---


MEGATRON_FORMAT = "megatron-torch-dist"
_LATEST_NAME = "latest_checkpointed_iteration.txt"
_METADATA_NAME, _COMMON_NAME = "metadata.json", "common.pt"
_NEMO_WEIGHTS, _NEMO_CONTEXT = "weights", "context"
_BACKEND = "torch_dist"
_STEPS = ("iteration", "global_step")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<name>.+)", re.ASCII)
_KINDS = {"fp32_param": FP32, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
_OTHERS = re.compile(r"(?:chained_\d+\.)?optimizer\.|rng_state|rerun_state|opt_param_|.*_extra_state", re.ASCII)


def read_megatron(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """Read an iteration's directory, a save directory with its latest one, or NeMo's; of tensors, nothing is read.

    Optimizer states that have their parameter's shape are known, as the masters that a model is made of; of those that
    are kept flat by rank the weights' own values are. There are no step counters: training is not resumed from a part.
    """
    folder = _iteration_folder(store, path)
    gone = next((name for name in (_METADATA_NAME, _COMMON_NAME) if not is_file(store, folder / name)), None)
    if gone is not None:
        message = f"there is no {gone}: a checkpoint of Megatron-Core's {_BACKEND} has one"
        hint = f"save it in the format {_BACKEND}, or convert it with Megatron's tools"
        raise NotFoundError.of("checkpoint.incomplete", folder, message, hint)
    backend = read_json(store, folder / _METADATA_NAME).get("sharded_backend")
    if backend != _BACKEND:
        hint = f"save it in the format {_BACKEND}, or convert it with Megatron's tools"
        raise unsupported(folder / _METADATA_NAME, f"the backend is {shown(backend)}, {_BACKEND} is read", hint)
    tensors = {tensor.key: tensor for tensor in read_tensors(store, folder)}
    weights = {name: tensor for name, tensor in tensors.items() if not _OTHERS.match(name)}
    if not weights:
        raise unsupported(folder, "holds no weights")
    states = {(name, WEIGHT): tensor_state(tensor, name, WEIGHT) for name, tensor in weights.items()}
    for key, tensor in tensors.items():
        match = _STATE.fullmatch(key)
        kind, name = (_KINDS.get(match["kind"]), match["name"]) if match else (None, "")
        if kind is not None and name in weights and tensor.shape == weights[name].shape:
            states[name, kind] = tensor_state(tensor, name, kind)
    parameters = {name: tensor.shape for name, tensor in weights.items()}
    files = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
    return TrainingCheckpoint(
        path=path,
        root=folder,
        format=MEGATRON_FORMAT,
        world_size=count_writers(files),
        step=_iteration(store, folder, home),
        units=model_units(parameters),
        parameters=parameters,
        states=states,
        missing=(
            *(f"file {file.name}" for file in sorted(files) if not is_file(store, file)),
            *(f"part of {kind} of {name}" for (name, kind), state in states.items() if state.gaps),
            "step counters by parameter, which Megatron does not keep",
        ),
        has_state=False,
    )


def _iteration_folder(store: Store, path: Location) -> Location:
    """Find the directory of the distributed checkpoint."""
    if is_file(store, path / _LATEST_NAME):
        raw = store.read_small(path / _LATEST_NAME, LATEST_BYTES).decode("utf-8", "replace").strip()
        if not raw.isdecimal() or len(raw) > 12:
            message = f"names {shown(raw)}, a number of iterations is needed"
            raise damaged(path / _LATEST_NAME, message)
        path = path / f"iter_{int(raw):07d}"
        if not is_folder(store, path):
            raise NotFoundError.of("checkpoint.incomplete", path, f"is not there, and {_LATEST_NAME} names it")
    return path / _NEMO_WEIGHTS if is_folder(store, path / _NEMO_WEIGHTS) else path


def _iteration(store: Store, folder: Location, home: Location) -> int:
    """Return the iteration that the common part records, else that of a directory's name."""
    root = read_torch_zip(store, folder / _COMMON_NAME).root
    recorded = (root.get(key) for key in _STEPS) if isinstance(root, dict) else ()
    named = step_of_name(folder.name) or step_of_name(home.name) or 0
    return next((step for step in recorded if type(step) is int and step >= 0), named)


def _is_megatron(store: Store, path: Location) -> bool:
    """Recognise a distributed checkpoint by its two small files, NeMo's and save directories by what they hold."""
    names = {entry.name for entry in store.list(path)}
    marks = ({_METADATA_NAME, _COMMON_NAME}, {_NEMO_WEIGHTS, _NEMO_CONTEXT}, {_LATEST_NAME})
    return any(mark <= names for mark in marks)


MEGATRON = TrainingFormat(
    MEGATRON_FORMAT,
    f"{_METADATA_NAME} with {_COMMON_NAME}, or {_LATEST_NAME} (Megatron-Core, NeMo)",
    _is_megatron,
    read_megatron,
)
