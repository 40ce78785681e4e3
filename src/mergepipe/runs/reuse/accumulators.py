"""Keep the float32 sums of additive merges, so that a later merge only adds its new experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

import mergepipe
from mergepipe.checkpoints.contract import KeptTotal, Unchanged
from mergepipe.checkpoints.formats.safetensors import read_header
from mergepipe.core.blocks import F32, element_count
from mergepipe.core.canonical_json import canonical_json, digest_of
from mergepipe.core.values import dataclass
from mergepipe.engine.tensor_work import operator_input
from mergepipe.engine.work import MergeWork, OutputPlan
from mergepipe.errors import CorruptError, MergePipeError, RecipeError
from mergepipe.operators.base import NOTHING_REDUCED, BlockFunction, Operator, OperatorInput
from mergepipe.operators.rules.elementwise import ElementwiseRule, Keep
from mergepipe.recipes.resolve.tasks import Action, MergeTask, TensorParameters
from mergepipe.runs.reuse.blocks import EarlierSnapshot, EarlierSnapshots
from mergepipe.runs.reuse.kept_sums_files import find_sums
from mergepipe.runs.reuse.keys import SourceNames
from mergepipe.snapshots.block_digests import BlockTable, block_table_of
from mergepipe.snapshots.layout import PlacedFile, PlacedTensor, SnapshotLayout
from mergepipe.snapshots.manifest import Manifest
from mergepipe.snapshots.scan import scan_snapshot
from mergepipe.snapshots.shards import ShardLayout, TensorDigest, TensorSpec, header_of, table_of
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.limits import BLOCK_TABLE_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

ACCUMULATORS_NAME = "mergepipe.accumulators"  # in staging; `kept_sums_files` says where it is published
ACCUMULATORS_RECORD_NAME = "mergepipe.accumulators.json"
ACCUMULATORS_BLOCKS_NAME = "mergepipe.accumulators.blocks"
ACCUMULATORS_FORMAT = "mergepipe-accumulators/2"


@dataclass(frozen=True, slots=True)
class Addition:
    """One contribution to a sum: `what` digests the expert's bytes and how they are sparsified."""

    what: str
    coefficient: float  # exactly a float32


@dataclass(frozen=True, slots=True)
class Sum:
    """The composition of one tensor's sum: its start value, and its additions in order.

    Sums of equal `start` and additions are equal to the bit.
    """

    start: str
    additions: tuple[Addition, ...]

    def is_prefix_of(self, other: Sum) -> bool:
        """Whether `other` continues this sum, bit for bit."""
        return self.start == other.start and other.additions[: len(self.additions)] == self.additions


@dataclass(frozen=True, slots=True)
class RunningTotal:
    """The sum that a task needs. `rule` is the operator's; `experts` indexes the task's expert of each addition."""

    sum: Sum
    rule: ElementwiseRule
    experts: tuple[int, ...]


def running_totals(work: MergeWork, tasks: Sequence[MergeTask], names: SourceNames) -> dict[str, RunningTotal]:
    """Return the sums of the tensors that are elementwise sums of contributions with `names`."""
    running = ((task.name, _running_total(work, task, names)) for task in tasks)
    return {name: total for name, total in running if total is not None}


def _running_total(work: MergeWork, task: MergeTask, names: SourceNames) -> RunningTotal | None:
    if work.access is not None or task.action is Action.COPY or not task.experts or not task.base.n_elements:
        return None
    rule = _sum_rule(work.operator, operator_input(work, task))
    if rule is None:
        return None
    experts = tuple(e for e, source in enumerate(task.experts) if not isinstance(source, Unchanged))
    base, places = names.name(task.base), [names.name(task.experts[e]) for e in experts]
    if base is None or not experts:
        return None
    arrays = (rule.stream_keys_E, rule.cuts_E, rule.scales_E)
    additions = []
    for e, place in zip(experts, places, strict=True):
        if place is None:
            return None
        what = digest_of([place, int(rule.keep), *(a[e].tobytes().hex() if a is not None else None for a in arrays)])
        additions.append(Addition(what, float(rule.coefficients_E[e])))
    start = digest_of([mergepipe.__version__, base, list(task.shape), rule.anchor_scale, int(rule.keep)])
    return RunningTotal(Sum(start, tuple(additions)), rule, experts)


def _sum_rule(operator: Operator, inputs: OperatorInput) -> ElementwiseRule | None:
    """Return the operator's rule for a tensor if it is a sum over experts; None for any other."""
    if operator.granularity(inputs) > 1 or operator.reduction(inputs) is not None:
        return None
    rule = operator.block_function(inputs, NOTHING_REDUCED)
    if not isinstance(rule, ElementwiseRule) or rule.consensus or rule.keep not in (Keep.ALL, Keep.RANDOM):
        return None
    return rule


def check_sums_can_be_kept(operator: Operator, tasks: Iterable[MergeTask]) -> None:
    """Refuse to keep the sums of a merge in which no tensor is a sum over experts.

    Raises:
        RecipeError: `option.accumulators`, it says what to do instead.
    """
    for task in (task for task in tasks if task.action is Action.MERGE and task.experts and task.base.n_elements):
        parameters, keys = task.parameters, (0,) * len(task.experts)
        inputs = OperatorInput(
            parameters.globals, parameters.anchor, parameters.experts, task.base.n_elements, keys, shape=task.shape
        )
        if _sum_rule(operator, inputs) is not None:
            return
    message = f"'{operator.spec.name}' does not add up experts one by one, so there is no sum to keep"
    hint = "pack the experts (`mergepipe pack`): a merge with one more then reads about a tenth of their bytes"
    raise RecipeError.of("option.accumulators", "--keep-sums", message, hint)


# --- continuing a kept sum ---


@dataclass(frozen=True, slots=True)
class KeptSum:
    """A sum of an earlier merge that equals the first `n_additions` of the needed sum."""

    entry: KeptTotal
    n_additions: int
    sid: str


def find_kept_sums(
    totals: Mapping[str, RunningTotal],
    snapshots: EarlierSnapshots,
    ledger: Ledger,
    threads: int,
    totals_as_in: Callable[[EarlierSnapshot], Mapping[str, RunningTotal]],
) -> dict[str, KeptSum]:
    """Find for each tensor the kept sum of an earlier snapshot that covers the most additions.

    `totals_as_in` gives `totals` under the names that an earlier snapshot has for the same contents. Each sum used is
    read once here and compared with its digests.

    Raises:
        CorruptError: `accumulators.damaged`.
    """
    best: dict[str, tuple[KeptSum, KeptTotals]] = {}
    for earlier in snapshots if totals else ():
        sums = read_totals(snapshots.store, earlier.path, earlier.manifest)
        if sums is None:
            continue
        keys_by_name = totals_as_in(earlier)
        for name in totals:
            candidate = sums.find(name, keys_by_name[name])
            if candidate is not None and (name not in best or candidate.n_additions > best[name][0].n_additions):
                best[name] = (candidate, sums)
    for sums in {id(sums): sums for _, sums in best.values()}.values():
        sums.check([name for name, (_, used) in best.items() if used is sums], ledger, threads)
    return {name: candidate for name, (candidate, _) in best.items()}


def continuation_task(task: MergeTask, total: RunningTotal, kept_sum: KeptSum) -> tuple[MergeTask, BlockFunction]:
    """Return the task and the block function that add only the missing experts to a kept sum."""
    missing = list(total.experts[kept_sum.n_additions :])
    if not missing:
        return rounding_task(task, kept_sum.entry)
    positions = [missing[0], *missing]  # the first entry stands for the kept sum and is not used
    made = replace(
        task,
        experts=(kept_sum.entry, *(task.experts[e] for e in missing)),
        expert_models=tuple(task.expert_models[e] for e in positions),
        parameters=TensorParameters({}, {}, ({},) * len(positions)),
    )
    return made, _of_experts(total.rule, positions)


def _of_experts(rule: ElementwiseRule, positions: list[int]) -> ElementwiseRule:
    return replace(
        rule,
        goes_on=True,
        coefficients_E=rule.coefficients_E[positions],
        stream_keys_E=None if rule.stream_keys_E is None else rule.stream_keys_E[positions],
        cuts_E=None if rule.cuts_E is None else rule.cuts_E[positions],
        scales_E=None if rule.scales_E is None else rule.scales_E[positions],
    )


def rounding_task(task: MergeTask, entry: KeptTotal) -> tuple[MergeTask, BlockFunction]:
    """Return the task and the block function that round a sum to the output's dtype."""
    made = replace(task, base=entry, experts=(), expert_models=(), parameters=TensorParameters({}, {}, ()))
    return made, ElementwiseRule(np.empty(0, np.float32))


def largest_totals_bytes(tasks: Sequence[MergeTask]) -> int:
    """Return the largest size of the sums of `tasks`, header excluded."""
    return sum(F32.itemsize * task.base.n_elements for task in tasks if task.action is Action.MERGE)


def total_output(tasks: Sequence[MergeTask]) -> OutputPlan:
    """Lay out the file of the sums of `tasks`."""
    specs = tuple(TensorSpec(task.name, F32, task.shape) for task in tasks)
    shard = ShardLayout(ACCUMULATORS_NAME, specs, header_of(specs, {}))
    return OutputPlan((shard,), tuple(replace(task, dtype=F32) for task in tasks))


def kept_entries(directory: Path, output: OutputPlan) -> dict[str, KeptTotal]:
    """Locate the written sums in their file."""
    (shard,) = output.shards
    entries, offset = {}, len(shard.header)
    for spec in shard.tensors:
        entries[spec.name] = KeptTotal(
            spec.name, F32, spec.shape, Location.local(directory / shard.name), offset, spec.nbytes
        )
        offset += spec.nbytes
    return entries


# --- the record ---


def total_files(
    totals: Mapping[str, RunningTotal], output: OutputPlan, digests: tuple[TensorDigest, ...]
) -> dict[str, bytes]:
    """Build the small files that record the sums: the composition of each, and its block digests."""
    tensors = []
    for spec in output.shards[0].tensors:
        made = totals[spec.name].sum
        additions = [[addition.what, addition.coefficient] for addition in made.additions]
        tensors.append([spec.name, list(spec.shape), made.start, additions])
    record = {"format": ACCUMULATORS_FORMAT, "tensors": tensors}
    return {
        ACCUMULATORS_RECORD_NAME: canonical_json(record) + b"\n",
        ACCUMULATORS_BLOCKS_NAME: table_of(output.shards, digests).to_bytes(),
    }


@dataclass(frozen=True)
class KeptTotals:
    """The kept sums of an earlier snapshot, bound by digests in its manifest."""

    store: Store
    path: Location
    sid: str
    sums: Mapping[str, Sum]
    entries: Mapping[str, KeptTotal]
    table: BlockTable

    def find(self, name: str, wanted: RunningTotal) -> KeptSum | None:
        """Return the kept sum of a tensor if it is a prefix of the needed one."""
        have = self.sums.get(name)
        if have is None or not have.is_prefix_of(wanted.sum):
            return None
        return KeptSum(self.entries[name], len(have.additions), self.sid)

    def check(self, names: Iterable[str], ledger: Ledger, threads: int) -> None:
        """Read the sums and compare them with their digests.

        Raises:
            CorruptError: `accumulators.damaged`.
        """
        damaged = self.damaged(set(names), ledger, threads)
        if damaged:
            message = f"the kept sum of '{damaged[0]}' is not what was written: nothing was published"
            raise CorruptError.of(
                "accumulators.damaged", self.path, message, "remove that file, or run with --no-reuse"
            )

    def damaged(self, names: set[str], ledger: Ledger, threads: int) -> tuple[str, ...]:
        """Return the names of the sums whose bytes do not match their digests."""
        rows = [entry for entry in self.entries.values() if entry.name in names]
        tensors = tuple(PlacedTensor(i, e.name, F32, e.shape, "", e.offset) for i, e in enumerate(rows))
        first = min(entry.offset for entry in self.entries.values())
        file = PlacedFile(0, self.path.name, self.store.size_bytes(self.path), first, tensors)
        layout = SnapshotLayout((file,), self.table.block_elements)
        # a store of its own: what a scan reads is charged as analysis, which a budget counts, and this is reuse
        scan = scan_snapshot(Stores(), self.path.parent, layout, threads, lambda _: None)
        ledger.charge(str(self.path), Purpose.REUSE, scan.n_bytes)
        expected = dict(zip(self.entries, self.table.tensors, strict=True))
        return tuple(e.name for e, digests in zip(rows, scan.blocks, strict=True) if tuple(digests) != expected[e.name])


def read_totals(store: Store, directory: Location, manifest: Manifest) -> KeptTotals | None:
    """Read the record of a snapshot's kept sums; None if there are none or the manifest does not match."""
    path = find_sums(store, directory, manifest.sid)
    records = {record.name: record for record in manifest.sidecars}
    try:
        if ACCUMULATORS_RECORD_NAME not in records or not is_file(store, path):
            return None
        names = (ACCUMULATORS_RECORD_NAME, ACCUMULATORS_BLOCKS_NAME)
        raw = {name: store.read_small(directory / name, BLOCK_TABLE_BYTES) for name in names}
        if any(blake3(content).hexdigest(16) != records[name].blake3 for name, content in raw.items()):
            return None
        return _parsed(
            store, path, manifest.sid, json.loads(raw[ACCUMULATORS_RECORD_NAME]), raw[ACCUMULATORS_BLOCKS_NAME]
        )
    except (MergePipeError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _parsed(store: Store, path: Location, sid: str, record: Any, blocks: bytes) -> KeptTotals | None:
    """Parse a record that the manifest vouches for, and compare the file's header with it."""
    if record["format"] != ACCUMULATORS_FORMAT:
        return None
    sums = {
        name: Sum(start, tuple(Addition(what, coefficient) for what, coefficient in additions))
        for name, _, start, additions in record["tensors"]
    }
    shapes = {name: tuple(shape) for name, shape, *_ in record["tensors"]}
    table = block_table_of(blocks, path, 1, [element_count(shape) for shape in shapes.values()])
    entries = {
        e.name: KeptTotal(e.name, e.dtype, e.shape, e.file, e.offset, e.nbytes)
        for e in read_header(store, path).entries
    }
    if {n: (e.dtype, e.shape) for n, e in entries.items()} != {n: (F32, shape) for n, shape in shapes.items()}:
        return None
    return KeptTotals(store, path, sid, sums, {name: entries[name] for name in shapes}, table)
