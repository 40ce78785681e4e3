"""Distributed checkpoints of Megatron-Core and NeMo (`torch_dist`): DCP files whose tensors have Megatron's names."""

from __future__ import annotations

import re

from mergepipe.checkpoints.torch_file import read_torch_zip
from mergepipe.core.strict_json import shown
from mergepipe.errors import NotFoundError, damaged, unsupported
from mergepipe.storage.contract import LATEST_BYTES, Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import EXP_AVG, EXP_AVG_SQ, FP32, WEIGHT, TrainingCheckpoint
from mergepipe.tailor.formats.contract import TrainingFormat, step_of_name
from mergepipe.tailor.formats.dcp import count_writers, read_tensors, tensor_state
from mergepipe.tailor.formats.hf_trainer import read_json
from mergepipe.tailor.selection import model_units

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
    folder = _folder(store, path)
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
        step=_step(store, folder, home),
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


def _folder(store: Store, path: Location) -> Location:
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


def _step(store: Store, folder: Location, home: Location) -> int:
    """Return the iteration that the common part records, else that of a directory's name."""
    root = read_torch_zip(store, folder / _COMMON_NAME).root
    recorded = (root.get(key) for key in _STEPS) if isinstance(root, dict) else ()
    named = step_of_name(folder.name) or step_of_name(home.name) or 0
    return next((step for step in recorded if type(step) is int and step >= 0), named)


def _recognise(store: Store, path: Location) -> bool:
    """Recognise a distributed checkpoint by its two small files, NeMo's and save directories by what they hold."""
    names = {entry.name for entry in store.list(path)}
    marks = ({_METADATA_NAME, _COMMON_NAME}, {_NEMO_WEIGHTS, _NEMO_CONTEXT}, {_LATEST_NAME})
    return any(mark <= names for mark in marks)


MEGATRON = TrainingFormat(
    MEGATRON_FORMAT,
    f"{_METADATA_NAME} with {_COMMON_NAME}, or {_LATEST_NAME} (Megatron-Core, NeMo)",
    _recognise,
    read_megatron,
)
