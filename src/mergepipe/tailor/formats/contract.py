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

    def plan_repartitioned(self, store: Store, assignment: Assignment, world_size: int) -> CompositionPlan:
        """Plan a composite for another number of ranks.

        Raises:
            UnsupportedError: the format is not written so, or not this checkpoint of it.
        """
        ...

    def plan_resized(self, store: Store, assignment: Assignment, world_size: int) -> CompositionPlan:
        """Plan a composite of a restacked model whose parameters are others than the skeleton's.

        Raises:
            UnsupportedError: the format is not written so, or not this checkpoint of it.
        """
        ...

    def plan_universal(self, store: Store, assignment: Assignment) -> CompositionPlan:
        """Plan a composite as a DeepSpeed universal checkpoint.

        Raises:
            UnsupportedError: the format is not written so, or not this checkpoint of it.
        """
        ...

    def plan_linked(self, store: Store, assignment: Assignment, out: Location | None) -> CompositionPlan:
        """Plan a composite that points into its sources; `out` None stands for a directory beside the skeleton.

        Raises:
            UnsupportedError: the format cannot point elsewhere, or not this checkpoint of it.
        """
        ...


class Copied:
    """Formats that are composed by copying, for as many ranks and layers as there were: the rest is refused."""

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

    def plan_repartitioned(self, store: Store, assignment: Assignment, world_size: int) -> CompositionPlan:
        """Refuse."""
        refuse_repartition(assignment.skeleton)

    def plan_resized(self, store: Store, assignment: Assignment, world_size: int) -> CompositionPlan:
        """Refuse."""
        before, after = assignment.skeleton.units.n_layers, assignment.model.units.n_layers
        raise UnsupportedError.of(
            "tailor.restack.resized", assignment.skeleton.path,
            f"the slices stack {after} layers of a model of {before}, whose parameters are others; "
            f"{assignment.skeleton.format} is not written so", "stack as many layers of the same kinds as there are",
        )  # fmt: skip

    def plan_universal(self, store: Store, assignment: Assignment) -> CompositionPlan:
        """Refuse."""
        raise UnsupportedError.of(
            "tailor.universal.format", assignment.skeleton.path, "only DeepSpeed ZeRO checkpoints are exported as "
            f"universal ones; this is {assignment.skeleton.format}",
        )  # fmt: skip

    def plan_linked(self, store: Store, assignment: Assignment, out: Location | None) -> CompositionPlan:
        """Refuse."""
        raise UnsupportedError.of(
            "tailor.link.format", assignment.skeleton.path, "only torch DCP checkpoints can be linked"
        )


def refuse_repartition(skeleton: TrainingCheckpoint) -> NoReturn:
    """Refuse to write a checkpoint for another number of ranks.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError.of(
        "tailor.world-size.format", skeleton.path, "only DeepSpeed ZeRO checkpoints are written for another "
        f"number of ranks; this is {skeleton.format}",
    )  # fmt: skip
