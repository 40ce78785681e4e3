"""Opens a path as a training checkpoint, whichever format it turns out to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from mergepipe.checkpoints.contained_files import is_plain_name
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.errors import CorruptError, NotFoundError, UnsupportedError
from mergepipe.storage.contract import Store, is_file, is_folder
from mergepipe.storage.limits import LATEST_BYTES
from mergepipe.tailor.checkpoint import EXPORT, Format, Framework, TrainingCheckpoint
from mergepipe.tailor.formats.dcp import METADATA_NAME, read_dcp
from mergepipe.tailor.formats.deepspeed import list_zero_files, read_zero
from mergepipe.tailor.formats.hf_optimizer import OPTIMIZER_NAME, read_hf_checkpoint
from mergepipe.tailor.formats.partial import read_partial
from mergepipe.tailor.formats.partial_manifest import MANIFEST_NAME
from mergepipe.tailor.formats.trainer_files import TRAINER_STATE_NAME, read_global_step, weight_state

LATEST_NAME = "latest"


def open_training_checkpoint(store: Store, path: Path, home: Path | None = None) -> TrainingCheckpoint:
    """Open a Trainer checkpoint, a DeepSpeed tag or save directory, a DCP directory or a partial checkpoint of ours.

    Reads structure and step counters, never another tensor byte. `home` is where it will lie, if that is elsewhere.

    Raises:
        NotFoundError: there is no such directory, or no training checkpoint in it.
        CorruptError, MismatchError: it contradicts itself.
        UnsupportedError: a kind this version does not read.
    """
    if not is_folder(store, path):
        raise NotFoundError.of("tailor.path", path, "there is no such directory")
    if is_file(store, path / MANIFEST_NAME):  # first: a partial checkpoint holds some of the Trainer's files too
        return _with_state(store, read_partial(store, path))
    if is_file(store, path / METADATA_NAME):
        return read_dcp(store, path, home)
    if is_file(store, path / TRAINER_STATE_NAME):
        return _open_trainer_directory(store, path)
    if list_zero_files(store, path) is not None:
        return read_zero(store, path)
    if is_file(store, path / LATEST_NAME):
        return replace(read_zero(store, _latest(store, path)), path=path)
    raise NotFoundError.of(
        "tailor.none", path, "no training checkpoint is here",
        "give a Trainer checkpoint, a DeepSpeed tag or save directory, a DCP directory or a partial checkpoint",
    )  # fmt: skip


def _with_state(store: Store, partial: TrainingCheckpoint) -> TrainingCheckpoint:
    """A partial checkpoint that knows whether its framework could resume at its step, if it were whole."""
    needed = METADATA_NAME if partial.format is Format.DCP else TRAINER_STATE_NAME
    is_resumed = partial.framework is Framework.TRANSFORMERS or partial.format is Format.DCP
    return replace(partial, has_state=is_resumed and is_file(store, partial.path / needed))


def _open_trainer_directory(store: Store, path: Path) -> TrainingCheckpoint:
    if is_file(store, path / OPTIMIZER_NAME):
        return read_hf_checkpoint(store, path)
    if not is_file(store, path / LATEST_NAME):
        raise UnsupportedError.of(
            "tailor.hf.optimizer", path, f"neither {OPTIMIZER_NAME} nor a DeepSpeed directory is here",
            "a checkpoint saved with save_only_model cannot be resumed",
        )  # fmt: skip
    zero = read_zero(store, _latest(store, path))
    step = read_global_step(store, path)
    if zero.step != step:
        raise CorruptError.of("tailor.hf.step", path, f"the Trainer is at step {step}, DeepSpeed at step {zero.step}")
    return _with_export(store, replace(zero, path=path, framework=Framework.TRANSFORMERS))


def _with_export(store: Store, checkpoint: TrainingCheckpoint) -> TrainingCheckpoint:
    """Add the safetensors copy of the weights, where the Trainer wrote one."""
    if not any(entry.name.endswith(".safetensors") for entry in store.list(checkpoint.path)):
        return checkpoint
    model = open_checkpoint(store, checkpoint.path)
    exported = {(e.name, EXPORT): weight_state(e, EXPORT) for t in model.tensors.values() for e in t.stored}
    wrong = [
        name
        for (name, _), state in exported.items()
        if checkpoint.parameters.get(checkpoint.units.tied.get(name, name), state.shape) != state.shape
    ]
    if wrong:
        raise CorruptError.of("tailor.hf.export", checkpoint.path, f"{wrong[0]!r} has another shape in the safetensors")
    return replace(checkpoint, states=MappingProxyType({**checkpoint.states, **exported}))


def _latest(store: Store, path: Path) -> Path:
    """The tag directory that `latest` names."""
    raw = store.read_small(path / LATEST_NAME, LATEST_BYTES)
    tag = raw.decode("utf-8", "replace").strip()
    if not is_plain_name(tag):
        raise CorruptError.of("tailor.latest", path / LATEST_NAME, "does not name a directory beside it")
    if not is_folder(store, path / tag):
        raise NotFoundError.of("tailor.latest", path / LATEST_NAME, f"names {tag!r}, which is not there")
    return path / tag
