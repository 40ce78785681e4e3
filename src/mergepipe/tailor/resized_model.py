"""The composite of a model with other layers than the skeleton has, as the formats lay it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from mergepipe.checkpoints.inert_pickle import PickledTensor
from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_zip
from mergepipe.core.blocks import DType, Span
from mergepipe.errors import MergePipeError, unsupported
from mergepipe.recipes.tasks import LayerCount
from mergepipe.snapshots.shards import TensorSpec, plan_shards
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.assignment import Assignment, StepChoice
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.composition_plan import (
    SHARD_BYTES,
    NewTensors,
    SkeletonChanges,
    apply_edits,
    pack_step,
    state_segments,
    weight_files,
)
from mergepipe.tailor.copy_plan import FilePlan, Literal, Segment
from mergepipe.tailor.formats.contract import Node, root_of

_STACK_WEIGHTS = "stack the weights alone: merge the models by this recipe"


def no_other_layers(path: Location, message: str, hint: str = _STACK_WEIGHTS) -> MergePipeError:
    return unsupported(path, f"{message}: a model with other layers is not made of it", hint)


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """A flat group of ZeRO: its parameters in order.

    `like` is the number of a group of the skeleton whose states have the same form, `options` that of its options.
    """

    names: tuple[str, ...]
    like: int
    options: int


@dataclass(frozen=True)
class ResizedModel:
    """The composite to lay out: changes of the skeleton's files, where every state comes from, and its flat groups."""

    changes: SkeletonChanges
    assignment: Assignment
    layers: LayerCount
    groups: tuple[FlatGroup, ...]
    steps: tuple[StepChoice, ...]

    @property
    def store(self) -> Store:
        return self.changes.store

    @property
    def model(self) -> TrainingCheckpoint:
        return self.assignment.model

    @property
    def skeleton(self) -> TrainingCheckpoint:
        return self.assignment.skeleton

    @cached_property
    def step_of(self) -> Mapping[str, StepChoice]:
        """The step counter of every parameter."""
        return {name: choice for choice in self.steps for name in choice.counter.parameters}

    def name_of(self, file: Location) -> str:
        """Return the name that a file of the skeleton has in the composite."""
        return next(name for name, copied in self.changes.files.items() if copied.file == file)

    def segments(self, name: str, kind: str, dtype: DType, span: Span | None = None) -> tuple[Segment, ...]:
        """Return what copies the elements `span` of a state, all of them by default, from its source."""
        return state_segments(self.store, self.assignment.state_of(name, kind), dtype, span)

    def open(self, file: Location) -> tuple[TorchArchive, Node]:
        """Read an archive of the skeleton; return it, and its value with the changes of the state."""
        archive = read_torch_zip(self.store, file)
        root = root_of(archive)
        apply_edits(root, self.changes.edits[file])
        return archive, root

    def weight_files(self, kind: str) -> Iterator[FilePlan]:
        """Plan safetensors of all weights, which are states of that kind."""
        specs: list[TensorSpec] = []
        for (name, stored_kind), state in self.model.states.items():
            if stored_kind == kind:
                specs.append(TensorSpec(name, state.dtype, state.shape))
        shards = plan_shards(specs, SHARD_BYTES)
        return weight_files(shards, lambda spec: self.segments(spec.name, kind, spec.dtype))


def new_counter(new: NewTensors, old: object, choice: StepChoice) -> object:
    """Make a step counter in the form of another: a number, or a tensor of one element."""
    if isinstance(old, PickledTensor):
        return new.add([Literal(pack_step(choice))], old.dtype, old.shape)
    return int(choice.value)
