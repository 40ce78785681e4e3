"""Compute block keys: digests of everything that an output block depends on; equal keys mean equal bytes.

A key covers the stored bytes of the base and of the contributing experts (by the SHA-256 of the file where it is known,
else by its location and version, and by the place in it), the rule with the coefficients in force in that block, the
output's dtype, the random streams, and the version of the program. Different keys say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from blake3 import blake3

import mergepipe
from mergepipe.checkpoints.contract import Checkpoint, Source, TensorEntry, Unchanged
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS
from mergepipe.core.canonical_json import canonical_json
from mergepipe.engine.pipeline.segments import Run, full_access
from mergepipe.engine.tensor_work import operator_input
from mergepipe.engine.work import MergeWork
from mergepipe.operators.base import NOTHING_REDUCED, MagnitudeCut, OperatorInput, Reduced
from mergepipe.operators.registry import is_built_in
from mergepipe.operators.rules.elementwise import ElementwiseRule
from mergepipe.recipes.resolve.tasks import Action, MergeTask
from mergepipe.snapshots.block_digests import BlockTable
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.places import resolved

KEYS_NAME = "mergepipe.keys"
KEY_VERSION = 3
NO_KEY = bytes(16)  # of a block that reads no expert, or whose sources cannot be told by file and place alone

Described = Mapping[str, object]


def block_keys(work: MergeWork, tasks: Sequence[MergeTask], names: SourceNames) -> BlockTable:
    """Compute the keys of all blocks of `tasks`, in order, on the plan's grid or the default one."""
    block_elements = DEFAULT_BLOCK_ELEMENTS if work.access is None else work.access.block_elements
    keys = []
    for index, task in enumerate(tasks):
        runs = tuple(work.access.runs_of(index, task) if work.access else full_access(index, task))
        keys.append(tuple(_Keys(work, names, block_elements, task, runs)))
    return BlockTable(block_elements, (), tuple(keys))


class NamedKeys:
    """The keys of a merge under its own names of files, and under those that earlier snapshots recorded."""

    def __init__(self, work: MergeWork, tasks: Sequence[MergeTask], names: SourceNames) -> None:
        self.own = block_keys(work, tasks, names)
        self._work = work
        self._tasks = tasks
        self._names = names
        self._computed = {tuple(names.names.values()): self.own}

    def as_recorded(self, files: Sequence[RecordedFile]) -> BlockTable:
        """Return the keys under the names that an earlier snapshot has for the same contents."""
        names = self._names.as_recorded(files)
        wanted = tuple(names.names.values())
        if wanted not in self._computed:
            self._computed[wanted] = block_keys(self._work, self._tasks, names)
        return self._computed[wanted]


FileName: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of an input: where it was and in which version, and the SHA-256 of its bytes if it is known."""

    location: str
    size_bytes: int
    version: str
    header_digest: str
    sha256: str | None

    @property
    def place(self) -> FileName:
        """The name by location and version: equal names mean equal bytes."""
        return self.location, self.size_bytes, self.version, self.header_digest

    @property
    def content(self) -> FileName | None:
        """The name by content."""
        return None if self.sha256 is None else ("sha256", self.sha256, self.header_digest)

    @property
    def name(self) -> FileName:
        """Return the name of a model in keys: its content where that is known."""
        return self.content or self.place


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file of an earlier merge: `name` is what its keys call it."""

    file: SourceFile
    name: FileName


@dataclass(frozen=True, slots=True)
class SourceNames:
    """Names the stored bytes of tensors by file and position in the file."""

    files: Mapping[Location, SourceFile]
    names: Mapping[Location, FileName]

    @classmethod
    def of(cls, store: Store, checkpoints: Iterable[Checkpoint]) -> SourceNames:
        """Name the files of `checkpoints`, those that are read."""
        files = {}
        for checkpoint in checkpoints:
            for file in checkpoint.files:
                path = checkpoint.root / file.name
                location = str(resolved(store, path))
                files[path] = SourceFile(location, file.size_bytes, file.version, file.header_digest, file.sha256)
        return cls(files, {path: file.name for path, file in files.items()})

    def as_recorded(self, earlier: Sequence[RecordedFile]) -> SourceNames:
        """Call each file what an earlier merge calls the same content; unknown ones keep their names."""
        by_place = {file.file.place: file.name for file in earlier}
        by_content = {file.file.content: file.name for file in earlier if file.file.content is not None}

        def name(file: SourceFile) -> FileName:
            return by_place.get(file.place) or (file.content and by_content.get(file.content)) or file.name

        return SourceNames(self.files, {path: name(file) for path, file in self.files.items()})

    def name(self, source: Source) -> tuple[str | int, ...] | None:
        """Name of the file, offset and code; None for what is not one byte range of a known file."""
        if not isinstance(source, TensorEntry):
            return None
        file = self.names.get(source.file)
        return None if file is None else (*file, source.offset, source.kernel_code)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one tensor's blocks."""

    work: MergeWork
    names: SourceNames
    block_elements: int
    task: MergeTask
    runs: tuple[Run, ...]

    def __iter__(self) -> Iterator[bytes]:
        shared = self._shared()
        inputs = operator_input(self.work, self.task) if shared is not None else None
        rule = None if inputs is None else _separable_rule(self.work, inputs)
        for run in self.runs:
            blocks = range(run.span.start // self.block_elements, -(-run.span.stop // self.block_elements))
            described = None
            if inputs is not None:
                described = self._alone(inputs, rule, run) if rule is not None else self._together(inputs)
            if described is None:
                yield from (NO_KEY for _ in blocks)
                continue
            head = [KEY_VERSION, mergepipe.__version__, self.block_elements, shared, described]
            context = blake3(canonical_json(head)).digest()
            yield from (blake3(context + b.to_bytes(8, "little")).digest(len(NO_KEY)) for b in blocks)

    def _shared(self) -> Described | None:
        """Return the key parts common to all blocks; None if nothing is merged, or a source cannot be identified."""
        task = self.task
        if task.action is Action.COPY or not task.experts or not is_built_in(self.work.operator):
            return None
        if self.work.access is not None and self.work.access.factor(task.name) != 1.0:
            return None  # a sample's result depends on how it was drawn
        base = self.names.name(task.base)
        if base is None or any(self.names.name(s) is None for s in task.experts if not isinstance(s, Unchanged)):
            return None
        return {
            "operator": self.work.operator.spec.name,
            "base": base,
            "dtype": task.dtype.name,
            "shape": list(task.shape),
        }

    def _alone(self, inputs: OperatorInput, rule: _Separable, run: Run) -> Described | None:
        """Return the key parts of a block that depends on its own elements and on quantities of single experts."""
        if not run.present:
            return None
        experts = [[*self._expert(inputs, e), rule.kept_E[e] if rule.kept_E else None] for e in run.present]
        return {**_in_force(rule.rule, run), "experts": experts} if self._has_content_ids(inputs, run.present) else None

    def _together(self, inputs: OperatorInput) -> Described | None:
        """Return the key parts of a block that depends on the whole tensor."""
        everyone = tuple(range(len(self.task.experts)))
        read = tuple(e for run in self.runs for e in run.present)
        if not read or not self._has_content_ids(inputs, read):
            return None
        return {
            "globals": dict(inputs.globals),
            "anchor": dict(inputs.anchor),
            "renormalize": inputs.renormalize,
            "access": [[run.span.start, list(run.present), list(run.free)] for run in self.runs],
            "experts": [[*self._expert(inputs, e), dict(inputs.experts[e])] for e in everyone],
        }

    def _expert(self, inputs: OperatorInput, e: int) -> list[object]:
        return [
            self.names.name(self.task.experts[e]),
            inputs.stream_keys[e] if inputs.stream_keys else None,
        ]

    def _has_content_ids(self, inputs: OperatorInput, experts: Iterable[int]) -> bool:
        """Whether the content ids that key randomness are known."""
        models = self.task.expert_models
        return not inputs.stream_keys or all(self.work.content_ids[models[e]] for e in experts)


@dataclass(frozen=True, slots=True)
class _Separable:
    """A rule whose blocks depend on their own elements, and on the magnitude of each expert's `kept_E`-th element."""

    rule: ElementwiseRule
    kept_E: tuple[int, ...] | None


def _separable_rule(work: MergeWork, inputs: OperatorInput) -> _Separable | None:
    if work.operator.granularity(inputs) > 1:
        return None
    request, kept_E = work.operator.reduction(inputs, NOTHING_REDUCED), None
    if isinstance(request, MagnitudeCut):
        kept_E = request.kept_E
        request = work.operator.reduction(inputs, Reduced(np.zeros((len(kept_E), 3), np.uint32)))
    if request is not None:
        return None
    rule = work.operator.block_function(inputs, NOTHING_REDUCED)
    return _Separable(rule, kept_E) if isinstance(rule, ElementwiseRule) else None


def _in_force(rule: ElementwiseRule, run: Run) -> dict[str, object]:
    """Restrict the rule to the experts that a run reads, magnitude cuts excluded."""
    present_E = np.array(run.present, np.int64)
    counted_E = np.array(sorted((*run.present, *run.free)), np.int64)
    values: dict[str, object] = {}
    for field in fields(rule):
        value = getattr(rule, field.name)
        if field.name == "coefficients_E" and rule.share_of is not None:
            value = rule.share_of.among(present_E, counted_E)
        elif field.name.endswith("_E") and value is not None:
            value = value[present_E]
        if field.name != "share_of":
            values[field.name] = value.tobytes().hex() if isinstance(value, np.ndarray) else value
    return values
