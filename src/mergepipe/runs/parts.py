"""Make the shards of a plan's output one by one, within the shares that the plan allots them, and finish the output."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import mergepipe
from mergepipe.checkpoints.contract import LeveledTensor, PackedIndex
from mergepipe.core.records import Size, decode, encode
from mergepipe.core.strict_json import canonical_json, digest_of
from mergepipe.core.units import first_names
from mergepipe.engine.make_part import make_part
from mergepipe.engine.observer import Observer
from mergepipe.engine.output_parts import Part, PartResult
from mergepipe.engine.work import EngineOptions, MergeWork, OutputPlan
from mergepipe.errors import ConflictError, MergePipeError, NotFoundError
from mergepipe.operators.registry import operator_named
from mergepipe.planning.plan import Plan
from mergepipe.planning.problem import sample_cost_bytes
from mergepipe.recipes.tasks import MergeTask
from mergepipe.runs.budget import planned_cost
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, with_parameters
from mergepipe.runs.progress import MergeProgress
from mergepipe.runs.stored_plan import open_planned
from mergepipe.runs.work import merge_work, output_of, used_experts
from mergepipe.snapshots.parts import CONTENT_IDS, PLANNING, Claim, Claimant, PartsJob, PartsPlace, index_of
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.staging import Staging
from mergepipe.snapshots.work_log import forget_work_log, usage_of
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Ledger, Purpose, Usage
from mergepipe.storage.location import Location
from mergepipe.storage.output import sync_directory
from mergepipe.storage.ranges import PAGE_BYTES

FACTS_SECONDS = 60.0
"""How long to wait for a worker that reads what all parts need, before reading it again."""
_POLL_SECONDS = 0.1
_LARGEST_FACT_BYTES = 1 << 36
_IDS_NAME = "content-ids.json"
_KILLED: Final = "(interrupted workers)"


ContentIds = tuple[tuple[Size, str], ...]
"""The content ids that key randomness, by model: one worker reads them for all."""


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """A plan with its opened inputs and the output that it makes."""

    plan: Plan
    inputs: Inputs
    output: OutputPlan

    def job(self, out: Path | Location) -> PartsJob:
        """Return what the parts of `out` are made for."""
        shards = tuple((shard.name, shard.file_bytes) for shard in self.output.shards)
        return PartsJob(out.name, mergepipe.__version__, self.plan.digest, shards)


def open_output(plan: Plan, shard_bytes: int | None, store: Store) -> PlannedOutput:
    """Open the inputs of a plan that is made in parts. No catalog is asked: every worker sees the same."""
    inputs = with_parameters(open_planned(plan, store, CatalogLink(None)), plan)
    return PlannedOutput(plan, inputs, output_of(inputs, shard_bytes))


class PartsWorker:
    """Makes shards of one output, recording before it reads anything what it may read.

    Memory: as `make_part`, and the indices of packed experts.
    """

    def __init__(
        self, planned: PlannedOutput, claimant: Claimant, store: Store, engine: EngineOptions, observer: Observer
    ) -> None:
        self._planned = planned
        self._claimant = claimant
        self._parts = claimant.parts
        self._store = store
        self._engine = engine
        self._observer = observer
        self._work: MergeWork | None = None
        self._shares: tuple[int, ...] = ()
        self._earlier = Usage()

    @property
    def usage(self) -> Usage:
        """Bytes that this process used: its ledger also counts those of killed ones whose work it continued."""
        return self._store.ledger.usage() - self._earlier

    def make(self, shard: int) -> None:
        """Make one shard that is not done; an interrupted attempt that left its work here is continued."""
        with self._parts.used():
            self._make(self._prepared(), shard)

    def _make(self, work: MergeWork, shard: int) -> None:
        parts, ledger, layout = self._parts, self._store.ledger, work.output.shards[shard]
        output = OutputPlan((layout,), work.output.tasks_by_shard()[shard])
        key = digest_of([parts.job.version, parts.job.plan_digest, *parts.job.shards[shard]])
        progress = MergeProgress.of_part(key, output, self._planned.plan, ledger, self._shares[shard])
        with parts.work_folder(shard, progress.can_continue) as staging:
            self._earlier += progress.usage
            try:
                claim = self._claimed(
                    shard, progress.remaining_bytes, layout.name,
                    continues=progress.attempt, earlier_bytes=progress.earlier_expert_bytes,
                )  # fmt: skip
            except MergePipeError:
                if staging.is_continued:
                    staging.keep()
                raise
            with self._metered(claim, self._shares[shard], lambda: progress.usage):
                progress.note_attempt(claim.attempt)
                with progress.recorded(staging):
                    part = Part((shard,))
                    made = make_part(work, part, staging.path, self._store, self._engine, self._observer, progress)
                parts.add(claim, staging.path / layout.name, made.digests_of[shard], progress.usage)

    def _prepared(self) -> MergeWork:
        """Build the work once; what all shards need is read by one worker for all."""
        if self._work is None:
            inputs = self.with_shared_facts(read_missing=True)
            plan, output = self._planned.plan, self._planned.output
            work = merge_work(inputs, output, plan, plan.seed, self._store, CatalogLink(None))
            sides = _encoded_sides(self._planned.inputs, plan)
            shared = _sample_cost(self._planned.inputs, plan) + sum(side.cost_bytes for side in sides.values())
            self._shares, self._work = shard_shares(plan, work, shared), work
        return self._work

    def with_shared_facts(self, *, read_missing: bool) -> Inputs:
        """Return the inputs with indices and content ids that a worker has read; read those that none has."""
        inputs = self._planned.inputs
        for model, side in _encoded_sides(inputs, self._planned.plan).items():
            if not side.is_read:
                self._adopt_index(model, side, read_missing=read_missing)
        if not _unidentified(inputs, self._planned.plan):
            return inputs
        share = _sample_cost(inputs, self._planned.plan)
        raw = self._shared(CONTENT_IDS, _IDS_NAME, share, lambda: self._content_ids(inputs), read_missing=read_missing)
        return inputs if raw is None else _with_content_ids(inputs, raw)

    def _adopt_index(self, model: int, side: PackedIndex, *, read_missing: bool) -> None:
        content = self._shared(
            index_of(model), _index_name(model), side.cost_bytes, lambda: side.content, read_missing=read_missing
        )
        if content is not None and not side.is_read:
            side.adopt(content)

    def _content_ids(self, inputs: Inputs) -> bytes:
        plan = self._planned.plan
        ids = merge_work(inputs, self._planned.output, plan, plan.seed, self._store, CatalogLink(None)).content_ids
        return canonical_json(encode(tuple(entry for entry in sorted(ids.items()) if entry[1])))

    def _shared(
        self, stands_for: int, name: str, share_bytes: int, read: Callable[[], bytes], *, read_missing: bool
    ) -> bytes | None:
        """Return a fact that all shards need: as another worker has recorded it, else read and record it."""
        content = self._parts.read(name, _LARGEST_FACT_BYTES)
        if content is not None or not read_missing:
            return content
        claim = self._claimant.claim_first(stands_for, share_bytes)
        if claim is None:
            content = self._wait_for(stands_for, name)
            if content is not None:
                return content
            claim = self._claimed(stands_for, share_bytes, name)
        before = self._store.ledger.usage()
        with self._metered(claim, share_bytes, lambda: self._store.ledger.usage() - before):
            content = read()
            self._parts.create(name, content)  # before the claim ends: nobody that waits for it begins anew
        self._parts.spend(claim, self._store.ledger.usage() - before)
        return content

    def _wait_for(self, stands_for: int, name: str) -> bytes | None:
        deadline = time.monotonic() + FACTS_SECONDS
        while (content := self._parts.read(name, _LARGEST_FACT_BYTES)) is None:
            if self._claimant.reader_of(stands_for) is None or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return content

    def _claimed(
        self, shard: int, share_bytes: int, name: str, *, continues: int | None = None, earlier_bytes: int = 0
    ) -> Claim:
        claim = self._claimant.claim(shard, share_bytes, continues=continues, earlier_bytes=earlier_bytes)
        if claim is not None:
            return claim
        reader = self._claimant.reader_of(shard) or "another process"
        message = f"is being made by {reader}, and the budget does not allow reading its inputs twice"
        raise ConflictError.of("parts.busy", name, message, "wait for it, then run this part again")

    @contextlib.contextmanager
    def _metered(self, claim: Claim, share_bytes: int, usage: Callable[[], Usage]) -> Iterator[None]:
        """Limit what is read in the context to a share of the plan; on a failure record the exact `usage`."""
        ledger = self._store.ledger
        ledger.expert_limit_bytes = ledger.usage().expert_bytes + share_bytes
        try:
            yield
        except BaseException:
            with contextlib.suppress(MergePipeError, OSError):  # then it counts as its whole share
                self._parts.spend(claim, usage())
            raise
        finally:
            ledger.expert_limit_bytes = None


def record_planning(parts: PartsPlace, plan: Plan, inputs: Inputs, usage: Usage) -> None:
    """Record what was read of `inputs` to make a plan, and leave indices of packed experts to the workers."""
    if not usage.expert_bytes:
        return
    read = {model: side for model, side in _encoded_sides(inputs, plan).items() if side.is_read}
    claim = Claimant(parts, "").claim(PLANNING, sum(side.cost_bytes for side in read.values()))
    assert claim is not None  # without a budget a claim excludes nobody
    parts.spend(claim, usage)
    for model, side in read.items():
        parts.create(_index_name(model), side.content)


def _encoded_sides(inputs: Inputs, plan: Plan) -> dict[int, PackedIndex]:
    """Return the index of each packed model that the plan uses."""
    models = [inputs.expert_models[e] for e in sorted(used_experts(plan))]
    sides = {model: inputs.checkpoints[model].encoded for model in models}
    return {model: side for model, side in sides.items() if side is not None}


def _index_name(model: int) -> str:
    return f"index-{model}"


def _unidentified(inputs: Inputs, plan: Plan) -> list[int]:
    """Return the models whose content ids have to be read."""
    if not operator_named(inputs.recipe.operator.name).is_random:
        return []
    models = [inputs.expert_models[e] for e in sorted(used_experts(plan))]
    return [m for m in models if plan.models[m].content_id is None and inputs.checkpoints[m].content_id is None]


def _sample_cost(inputs: Inputs, plan: Plan) -> int:
    return sum(sample_cost_bytes(inputs.checkpoints[model]) for model in _unidentified(inputs, plan))


def _with_content_ids(inputs: Inputs, raw: bytes) -> Inputs:
    ids = dict(decode(ContentIds, json.loads(raw)))  # sealed by its worker
    checkpoints = (
        replace(checkpoint, content_id=ids.get(model, checkpoint.content_id))
        for model, checkpoint in enumerate(inputs.checkpoints)
    )
    return replace(inputs, checkpoints=tuple(checkpoints))


def shard_shares(plan: Plan, work: MergeWork, shared_bytes: int) -> tuple[int, ...]:
    """Allot the expert bytes of a plan to the shards, beside `shared_bytes` that are read for all of them.

    Laws: the shares and `shared_bytes` sum up to what the plan costs at most; making a shard reads no more than its
    share.
    """
    by_shard = work.output.tasks_by_shard()
    costs = [planned_cost(plan, tasks) for tasks in by_shard]
    remaining_bytes = max(0, plan.planned_bytes - shared_bytes - sum(costs))
    shares = []
    for tasks, cost in zip(by_shard, costs, strict=True):
        more = min(remaining_bytes, sum(_row_pages(plan, work, task) for task in tasks))
        shares.append(cost + more)
        remaining_bytes -= more
    return tuple(shares)


def _row_pages(plan: Plan, work: MergeWork, task: MergeTask) -> int:
    """Return what a plan charges for pages that are read twice, as a rule's tensors are cut between rows."""
    if not task.experts or any(isinstance(source, LeveledTensor) for source in task.experts):
        return 0
    if work.operator.granularity(task.operator_input()) == 1:
        return 0
    n_blocks = -(-task.base.n_elements // plan.block_elements)
    return PAGE_BYTES * n_blocks * len(task.experts)


# --- finish the output ---


class MadeParts(MergeProgress):
    """The progress of an output whose parts are made: it takes them, and failures cost nothing.

    What they took is counted in `ledger`.
    """

    def __init__(self, parts: PartsPlace, plan: Plan, output: OutputPlan, ledger: Ledger) -> None:
        """Raises NotFoundError, `parts.missing`, if a shard is not made."""
        super().__init__("", output, plan, ledger, resume=False)
        _made_shards(parts)
        self._parts = parts
        self._account = account = parts.account()
        self.earlier_expert_bytes = account.repeated_bytes
        self.n_runs = account.n_attempts

    def take(self, work: MergeWork, directory: Path, observer: Observer) -> PartResult:
        """Move the shards into a staging directory."""
        digests_of, killed_bytes = _made_shards(self._parts), self._account.unfinished_bytes
        usage = self._account.usage + usage_of(((_KILLED, Purpose.EXPERT, killed_bytes),) if killed_bytes else ())
        self._ledger.expert_limit_bytes = None  # each worker was held to its share
        self._ledger.add(usage)
        for shard in range(len(work.output.shards)):
            self._parts.give(shard, digests_of[shard], directory)
            observer.on_progress()
        sync_directory(directory)
        return PartResult(digests_of, usage)

    def can_continue(self, directory: Path, is_sent: Callable[[str, str], bool] | None = None) -> bool:
        """Begin anew: the small files are made again, and the shards lie with the parts."""
        del is_sent
        forget_work_log(directory)
        return False

    @contextlib.contextmanager
    def recorded(self, staging: Staging) -> Iterator[None]:
        """Record nothing: it reads nothing."""
        del staging
        yield


def _made_shards(parts: PartsPlace) -> dict[int, tuple[TensorDigest, ...]]:
    """Return the digests of all shards."""
    recorded = parts.recorded_shards()
    is_complete = len(recorded) == len(parts.job.shards)  # else none is read
    digests_of = {
        shard: parts.done(shard) if is_complete else () if shard in recorded else None
        for shard in range(len(parts.job.shards))
    }
    missing = [parts.job.shards[shard][0] for shard, digests in digests_of.items() if digests is None]
    if missing:
        message = f"{len(missing)} of {len(digests_of)} shards are not made: {first_names(missing)}"
        raise NotFoundError.of("parts.missing", parts.out, message, "run their parts (`mergepipe status` lists them)")
    return {shard: digests for shard, digests in digests_of.items() if digests is not None}
