"""The contract of training formats: how a directory is recognised, opened, and composed from others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import Framework, TrainingCheckpoint

if TYPE_CHECKING:
    from mergepipe.tailor.composition.composition_plan import CompositionPlan
    from mergepipe.tailor.composition.request.assignment import Assignment
    from mergepipe.tailor.composition.skeleton_files import SkeletonFile
    from mergepipe.tailor.composition.state_overlay import StateOverlay


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
            MergePipeError: see `composition.state_overlay.overlay_state`.
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
            "tailor.state.format", assignment.skeleton.path, f"is of format {assignment.skeleton.format}, which takes "
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
        "tailor.universal.format", skeleton.path, "only DeepSpeed ZeRO checkpoints are exported as universal ones; "
        f"this is {skeleton.format}",
    )  # fmt: skip
