"""The contract of training formats: how a directory is recognised, opened, and composed, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol

from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import Framework, TrainingCheckpoint

if TYPE_CHECKING:
    from mergepipe.tailor.assignment import Assignment
    from mergepipe.tailor.composition_plan import CompositionPlan
    from mergepipe.tailor.sources import SkeletonFile
    from mergepipe.tailor.state_overlay import StateOverlay

# --- the contract of training formats: how a directory is recognised, opened, and composed from others ---


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

    def resumes_partial(self, framework: Framework) -> bool:
        """Whether a partial checkpoint with `state_file` holds all the state that the framework resumes from."""
        ...

    def overlay_state(self, store: Store, assignment: Assignment, files: Sequence[SkeletonFile]) -> StateOverlay:
        """Plan how the state of a partial checkpoint replaces the skeleton's; `files` has its small files already.

        Raises:
            MergePipeError: see `state_overlay.overlay_state`.
        """
        ...

    def plan_universal(self, store: Store, assignment: Assignment) -> CompositionPlan:
        """Plan a composite as a DeepSpeed universal checkpoint.

        Raises:
            UnsupportedError: the format is not written so, or not this checkpoint of it.
        """
        ...


class Copied:
    """Formats that are composed by copying, for as many ranks as there were: the rest is refused."""

    __slots__ = ()

    def resumes_partial(self, framework: Framework) -> bool:
        """Say no: there are no partial checkpoints of the format."""
        return False

    def overlay_state(self, store: Store, assignment: Assignment, files: Sequence[SkeletonFile]) -> StateOverlay:
        """Refuse."""
        raise UnsupportedError.of(
            "checkpoint.unsupported", assignment.skeleton.path,
            f"is of format {assignment.skeleton.format}, which takes "
            "no state from a partial checkpoint", "name a complete checkpoint in state_from",
        )  # fmt: skip

    def plan_universal(self, store: Store, assignment: Assignment) -> CompositionPlan:
        """Refuse."""
        refuse_universal(assignment.skeleton)


def refuse_universal(skeleton: TrainingCheckpoint) -> NoReturn:
    """Refuse to write a checkpoint for any number of ranks.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError.of(
        "checkpoint.unsupported", skeleton.path, "only DeepSpeed ZeRO checkpoints are exported as universal ones; "
        f"this is {skeleton.format}",
    )  # fmt: skip


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
