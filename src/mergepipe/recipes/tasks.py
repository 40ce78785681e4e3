"""Merge tasks: one value per output tensor, which recipes resolve to and the planner and the engine work from."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from mergepipe.checkpoints.contract import Readable, Source
from mergepipe.checkpoints.embedding_rows import embedding_ending, is_head
from mergepipe.core.blocks import DType, element_count
from mergepipe.core.outcome import DroppedTensor, Notice
from mergepipe.operators.base import OperatorInput
from mergepipe.operators.spec import ISOTROPIC, SVC
from mergepipe.recipes.recipe import ModelInput, Scalar

# --- group tensor names that differ only by layer number, for one message per group ---


_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


def group_by_pattern(names: Iterable[str], others: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only by numbers between dots under a pattern with `*`; a single name keeps its own.

    Those of a component of which `others` has nothing are one group.
    """
    folders = {name.rpartition("/")[0] for name in others} | {""}
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        folder = name.rpartition("/")[0]
        groups[_NUMBER.sub("*", name) if folder in folders else f"{folder}/*"].append(name)
    return {
        pattern if len(names_of_pattern) > 1 else names_of_pattern[0]: names_of_pattern
        for pattern, names_of_pattern in groups.items()
    }


def count_text(names: list[str]) -> str:
    """`this tensor` or `count_text 3 tensors`."""
    return "this tensor" if len(names) == 1 else f"these {len(names)} tensors"


# --- merge tasks: one value per output tensor, which recipes resolve to and the planner and the engine work from ---


class Action(StrEnum):
    """The action that makes an output tensor: merge or copy."""

    MERGE = "merge"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class TensorParameters:
    """An operator's parameters for one tensor, defaults filled in, those without effect left out.

    `anchor` is empty where the anchor is only what deltas are taken against.
    """

    globals: Mapping[str, Scalar]
    anchor: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]


@dataclass(frozen=True, slots=True)
class MergeTask:
    """One output tensor. `dtype` is the output's; a copy has no experts.

    `base_model` and `expert_models` say whose tensors `base` and `experts` are, as indices into `Resolution.models`.
    """

    name: str
    action: Action
    shape: tuple[int, ...]
    dtype: DType
    base: Readable
    experts: tuple[Source, ...]
    parameters: TensorParameters
    reason: str = ""
    base_model: int = 0
    expert_models: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.base.shape != self.shape or any(entry.shape != self.shape for entry in self.experts):
            raise ValueError(f"{self.name}: shapes differ")
        if self.action is Action.COPY and (self.experts or self.dtype != self.base.dtype):
            raise ValueError(f"{self.name}: a copy has no experts and keeps its dtype")
        if len(self.expert_models) != len(self.experts):
            raise ValueError(f"{self.name}: {len(self.experts)} experts of {len(self.expert_models)} models")
        if self.action is Action.MERGE and len(self.experts) != len(self.parameters.experts):
            raise ValueError(f"{self.name}: {len(self.experts)} experts, {len(self.parameters.experts)} parameter sets")

    @property
    def output_bytes(self) -> int:
        return element_count(self.shape) * self.dtype.itemsize

    def operator_input(self, stream_keys: tuple[int, ...] = (), *, renormalize: bool = False) -> OperatorInput:
        """Return what an operator may know of the tensor; see there."""
        parameters, n_elements = self.parameters, self.base.n_elements
        shared, anchor, experts = parameters.globals, parameters.anchor, parameters.experts
        if ISOTROPIC in shared and (embedding_ending(self.name) is not None or is_head(self.name)):
            shared = {**shared, ISOTROPIC: False, SVC: 0.0}  # a spectral step leaves out what has a row for each token
        return OperatorInput(shared, anchor, experts, n_elements, stream_keys, renormalize, self.shape)


def copy_task(name: str, tensor: Readable, wanted: DType | None, model: int = 0) -> MergeTask:
    """Return the task that writes one model's tensor, in its own dtype or the `wanted` one."""
    dtype = wanted or tensor.stored_dtype
    action = Action.COPY if dtype == tensor.dtype else Action.MERGE
    return MergeTask(name, action, tensor.shape, dtype, tensor, (), TensorParameters({}, {}, ()), "", model)


@dataclass(frozen=True, slots=True)
class LayerCount:
    """The layers that slices stack under a name prefix; `origins` has the anchor's layer number of each.

    `before` is their number in the model that lends the configuration.
    """

    prefix: str
    before: int
    origins: tuple[int, ...]

    @property
    def after(self) -> int:
        """The number of layers in the output."""
        return len(self.origins)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The merge tasks and dropped tensors of a recipe; `models[0]` provides the sidecars.

    `tasks` are in the base's storage order, of slices in the order of the output's layers. `layer_counts` has an entry
    for every list of layers that was put together from slices. `notices` are about what has no effect on these models.
    `prompts` digests the prompts of a mixture as its base reads them; None without.

    Laws: without slices the tasks' names are exactly the base's tensors; every tensor of every model is used by a
    task or dropped, never both.
    """

    tasks: tuple[MergeTask, ...]
    dropped: tuple[DroppedTensor, ...]
    models: tuple[ModelInput, ...] = ()
    layer_counts: tuple[LayerCount, ...] = ()
    notices: tuple[Notice, ...] = ()
    prompts: str | None = None

    @property
    def n_layers(self) -> int | None:
        """The number of layers, if slices changed that of the only list of layers; else None."""
        changed = [count.after for count in self.layer_counts if count.after != count.before]
        return changed[0] if len(changed) == 1 else None

    @property
    def widened_dtype(self) -> DType | None:
        """The dtype of the tensors that got another one than the base's, if they have a single one."""
        dtypes = {t.dtype for t in self.tasks if t.action is Action.MERGE and t.dtype != t.base.stored_dtype}
        return dtypes.pop() if len(dtypes) == 1 else None

    @property
    def expert_models(self) -> tuple[int, ...]:
        """Models that are an expert of at least one task, in order."""
        return tuple(sorted({model for task in self.tasks for model in task.expert_models}))

    @property
    def base_bytes(self) -> int:
        """Bytes of the tasks' base tensors, which are all read."""
        return sum(task.base.nbytes for task in self.tasks)

    def base_bytes_of(self, model: int) -> int:
        """Sum the bytes of base tensors that belong to a model."""
        return sum(task.base.nbytes for task in self.tasks if task.base_model == model)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the tasks' expert tensors: what a full merge reads from experts."""
        return sum(entry.nbytes for task in self.tasks for entry in task.experts)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output's tensors."""
        return sum(task.output_bytes for task in self.tasks)

    @property
    def n_merged(self) -> int:
        return sum(task.action is Action.MERGE for task in self.tasks)

    @property
    def n_copied(self) -> int:
        return sum(task.action is Action.COPY for task in self.tasks)

    @property
    def n_dropped(self) -> int:
        return len(self.dropped)
