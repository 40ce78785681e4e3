"""Resolves a recipe against opened checkpoints: one task per tensor of the base, every other tensor accounted for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mergepipe.blocks import DType, DTypeKind, element_count
from mergepipe.errors import (
    CorruptError,
    MismatchError,
    NotFoundError,
    RecipeError,
    UnsupportedError,
    did_you_mean,
)
from mergepipe.operators.spec import BaseRole
from mergepipe.readers.base import Checkpoint, TensorEntry
from mergepipe.recipe.model import ModelInput, Recipe, Scalar
from mergepipe.recipe.parameters import global_values, model_values
from mergepipe.recipe.problems import Findings

REASON_EXACT = "integer or boolean buffer"
REASON_COPIED = "copied from the base"
REASON_NOT_IN_BASE = "not in the base"

_MAX_CANDIDATES = 500
_NUMBER = re.compile(r"\d+")


class Action(StrEnum):
    """How an output tensor comes about."""

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
    """One output tensor. `dtype` is the output's; `experts` has one entry per expert in recipe order, none to copy."""

    name: str
    action: Action
    shape: tuple[int, ...]
    dtype: DType
    base: TensorEntry
    experts: tuple[TensorEntry, ...]
    parameters: TensorParameters
    reason: str = ""

    def __post_init__(self) -> None:
        if self.base.shape != self.shape or any(entry.shape != self.shape for entry in self.experts):
            raise ValueError(f"{self.name}: shapes differ")
        if self.action is Action.COPY and (self.experts or self.dtype != self.base.dtype):
            raise ValueError(f"{self.name}: a copy has no experts and keeps its dtype")
        if self.action is Action.MERGE and len(self.experts) != len(self.parameters.experts):
            raise ValueError(f"{self.name}: {len(self.experts)} experts, {len(self.parameters.experts)} parameter sets")

    @property
    def output_bytes(self) -> int:
        return element_count(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DroppedTensor:
    """A tensor of an expert that no task uses: `model` is the path as the recipe writes it."""

    model: str
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a merge will do with every tensor. `tasks` are in the base's storage order.

    Laws: the tasks' names are exactly the base's tensors; every tensor of an expert is used by a task or dropped,
    never both.
    """

    tasks: tuple[MergeTask, ...]
    dropped: tuple[DroppedTensor, ...]

    @property
    def base_bytes(self) -> int:
        """Bytes of the base's tensors, all of which are read."""
        return sum(task.base.nbytes for task in self.tasks)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the experts' tensors that tasks use: what a full-read merge reads from experts."""
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


def resolve(recipe: Recipe, base: Checkpoint, experts: Sequence[Checkpoint]) -> Resolution:
    """Pair the tensors of `base` (what `recipe.anchor()` names) and of `experts` (`recipe.experts()`, in order).

    Raises:
        MismatchError: a tensor of the base is missing in an expert or has another shape there.
        UnsupportedError: nothing but dtypes that cannot be merged.
    """
    inputs = recipe.experts()
    if len(inputs) != len(experts):
        raise ValueError(f"the recipe has {len(inputs)} experts, {len(experts)} were opened")
    resolver = _Resolver(recipe, base, tuple(zip(inputs, experts, strict=True)))
    tasks = tuple(task for entry in base.tensors.values() if (task := resolver.task(entry)) is not None)
    resolver.findings.raise_any()
    return Resolution(tasks, tuple(resolver.dropped()))


class _Resolver:
    """Pairs one base tensor at a time, and notes what does not fit."""

    def __init__(self, recipe: Recipe, base: Checkpoint, experts: tuple[tuple[ModelInput, Checkpoint], ...]) -> None:
        self.findings = Findings(NotFoundError, CorruptError, MismatchError, UnsupportedError, RecipeError)
        self._base = base
        self._base_text = recipe.anchor().text
        self._experts = experts
        self._parameters = _tensor_parameters(recipe)
        self._dtype = recipe.out_dtype or recipe.dtype
        self._candidates = [_Candidates(base, expert) for _, expert in experts]

    def task(self, entry: TensorEntry) -> MergeTask | None:
        """The task of one base tensor; None if a problem was noted."""
        if entry.dtype.kind is DTypeKind.EXACT:
            return MergeTask(
                entry.name, Action.COPY, entry.shape, entry.dtype, entry, (), self._parameters, REASON_EXACT
            )
        if entry.dtype.kind is DTypeKind.OPAQUE:
            self._refuse_dtype(self._base_text, entry, "")
            return None
        found = [self._matching(index, entry) for index in range(len(self._experts))]
        matching = tuple(match for match in found if match is not None)
        if len(matching) < len(found):
            return None
        dtype = self._dtype or entry.dtype
        return MergeTask(entry.name, Action.MERGE, entry.shape, dtype, entry, matching, self._parameters)

    def _matching(self, index: int, entry: TensorEntry) -> TensorEntry | None:
        model, expert = self._experts[index]
        match = expert.tensors.get(entry.name)
        if match is None:
            message = f"'{model.text}' lacks this tensor of the base '{self._base_text}'"
            hint = self._candidates[index]
            self.findings.add(
                MismatchError, "merge.tensor.missing", entry.name, message, lambda: hint.did_you_mean(entry.name)
            )
            return None
        if match.dtype.kind is not DTypeKind.FLOAT:
            self._refuse_dtype(model.text, match, f"{entry.dtype.name} in the base '{self._base_text}'")
        if match.shape != entry.shape:
            found, needed = list(match.shape), list(entry.shape)
            message = f"shape {found} in '{model.text}', {needed} in the base '{self._base_text}'"
            self.findings.add(MismatchError, "merge.tensor.shape", entry.name, message)
        return match if match.dtype.kind is DTypeKind.FLOAT and match.shape == entry.shape else None

    def _refuse_dtype(self, model: str, entry: TensorEntry, instead_of: str) -> None:
        message = f"{entry.dtype.name} in '{model}' cannot be merged" + (f", it is {instead_of}" if instead_of else "")
        self.findings.add(UnsupportedError, "merge.tensor.dtype", entry.name, message, "convert the model first")

    def dropped(self) -> Iterator[DroppedTensor]:
        """Every expert tensor that no task uses, expert by expert in storage order."""
        for model, expert in self._experts:
            for name in expert.tensors:
                in_base = self._base.tensors.get(name)
                if in_base is None:
                    yield DroppedTensor(model.text, name, REASON_NOT_IN_BASE)
                elif in_base.dtype.kind is DTypeKind.EXACT:
                    yield DroppedTensor(model.text, name, REASON_COPIED)


def _tensor_parameters(recipe: Recipe) -> TensorParameters:
    operator, shared = recipe.operator, recipe.parameters
    return TensorParameters(
        global_values(operator, shared),
        _anchor_values(recipe),
        tuple(model_values(operator, model.parameters, shared) for model in recipe.experts()),
    )


def _anchor_values(recipe: Recipe) -> dict[str, Scalar]:
    if recipe.operator.base_role is BaseRole.REQUIRED:
        return {}
    listed = recipe.listed_anchor()
    if listed is None:  # it lends its tensors' names, shapes and dtypes, and has no part in the average
        return {"weight": 0.0}
    return model_values(recipe.operator, listed.parameters, recipe.parameters)


class _Candidates:
    """The names an expert may have given to a tensor it seems to lack: those of its own that the base lacks."""

    def __init__(self, base: Checkpoint, expert: Checkpoint) -> None:
        self._base = base
        self._expert = expert
        self._by_numbers: dict[tuple[str, ...], list[str]] = {}

    def did_you_mean(self, name: str) -> str:
        """A hint for one missing name. Looks at names with the same layer numbers first, and at a bounded number."""
        if not self._by_numbers:
            groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
            for other in self._expert.tensors:
                if other not in self._base.tensors:
                    groups[tuple(_NUMBER.findall(other))].append(other)
            self._by_numbers = dict(groups)
        same_numbers = self._by_numbers.get(tuple(_NUMBER.findall(name)), [])
        return did_you_mean(name, same_numbers[:_MAX_CANDIDATES]) if same_numbers else ""
