"""Read how important the tensors of a merge are: one number a tensor, one an element, or a training checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mergepipe.checkpoints.contract import Checkpoint, CheckpointFile, CheckpointKind, Readable, TensorEntry
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.stacked_experts import Stacked
from mergepipe.core.blocks import BlockGrid, Span, element_count
from mergepipe.core.strict_json import digest_of, parse_object
from mergepipe.core.units import plural
from mergepipe.errors import MismatchError, NotFoundError, UnsupportedError, did_you_mean
from mergepipe.recipes.tasks import MergeTask
from mergepipe.snapshots.shards import SUFFIX
from mergepipe.storage.contract import IMPORTANCE_BYTES, FileId, Store, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import EXP_AVG_SQ, WEIGHT, StateReader, StoredState
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_writer import values_of
from mergepipe.tailor.formats import open_training_checkpoint

_SPAN_ELEMENTS = 4 << 20  # read at once: 16 MiB, and as much again for each step of the sum
_HINT = "give a JSON object of tensor names and numbers, a safetensors file, or a training checkpoint"


def read_importance(store: Store, path: Location, tasks: Sequence[MergeTask]) -> dict[str, float]:
    """Read the importance of each tensor that is merged, as a whole; what else the file tells of is left alone.

    Tensors of a safetensors file or folder hold one number, or one for each element, which are summed. Of a training
    checkpoint the second moments v of n elements count as n times the root of their mean: the size of the gradient.
    Memory: about 64 MiB.
    """
    if path.name.endswith(".json"):
        raw = store.read_small(path, IMPORTANCE_BYTES)
        numbers = parse_object(raw, where=path, code="importance.damaged", hint=_HINT)
        _check_names(path, tasks, numbers)
        total_by_name = {task.name: _checked(path, task.name, numbers[task.name]) for task in tasks}
    else:
        total_by_name = _totals(store, path, tasks)
    if not any(total_by_name.values()):
        raise MismatchError.of("importance.mismatch", path, "says that no tensor is important: all are zero", _HINT)
    return total_by_name


def _totals(store: Store, path: Location, tasks: Sequence[MergeTask]) -> dict[str, float]:
    states = _second_moments(store, path) or {
        entry.name: StoredState.whole(entry.name, WEIGHT, entry)
        for entry in open_checkpoint(store, path).tensors.values()
        if isinstance(entry, TensorEntry)
    }
    _check_names(path, tasks, states)
    with StateReader(store) as reader:
        return {task.name: _total(reader, store, path, states[task.name], task.base.shape) for task in tasks}


def open_moments(store: Store, path: Location) -> Checkpoint | None:
    """Open the second moments (`exp_avg_sq`) of a training checkpoint as tensors of numbers; None if it has none."""
    tensors: dict[str, Readable] = {}
    for name, stored in _second_moments(store, path).items():
        pieces = unpacked(store, stored).pieces
        if stored.gaps or any(piece.strips for piece in pieces):
            message = f"'{name}' is stored by columns, or not all of it"
            raise UnsupportedError.of("model.unsupported", path, message, "write exp_avg_sq to a safetensors file")
        parts = [
            TensorEntry(name, stored.dtype, (p.span.n_elements,), p.file, p.offset, p.nbytes, True) for p in pieces
        ]
        is_whole = len(parts) == 1
        tensors[name] = replace(parts[0], shape=stored.shape) if is_whole else Stacked(name, stored.shape, tuple(parts))
    entries = [entry for tensor in tensors.values() for entry in tensor.stored]
    files = [
        _file(store, place, [[e.name, e.offset, e.nbytes] for e in entries if e.file == place])
        for place in sorted({entry.file for entry in entries})
    ]
    return Checkpoint(path, path, tensors, tuple(files), (), CheckpointKind.DELTA) if tensors else None


def open_named_weights(store: Store, path: Location) -> tuple[Checkpoint, Mapping[str, float]] | None:
    """Open a JSON object, or a safetensors file, with one number a tensor; None for anything else.

    Returns a checkpoint without tensors, and the numbers by name.
    """
    if path.name.endswith(".json"):
        raw = store.read_small(path, IMPORTANCE_BYTES)
        numbers: Mapping[str, object] = parse_object(raw, where=path, code="importance.damaged", hint=_HINT)
        checkpoint = Checkpoint(path, path.parent, {}, (_file(store, path, numbers),), ())
    elif path.name.endswith(SUFFIX):
        checkpoint = open_checkpoint(store, path)
        entries = [entry for entry in checkpoint.tensors.values() if isinstance(entry, TensorEntry)]
        if any(entry.n_elements != 1 for entry in entries):
            return None
        with StateReader(store) as reader:
            states = [StoredState.whole(entry.name, WEIGHT, entry) for entry in entries]
            numbers = {s.parameter: values_of(reader.read(s, Span(0, 1)), s.dtype, s.parameter).item() for s in states}
    else:
        return None
    return replace(checkpoint, tensors={}), {name: _checked(path, name, n, -math.inf) for name, n in numbers.items()}


def _file(store: Store, place: Location, content: object) -> CheckpointFile:
    """Identify a file that no reader of weights knows; `content` stands for what is taken from it."""
    status = store.stat(place)
    if status is None:
        raise NotFoundError.of("model.not-found", place, "the file is gone")
    return CheckpointFile(place, FileId(place.name, status.size_bytes, status.version, digest_of(content)))


def _second_moments(store: Store, path: Location) -> Mapping[str, StoredState]:
    """Return the second moments of a training checkpoint; nothing if it is none."""
    if not is_folder(store, path):
        return {}
    try:
        checkpoint = open_training_checkpoint(store, path)
    except NotFoundError:
        return {}
    return {parameter: state for (parameter, kind), state in checkpoint.states.items() if kind == EXP_AVG_SQ}


def _total(reader: StateReader, store: Store, path: Location, state: StoredState, shape: tuple[int, ...]) -> float:
    """Sum a tensor in float64, in an order that does not depend on the machine."""
    if state.shape != shape and (state.n_elements != 1 or state.kind == EXP_AVG_SQ):
        message = f"tensor '{state.parameter}' has the shape {list(state.shape)}, it is merged as {list(shape)}"
        raise MismatchError.of("importance.mismatch", path, message, "give its shape, or one number")
    raw_state, total = unpacked(store, state), 0.0
    for span in BlockGrid(state.n_elements, _SPAN_ELEMENTS).spans():
        values = values_of(reader.read(raw_state, span), state.dtype, state.parameter)
        total += _checked(path, state.parameter, float(values.sum(dtype=np.float64)) if (values >= 0).all() else -1.0)
    return math.sqrt(total * element_count(shape)) if state.kind == EXP_AVG_SQ else total


def _checked(path: Location, name: str, number: object, low: float = 0.0) -> float:
    if isinstance(number, int | float) and not isinstance(number, bool) and low <= number and abs(number) < math.inf:
        return float(number)
    message = f"tensor '{name}' needs numbers{' from 0 up' if low == 0 else ''}, all finite"
    raise MismatchError.of("importance.mismatch", path, message, _HINT)


def _check_names(path: Location, tasks: Sequence[MergeTask], known: Mapping[str, object]) -> None:
    missing = [task.name for task in tasks if task.name not in known]
    if missing:
        message = f"says nothing of {plural(len(missing), 'tensor')} of {len(tasks)} that are merged: '{missing[0]}'"
        raise MismatchError.of("importance.mismatch", path, message, did_you_mean(missing[0], list(known)))
