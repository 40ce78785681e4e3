"""The contract of training formats: how a directory is recognised and opened, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import Framework, TrainingCheckpoint

# --- the contract of training formats: how a directory is recognised and opened ---


class CheckpointKind(Protocol):
    """A kind of directory that opens as a training checkpoint."""

    @property
    def looked_for(self) -> str:
        """Return the files that a directory of this kind is recognised by, for the message about an unknown one."""
        ...

    def recognise(self, store: Store, path: Location) -> bool:
        """Whether the directory is of this kind: by its names alone, no file is read.

        Raises:
            UnsupportedError: it is one that this version does not read; the message says why.
        """
        ...

    def open(self, store: Store, path: Location, home: Location) -> TrainingCheckpoint:
        """Open a directory that is of this kind; `home` is where it will lie.

        Raises:
            MergePipeError: see `open_training_checkpoint`.
        """
        ...


class TrainingFormat(CheckpointKind, Protocol):
    """A framework's layout of training state. `TrainingCheckpoint.format` is its name."""

    @property
    def name(self) -> str: ...

    @property
    def state_file(self) -> str:
        """The file that holds the state of the run; of partial checkpoints only those with it can resume."""
        ...

    @property
    def records_step(self) -> bool:
        """Whether the step is recorded in a place of its own, not only in the newest counter."""
        ...

    @property
    def partial_frameworks(self) -> frozenset[Framework]:
        """The frameworks that resume from what a partial checkpoint with `state_file` holds."""
        ...


# --- checkpoints that are recognised and not read: each is refused by its name ---


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A format by the names in its directory, and what can be done."""

    name: str
    is_shown_by: Callable[[frozenset[str]], bool]
    hint: str


_CONVERT = "convert it to a Hugging Face or torch DCP checkpoint with its own tools"
_MEGATRON_FOLDER = re.compile(r"iter_\d{7}|mp_rank_\d{2}(_\d{3}){0,2}", re.ASCII)
_FOREIGN = (
    ForeignFormat("a Megatron distributed checkpoint", lambda names: {"common.pt", "metadata.json"} <= names, _CONVERT),
    ForeignFormat(
        "a Megatron checkpoint",
        lambda names: "model_optim_rng.pt" in names or any(map(_MEGATRON_FOLDER.fullmatch, names)),
        _CONVERT,
    ),
    ForeignFormat("a NeMo checkpoint", lambda names: {"context", "weights"} <= names, _CONVERT),
    ForeignFormat(
        "an FSDP checkpoint of Accelerate with a file for each rank",
        lambda names: bool({"pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_0_rank0.bin"} & names),
        "save full or sharded state dicts: state_dict_type FULL_STATE_DICT or SHARDED_STATE_DICT",
    ),
)  # fmt: skip


class ForeignKind:
    """Recognises directories of other programs, so that the refusal says whose they are."""

    __slots__ = ()
    looked_for: ClassVar[str] = ""

    def recognise(self, store: Store, path: Location) -> bool:
        """Refuse a directory of a format that is not read; any other is left to the formats that are.

        Raises:
            UnsupportedError: `checkpoint.unsupported`.
        """
        names = frozenset(entry.name for entry in store.list(path))
        foreign = next((candidate for candidate in _FOREIGN if candidate.is_shown_by(names)), None)
        if foreign is not None:
            raise UnsupportedError.of(
                "checkpoint.unsupported", path, f"is {foreign.name}, which is not read", foreign.hint
            )
        return False

    def open(self, store: Store, path: Location, home: Location) -> TrainingCheckpoint:
        """Nothing is recognised that could be opened."""
        raise AssertionError(f"{path} is of no format that opens")


# --- weights alone, as `save_only_model` leaves them ---


NO_OPTIMIZER = "the optimizer's state: only weights are here"
_NUMBERED = re.compile(r".*?(\d{1,12})", re.ASCII)


def step_of_name(name: str) -> int | None:
    """Return the number that a directory's name ends in, as `checkpoint-400` and `global_step400` do."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])


# --- optimizers

_FOREIGN_STATES = {
    "exp_avg_sq_row": "Adafactor", "exp_avg_sq_col": "Adafactor", "qmap1": "an 8-bit optimizer",
    "absmax1": "an 8-bit optimizer", "state1": "an 8-bit optimizer", "shadow": "an optimizer with shadow weights",
}  # fmt: skip


def refuse_foreign_states(kinds: frozenset[str], where: object) -> None:
    """Refuse the states of an optimizer whose states are not arrays of the parameter's shape.

    Raises:
        UnsupportedError: `checkpoint.unsupported`, with the optimizer's name.
    """
    kind = next((kind for kind in _FOREIGN_STATES if kind in kinds), None)
    if kind is not None:
        raise UnsupportedError.of(
            "checkpoint.unsupported", where, f"holds the state {kind!r} of {_FOREIGN_STATES[kind]}",
            "only optimizers whose states have their parameter's shape are composed, as AdamW",
        )  # fmt: skip
