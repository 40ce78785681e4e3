"""Compute block keys: digests of everything that an output block depends on; equal keys mean equal bytes.

A key covers the stored bytes of the base and of the contributing experts (by file, as it was when it was opened, and
place in it), the rule with the coefficients in force in that block, the output's dtype, the random streams, and the
version of the program. Different keys say nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

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
from mergepipe.storage.location import Location

KEYS_NAME = "mergepipe.keys"
KEY_VERSION = 2
NO_KEY = bytes(16)  # of a block that reads no expert, or whose sources cannot be told by file and place alone

Described = Mapping[str, object]


def block_keys(work: MergeWork, tasks: Sequence[MergeTask], checkpoints: Iterable[Checkpoint]) -> BlockTable:
    """Compute the keys of all blocks of `tasks`, in order, on the plan's grid or the default one.

    `checkpoints` are those whose files are read.
    """
    block_elements = DEFAULT_BLOCK_ELEMENTS if work.access is None else work.access.block_elements
    files = SourceNames(checkpoints)
    keys = []
    for index, task in enumerate(tasks):
        runs = tuple(work.access.runs_of(index, task) if work.access else full_access(index, task))
        keys.append(tuple(_Keys(work, files, block_elements, task, runs)))
    return BlockTable(block_elements, (), tuple(keys))


class SourceNames:
    """Identifies the stored bytes of tensors by file fingerprint and position in the file."""

    def __init__(self, checkpoints: Iterable[Checkpoint]) -> None:
        self._names: dict[Location, tuple[str, int, str, str]] = {}
        for checkpoint in checkpoints:
            for file in checkpoint.files:
                path = checkpoint.root / file.name
                self._names[path] = (_real_text(path), file.size_bytes, file.version, file.header_digest)

    def name(self, source: Source) -> tuple[str | int, ...] | None:
        """File, size, version, header digest, offset and code; None for what is not one byte range of a known file."""
        if not isinstance(source, TensorEntry) or source.file not in self._names:
            return None
        return (*self._names[source.file], source.offset, source.kernel_code)


def _real_text(path: Location) -> str:
    """The path with its links followed, elsewhere the location's text."""
    return os.path.realpath(path.local_path) if path.is_local else str(path)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one tensor's blocks."""

    work: MergeWork
    files: SourceNames
    block_elements: int
    task: MergeTask
    runs: tuple[Run, ...]

    def __iter__(self) -> Iterator[bytes]:
        shared = self._shared()
        given = operator_input(self.work, self.task) if shared is not None else None
        rule = None if given is None else _separable_rule(self.work, given)
        for run in self.runs:
            blocks = range(run.span.start // self.block_elements, -(-run.span.stop // self.block_elements))
            described = None
            if given is not None:
                described = self._alone(given, rule, run) if rule is not None else self._together(given)
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
        base = self.files.name(task.base)
        if base is None or any(self.files.name(s) is None for s in task.experts if not isinstance(s, Unchanged)):
            return None
        return {
            "operator": self.work.operator.spec.name,
            "base": base,
            "dtype": task.dtype.name,
            "shape": list(task.shape),
        }

    def _alone(self, given: OperatorInput, rule: _Separable, run: Run) -> Described | None:
        """Return the key parts of a block that depends on its own elements and on quantities of single experts."""
        if not run.present:
            return None
        experts = [[*self._expert(given, e), rule.kept_E[e] if rule.kept_E else None] for e in run.present]
        return {**_in_force(rule.rule, run), "experts": experts} if self._has_content_ids(given, run.present) else None

    def _together(self, given: OperatorInput) -> Described | None:
        """Return the key parts of a block that depends on the whole tensor."""
        everyone = tuple(range(len(self.task.experts)))
        read = tuple(e for run in self.runs for e in run.present)
        if not read or not self._has_content_ids(given, read):
            return None
        return {
            "globals": dict(given.globals),
            "anchor": dict(given.anchor),
            "renormalize": given.renormalize,
            "access": [[run.span.start, list(run.present), list(run.free)] for run in self.runs],
            "experts": [[*self._expert(given, e), dict(given.experts[e])] for e in everyone],
        }

    def _expert(self, given: OperatorInput, e: int) -> list[object]:
        return [self.files.name(self.task.experts[e]), given.stream_keys[e] if given.stream_keys else None]

    def _has_content_ids(self, given: OperatorInput, experts: Iterable[int]) -> bool:
        """Whether the content ids that key randomness are known."""
        models = self.task.expert_models
        return not given.stream_keys or all(self.work.content_ids[models[e]] for e in experts)


@dataclass(frozen=True, slots=True)
class _Separable:
    """A rule whose blocks depend on their own elements, and on the magnitude of each expert's `kept_E`-th element."""

    rule: ElementwiseRule
    kept_E: tuple[int, ...] | None


def _separable_rule(work: MergeWork, given: OperatorInput) -> _Separable | None:
    if work.operator.granularity(given) > 1:
        return None
    request, kept_E = work.operator.reduction(given, NOTHING_REDUCED), None
    if isinstance(request, MagnitudeCut):
        kept_E = request.kept_E
        request = work.operator.reduction(given, Reduced(np.zeros(len(kept_E), np.uint32)))
    if request is not None:
        return None
    rule = work.operator.block_function(given, NOTHING_REDUCED)
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
