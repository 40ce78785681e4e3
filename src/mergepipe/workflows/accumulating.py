"""Kept sums: the float32 totals of additive merges, on which a later merge with more experts goes on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

import mergepipe
from mergepipe.block_digests import BlockTable, block_table_of
from mergepipe.blocks import DELTA_FLAG, DTYPES, F32, element_count
from mergepipe.budget import Ledger, Purpose
from mergepipe.canonical import canonical_json, digest_of
from mergepipe.engine.execute import MergeWork, OutputPlan, operator_input
from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.manifest import Manifest
from mergepipe.operators.base import NOTHING_REDUCED, BlockFunction
from mergepipe.operators.elementwise import ElementwiseRule, Keep
from mergepipe.readers.base import Checkpoint, KeptTotal, TensorEntry, Unchanged
from mergepipe.readers.safetensors import read_header
from mergepipe.recipe.tasks import Action, MergeTask, TensorParameters
from mergepipe.storage.file_version import version_of
from mergepipe.storage.limits import BLOCK_TABLE_BYTES
from mergepipe.storage.local import LocalStore
from mergepipe.storage.regular import read_small
from mergepipe.workflows.block_keys import SourceNames
from mergepipe.workflows.reusing import Snapshots
from mergepipe.workflows.scanning import scan_snapshot
from mergepipe.workflows.snapshot_layout import PlacedFile, PlacedTensor, SnapshotLayout
from mergepipe.writer import ShardLayout, TensorDigest, TensorSpec, header_of, table_of

ACCUMULATORS_NAME = "mergepipe.accumulators"  # no extension that a loader of weights looks for
ACCUMULATORS_RECORD_NAME = "mergepipe.accumulators.json"
ACCUMULATORS_BLOCKS_NAME = "mergepipe.accumulators.blocks"
ACCUMULATORS_FORMAT = "mergepipe-accumulators/2"


@dataclass(frozen=True, slots=True)
class Addition:
    """One contribution: `what` digests the expert's bytes and how they are thinned, `place` says where they are."""

    what: str
    coefficient: float  # exactly a float32
    place: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """What the sum of one tensor is made of: where it starts, and its additions in order.

    Exact sums of equal `start` and additions are equal to the bit. One that is not exact had coefficients changed.
    """

    start: str
    additions: tuple[Addition, ...]
    is_exact: bool = True

    def begins(self, other: Sum) -> bool:
        """Whether `other` goes on from here, bit for bit."""
        own, others = ([(a.what, a.coefficient) for a in each.additions] for each in (self, other))
        return self.is_exact and self.start == other.start and others[: len(own)] == own

    def corrections(self, other: Sum) -> tuple[tuple[Addition, float], ...]:
        """What to add with which coefficient to come from here to `other`, but for rounding."""
        now = {each.what: each for each in other.additions}
        then = {each.what: each for each in self.additions}
        changes = {
            what: (now[what].coefficient if what in now else 0.0) - (then[what].coefficient if what in then else 0.0)
            for what in {**then, **now}
        }
        return tuple((now.get(what) or then[what], change) for what, change in changes.items() if change)


@dataclass(frozen=True, slots=True)
class RunningTotal:
    """The sum that a task asks for. `rule` is the operator's, `experts` the places of the additions among experts."""

    sum: Sum
    rule: ElementwiseRule
    experts: tuple[int, ...]


def running_totals(
    work: MergeWork, tasks: Sequence[MergeTask], checkpoints: Iterable[Checkpoint]
) -> dict[str, RunningTotal]:
    """The sums of the tensors that are plain sums, element by element, of contributions that can be told."""
    names = SourceNames(checkpoints)
    found = ((task.name, _running_total(work, task, names)) for task in tasks)
    return {name: total for name, total in found if total is not None}


def _running_total(work: MergeWork, task: MergeTask, names: SourceNames) -> RunningTotal | None:
    if work.access is not None or task.action is Action.COPY or not task.experts or not task.base.n_elements:
        return None
    given = operator_input(work, task)
    if work.operator.granularity(given) > 1 or work.operator.reduction(given) is not None:
        return None
    rule = work.operator.block_function(given, NOTHING_REDUCED)
    if not isinstance(rule, ElementwiseRule) or rule.consensus or rule.keep not in (Keep.ALL, Keep.RANDOM):
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
        additions.append(Addition(what, float(rule.coefficients_E[e]), place))
    start = digest_of([mergepipe.__version__, base, list(task.shape), rule.anchor_scale, int(rule.keep)])
    return RunningTotal(Sum(start, tuple(additions)), rule, experts)


# --- going on with a kept sum ---


@dataclass(frozen=True, slots=True)
class Kept:
    """A sum that an earlier merge kept, and what is missing from it to the sum wanted."""

    entry: KeptTotal
    missing: tuple[tuple[Addition, float], ...]
    is_exact: bool
    sid: str

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """Where what is missing is read."""
        return tuple(_entry_at(addition.place, self.entry) for addition, _ in self.missing)


def find_kept(
    totals: Mapping[str, RunningTotal], snapshots: Snapshots, ledger: Ledger, threads: int, *, within_ulp: bool
) -> dict[str, Kept]:
    """Look in earlier snapshots for sums from which the least is missing to those wanted, of each tensor.

    A sum that has to be corrected, instead of only added to, is taken `within_ulp` alone. What is taken is read once
    here, to be compared with its digests.

    Raises:
        CorruptError: `accumulators.damaged`.
    """
    best: dict[str, tuple[Kept, KeptTotals]] = {}
    for earlier in snapshots if totals else ():
        kept = read_totals(earlier.path, earlier.manifest)
        if kept is None:
            continue
        for name, total in totals.items():
            found = kept.find(name, total, within_ulp=within_ulp)
            if found is not None and (name not in best or len(found.missing) < len(best[name][0].missing)):
                best[name] = (found, kept)
    for kept in {id(kept): kept for _, kept in best.values()}.values():
        kept.check([name for name, (_, own) in best.items() if own is kept], ledger, threads)
    return {name: found for name, (found, _) in best.items()}


def continued(task: MergeTask, total: RunningTotal, kept: Kept) -> tuple[MergeTask, BlockFunction]:
    """The task that adds only what is missing, and the function that does so."""
    if not kept.missing:
        return rounded(task, kept.entry)
    whats = [addition.what for addition in total.sum.additions]
    taken = [total.experts[whats.index(a.what)] if a.what in whats else total.experts[0] for a, _ in kept.missing]
    taken = [taken[0], *taken]  # the first entry stands for the sum so far, and is not looked at
    made = replace(
        task,
        experts=(kept.entry, *kept.sources),
        expert_models=tuple(task.expert_models[e] for e in taken),
        parameters=TensorParameters({}, {}, ({},) * len(taken)),
    )
    coefficients_E = np.array([0.0, *(coefficient for _, coefficient in kept.missing)], np.float32)
    return made, _of_experts(total.rule, taken, coefficients_E)


def _of_experts(rule: ElementwiseRule, taken: list[int], coefficients_E: NDArray[np.float32]) -> ElementwiseRule:
    return replace(
        rule,
        goes_on=True,
        coefficients_E=coefficients_E,
        stream_keys_E=None if rule.stream_keys_E is None else rule.stream_keys_E[taken],
        cuts_E=None if rule.cuts_E is None else rule.cuts_E[taken],
        scales_E=None if rule.scales_E is None else rule.scales_E[taken],
    )


def _entry_at(place: Sequence[str | int], like: TensorEntry) -> TensorEntry:
    """The tensor that a place (see `SourceNames`) is the place of; of the shape of `like`."""
    file, _, _, _, offset, code = place
    dtype = next(each for each in DTYPES.values() if each.kernel_code == int(code) & ~DELTA_FLAG)
    nbytes = like.n_elements * dtype.itemsize
    return TensorEntry(like.name, dtype, like.shape, Path(str(file)), int(offset), nbytes, bool(int(code) & DELTA_FLAG))


def _is_there(place: Sequence[str | int]) -> bool:
    """Whether the file is the one that was read then."""
    try:
        path = Path(str(place[0]))
        status = path.stat()
    except OSError:
        return False
    return [status.st_size, version_of(path, status)] == list(place[1:3])


def rounded(task: MergeTask, entry: KeptTotal) -> tuple[MergeTask, BlockFunction]:
    """The task that only rounds a sum to the output's dtype."""
    made = replace(task, base=entry, experts=(), expert_models=(), parameters=TensorParameters({}, {}, ()))
    return made, ElementwiseRule(np.empty(0, np.float32))


def largest_totals_bytes(tasks: Sequence[MergeTask]) -> int:
    """What the sums of `tasks` take at most, but for a header."""
    return sum(F32.itemsize * task.base.n_elements for task in tasks if task.action is Action.MERGE)


def total_output(tasks: Sequence[MergeTask]) -> OutputPlan:
    """The file of the sums of `tasks`."""
    specs = tuple(TensorSpec(task.name, F32, task.shape) for task in tasks)
    shard = ShardLayout(ACCUMULATORS_NAME, specs, header_of(specs, {}))
    return OutputPlan((shard,), tuple(replace(task, dtype=F32) for task in tasks))


def kept_entries(directory: Path, output: OutputPlan) -> dict[str, KeptTotal]:
    """Where the sums are once they are written."""
    (shard,) = output.shards
    entries, offset = {}, len(shard.header)
    for spec in shard.tensors:
        entries[spec.name] = KeptTotal(spec.name, F32, spec.shape, directory / shard.name, offset, spec.nbytes)
        offset += spec.nbytes
    return entries


# --- the record ---


def total_files(
    totals: Mapping[str, RunningTotal],
    inexact: Collection[str],
    output: OutputPlan,
    digests: tuple[TensorDigest, ...],
) -> dict[str, bytes]:
    """The small files that go with the sums: what each is made of, and the digests of its blocks."""
    tensors = []
    for spec in output.shards[0].tensors:
        made = totals[spec.name].sum
        additions = [[a.what, a.coefficient, list(a.place)] for a in made.additions]
        is_exact = spec.name not in inexact
        tensors.append([spec.name, list(spec.shape), made.start, is_exact, additions])
    record = {"format": ACCUMULATORS_FORMAT, "tensors": tensors}
    return {
        ACCUMULATORS_RECORD_NAME: canonical_json(record) + b"\n",
        ACCUMULATORS_BLOCKS_NAME: table_of(output.shards, digests).to_bytes(),
    }


@dataclass(frozen=True)
class KeptTotals:
    """The sums of an earlier snapshot, as its manifest binds them."""

    path: Path
    sid: str
    sums: Mapping[str, Sum]
    entries: Mapping[str, KeptTotal]
    table: BlockTable

    def find(self, name: str, wanted: RunningTotal, *, within_ulp: bool) -> Kept | None:
        """The sum here, if from it less is missing than the whole."""
        have, want = self.sums.get(name), wanted.sum
        if have is None or have.start != want.start:
            return None
        if have.begins(want):
            rest = want.additions[len(have.additions) :]
            return Kept(self.entries[name], tuple((each, each.coefficient) for each in rest), True, self.sid)
        missing = have.corrections(want)
        is_worth_it = within_ulp and wanted.rule.keep is Keep.ALL and len(missing) < len(want.additions)
        if not is_worth_it or not all(_is_there(addition.place) for addition, _ in missing):
            return None
        return Kept(self.entries[name], missing, False, self.sid)

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
        """Those of the sums that are not what was written."""
        rows = [entry for entry in self.entries.values() if entry.name in names]
        tensors = tuple(PlacedTensor(i, e.name, F32, e.shape, "", e.offset) for i, e in enumerate(rows))
        first = min(entry.offset for entry in self.entries.values())
        file = PlacedFile(0, self.path.name, self.path.stat().st_size, first, tensors)
        layout = SnapshotLayout((file,), self.table.block_elements)
        scan = scan_snapshot(LocalStore(), self.path.parent, layout, threads, lambda _: None)
        ledger.charge(str(self.path), Purpose.REUSE, scan.n_bytes)
        expected = dict(zip(self.entries, self.table.tensors, strict=True))
        return tuple(e.name for e, found in zip(rows, scan.blocks, strict=True) if tuple(found) != expected[e.name])


def read_totals(directory: Path, manifest: Manifest) -> KeptTotals | None:
    """The sums that a snapshot keeps; None where it keeps none, or not those that its manifest binds."""
    path = directory / ACCUMULATORS_NAME
    records = {record.name: record for record in manifest.sidecars}
    if ACCUMULATORS_RECORD_NAME not in records or not path.is_file():
        return None
    try:
        names = (ACCUMULATORS_RECORD_NAME, ACCUMULATORS_BLOCKS_NAME)
        raw = {name: read_small(directory / name, BLOCK_TABLE_BYTES) for name in names}
        if any(blake3(content).hexdigest(16) != records[name].blake3 for name, content in raw.items()):
            return None
        return _parsed(path, manifest.sid, json.loads(raw[ACCUMULATORS_RECORD_NAME]), raw[ACCUMULATORS_BLOCKS_NAME])
    except (MergePipeError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _parsed(path: Path, sid: str, record: Any, blocks: bytes) -> KeptTotals | None:
    """The manifest vouches for the record; the file is held against it."""
    if record["format"] != ACCUMULATORS_FORMAT:
        return None
    sums = {
        name: Sum(start, tuple(Addition(what, number, tuple(place)) for what, number, place in additions), is_exact)
        for name, _, start, is_exact, additions in record["tensors"]
    }
    shapes = {name: tuple(shape) for name, shape, *_ in record["tensors"]}
    table = block_table_of(blocks, path, 1, [element_count(shape) for shape in shapes.values()])
    found = {
        e.name: KeptTotal(e.name, e.dtype, e.shape, e.file, e.offset, e.nbytes)
        for e in read_header(LocalStore(), path).entries
    }
    if {n: (e.dtype, e.shape) for n, e in found.items()} != {n: (F32, shape) for n, shape in shapes.items()}:
        return None
    return KeptTotals(path, sid, sums, {name: found[name] for name in shapes}, table)
