"""Directories of weights alone, as `save_only_model` leaves them: sources of averages without optimizer state."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import ClassVar

from mergepipe.checkpoints.contract import CheckpointKind
from mergepipe.checkpoints.directory import list_names, open_checkpoint
from mergepipe.checkpoints.formats.weight_files import SAFETENSORS, TORCH
from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import WEIGHT, Framework, TrainingCheckpoint
from mergepipe.tailor.formats.contract import Copied
from mergepipe.tailor.formats.hf_optimizer import OPTIMIZER_NAME
from mergepipe.tailor.formats.trainer_files import (
    TRAINER_STATE_NAME,
    read_config,
    read_global_step,
    tied_aliases,
    weight_state,
)
from mergepipe.tailor.units import model_units

WEIGHTS_FORMAT = "weights-only"
_WEIGHT_NAMES = frozenset(name for files in (SAFETENSORS, TORCH) for name in (files.single, files.index))
_NUMBERED = re.compile(r".*?(\d{1,12})", re.ASCII)


def step_of_name(name: str) -> int | None:
    """Return the number that a directory's name ends in, as `checkpoint-400` and `global_step400` do."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])


class WeightsFormat(Copied):
    """Weights of one step of a run, without the state that training is resumed with."""

    __slots__ = ()
    name: ClassVar[str] = WEIGHTS_FORMAT
    looked_for: ClassVar[str] = f"{SAFETENSORS.single} (weights alone)"
    state_file: ClassVar[str] = TRAINER_STATE_NAME
    records_step: ClassVar[bool] = False

    def recognise(self, store: Store, path: Location) -> bool:
        """Recognise the usual names of weights without an optimizer's; formats that keep more are asked first."""
        names = list_names(store, path)
        return bool(_WEIGHT_NAMES & names) and OPTIMIZER_NAME not in names

    def open(self, store: Store, path: Location, home: Location) -> TrainingCheckpoint:
        """Open the weights; of tensors, nothing is read.

        Raises:
            UnsupportedError: they are differences from a base, or nothing says of which step they are.
            MergePipeError: see `open_checkpoint`.
        """
        model = open_checkpoint(store, path)
        if model.kind is not CheckpointKind.FULL:
            raise UnsupportedError.of(
                "tailor.weights.kind", path, "holds differences from a base, not weights", "name weights"
            )
        entries = [entry for tensor in model.tensors.values() for entry in tensor.stored]
        parameters = {entry.name: entry.shape for entry in entries}
        return TrainingCheckpoint(
            path=path,
            root=path,
            format=WEIGHTS_FORMAT,
            framework=Framework.TRANSFORMERS,
            stage=None,
            world_size=1,
            step=_step(store, path, home),
            units=model_units(parameters, tied_aliases(read_config(store, path), parameters)),
            parameters=MappingProxyType(parameters),
            states=MappingProxyType({(entry.name, WEIGHT): weight_state(entry, WEIGHT) for entry in entries}),
            steps=(),
            missing=("the optimizer's state: only weights are here",),
            has_state=False,
        )


def _step(store: Store, path: Location, home: Location) -> int:
    if is_file(store, path / TRAINER_STATE_NAME):
        return read_global_step(store, path)
    step = step_of_name(home.name)
    if step is None:
        raise UnsupportedError.of(
            "tailor.weights.step", path, f"holds weights alone, and neither {TRAINER_STATE_NAME} nor its name says of "
            "which step", "name it by its step, as checkpoint-400",
        )  # fmt: skip
    return step
