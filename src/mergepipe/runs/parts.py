"""Make the shards of a plan's output one by one for an output, within the shares that the plan allots them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mergepipe
from mergepipe.checkpoints.contract import LeveledTensor
from mergepipe.core.canonical_json import canonical_json, digest_of
from mergepipe.engine.make_part import make_part
from mergepipe.engine.tensor_work import operator_input
from mergepipe.engine.work import EngineOptions, MergeWork, Observer, OutputPlan, Part, plan_output
from mergepipe.errors import ConflictError, MergePipeError
from mergepipe.operators.registry import operator_named
from mergepipe.planning.plan import Plan
from mergepipe.planning.problem import sample_cost_bytes
from mergepipe.recipes.tasks import MergeTask
from mergepipe.runs.budget.costs import planned_cost
from mergepipe.runs.inputs.opened import Inputs, with_parameters
from mergepipe.runs.inputs.planned import open_planned
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.runs.work import merge_work, used_experts
from mergepipe.snapshots.parts_account import CONTENT_IDS, PLANNING, PartsAccount, Reading, index_of
from mergepipe.snapshots.parts_bucket import PartsBucket, find_job, folder_digests
from mergepipe.snapshots.parts_directory import PartsDirectory, directory_digests, parts_directory, read_job
from mergepipe.snapshots.parts_place import PARTS_FORMAT, PartsJob, PartsPlace, parsed_record
from mergepipe.snapshots.work_log import UnitLog
from mergepipe.storage.buffers import PAGE_BYTES
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Usage
from mergepipe.storage.location import Location
from mergepipe.storage.remote.bucket_folder import BucketFolder

FACTS_SECONDS = 60.0
"""How long to wait for a worker that reads what all parts need, before reading it again."""
_POLL_SECONDS = 0.1
_LARGEST_FACT_BYTES = 1 << 36
_IDS_NAME = "content-ids.json"


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


def parts_place(out: Path | Location, job: PartsJob, work: Path) -> PartsPlace:
    """Return where the parts of an output are kept; those of a bucket are made beside `work` on this machine."""
    return PartsDirectory(out, job) if isinstance(out, Path) else PartsBucket(BucketFolder(out), job, work)


def plan_digests_at(out: Path | Location) -> tuple[str, ...]:
    """Return the digests of the plans of which there are parts of an output."""
    return directory_digests(out) if isinstance(out, Path) else folder_digests(BucketFolder(out))


def job_at(out: Path | Location, plan_digest: str) -> PartsJob | None:
    """Read what the parts of an output by a plan are made for; None if there are none."""
    if isinstance(out, Path):
        return read_job(parts_directory(out, plan_digest))
    return find_job(BucketFolder(out), plan_digest)


def open_output(plan: Plan, shard_bytes: int, store: Store) -> PlannedOutput:
    """Open the inputs of a plan that is made in parts. No catalog is asked: every worker sees the same."""
    inputs = with_parameters(open_planned(plan, store, CatalogLink(None)), plan)
    return PlannedOutput(plan, inputs, plan_output(inputs.resolution.tasks, shard_bytes))


class PartsWorker:
    """Makes shards of one output, recording before it reads anything what it may read.

    Memory: as `make_part`, and the indices of packed experts.
    """

    def __init__(
        self, planned: PlannedOutput, account: PartsAccount, store: Store, engine: EngineOptions, observer: Observer
    ) -> None:
        self._planned = planned
        self._account = account
        self._parts = account.parts
        self._store = store
        self._engine = engine
        self._observer = observer
        self._reported = Usage()
        self._work: MergeWork | None = None
        self._shares: tuple[int, ...] = ()

    def make(self, shard: int) -> None:
        """Make one shard that is not done."""
        with self._parts.used():
            self._make(self._prepared(), shard)

    def _make(self, work: MergeWork, shard: int) -> None:
        name = self._parts.job.shards[shard][0]
        reading = self._admitted(shard, self._shares[shard], name)
        job = self._parts.job
        key = digest_of([job.version, job.plan_digest, *job.shards[shard]])
        units = UnitLog(key, (work.output.shards[shard],))
        with self._parts.work_folder(shard, units) as folder:
            with self._metered(reading):
                result = make_part(work, Part((shard,)), folder, self._store, self._engine, self._observer, units)
            self._parts.add(shard, folder / name, result.digests)

    def _prepared(self) -> MergeWork:
        """Build the work once; what all shards need is read by one worker for all."""
        if self._work is None:
            inputs = self.with_shared_facts(read_missing=True)
            plan, output = self._planned.plan, self._planned.output
            work = merge_work(inputs, output, plan, plan.seed, self._store, CatalogLink(None))
            shared = _sample_cost(self._planned.inputs, plan) + sum(self._index_costs().values())
            self._shares, self._work = shard_shares(plan, work, shared), work
        return self._work

    def _index_costs(self) -> dict[int, int]:
        return _index_costs(self._planned.inputs, self._planned.plan)

    def with_shared_facts(self, *, read_missing: bool) -> Inputs:
        """Return the inputs with indices and content ids that a worker has read; read those that none has."""
        inputs = self._planned.inputs
        for model, cost_bytes in self._index_costs().items():
            side = inputs.checkpoints[model].encoded
            if side is not None and not side.is_read:
                self._adopt_index(model, cost_bytes, read_missing=read_missing)
        if not needs_content_ids(inputs, self._planned.plan):
            return inputs
        share = _sample_cost(inputs, self._planned.plan)
        raw = self._shared(CONTENT_IDS, _IDS_NAME, share, lambda: self._content_ids(inputs), read_missing=read_missing)
        return inputs if raw is None else _with_content_ids(inputs, raw, self._parts.path / _IDS_NAME)

    def _adopt_index(self, model: int, cost_bytes: int, *, read_missing: bool) -> None:
        side = self._planned.inputs.checkpoints[model].encoded
        assert side is not None
        content = self._shared(
            index_of(model), _index_name(model), cost_bytes, lambda: side.content, read_missing=read_missing
        )
        if content is not None and not side.is_read:
            side.adopt(content)

    def _content_ids(self, inputs: Inputs) -> bytes:
        plan = self._planned.plan
        ids = merge_work(inputs, self._planned.output, plan, plan.seed, self._store, CatalogLink(None)).content_ids
        listed = [{"model": model, "id": identity} for model, identity in sorted(ids.items()) if identity]
        return canonical_json({"format": PARTS_FORMAT, "content_ids": listed})

    def _shared(
        self, stands_for: int, name: str, share_bytes: int, read: Callable[[], bytes], *, read_missing: bool
    ) -> bytes | None:
        """Return a fact that all shards need: as another worker has recorded it, else read and record it."""
        content = self._parts.read(name, _LARGEST_FACT_BYTES)
        if content is not None or not read_missing:
            return content
        reading = self._account.admit_first(stands_for, share_bytes)
        if reading is None:
            content = self._wait_for(stands_for, name)
            if content is not None:
                return content
            reading = self._admitted(stands_for, share_bytes, name)
        with self._metered(reading):
            content = read()
            self._parts.create(name, content)  # while the reading is open: nobody that waits for it begins anew
        return content

    def _wait_for(self, stands_for: int, name: str) -> bytes | None:
        deadline = time.monotonic() + FACTS_SECONDS
        while (content := self._parts.read(name, _LARGEST_FACT_BYTES)) is None:
            if self._account.reader_of(stands_for) is None or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return content

    def _admitted(self, shard: int, share_bytes: int, name: str) -> Reading:
        reading = self._account.admit(shard, share_bytes)
        if reading is not None:
            return reading
        reader = self._account.reader_of(shard) or "another process"
        message = f"is being made by {reader}, and the budget does not allow to read for it twice"
        raise ConflictError.of("parts.busy", name, message, "wait for it, then run this part again")

    @contextlib.contextmanager
    def _metered(self, reading: Reading) -> Iterator[None]:
        """Limit what is read in the context to the reading's share, and record it exactly."""
        ledger = self._store.ledger
        ledger.expert_limit_bytes = ledger.usage().expert_bytes + reading.reserved_bytes
        try:
            yield
        except BaseException:
            with contextlib.suppress(MergePipeError, OSError):  # then it counts as its whole share
                self._spend(reading)
            raise
        self._spend(reading)

    def _spend(self, reading: Reading) -> None:
        usage = self._store.ledger.usage()
        self._account.spend(reading, usage - self._reported)
        self._reported = usage


def record_planning(parts: PartsPlace, plan: Plan, inputs: Inputs, usage: Usage) -> None:
    """Record what was read of `inputs` to make a plan, and leave indices of packed experts to the workers."""
    if not usage.expert_bytes:
        return
    costs = _index_costs(inputs, plan)
    sides = {model: inputs.checkpoints[model].encoded for model in costs}
    contents = {model: side.content for model, side in sides.items() if side is not None and side.is_read}
    account = PartsAccount(parts, "", is_exclusive=False)
    share = sum(costs[model] for model in contents)
    reading = account.admit(PLANNING, share)
    assert reading is not None
    account.spend(reading, usage)
    for model, content in contents.items():
        parts.create(_index_name(model), content)


def _index_costs(inputs: Inputs, plan: Plan) -> dict[int, int]:
    """Return the cost of the index of each packed model that the plan uses."""
    models = [inputs.expert_models[e] for e in sorted(used_experts(plan))]
    sides = {model: inputs.checkpoints[model].encoded for model in models}
    return {model: side.cost_bytes for model, side in sides.items() if side is not None}


def _index_name(model: int) -> str:
    return f"index-{model}"


def needs_content_ids(inputs: Inputs, plan: Plan) -> bool:
    """Whether samples of an expert are read to key randomness."""
    return bool(_unidentified(inputs, plan))


def _unidentified(inputs: Inputs, plan: Plan) -> list[int]:
    """Return the models whose content ids have to be read."""
    if not operator_named(inputs.recipe.operator.name).is_random:
        return []
    models = [inputs.expert_models[e] for e in sorted(used_experts(plan))]
    return [m for m in models if plan.models[m].content_id is None and inputs.checkpoints[m].content_id is None]


def _sample_cost(inputs: Inputs, plan: Plan) -> int:
    return sum(sample_cost_bytes(inputs.checkpoints[model]) for model in _unidentified(inputs, plan))


def _with_content_ids(inputs: Inputs, raw: bytes, where: Path | Location) -> Inputs:
    fields = parsed_record(raw, where)
    ids = dict(fields.each("content_ids", lambda entry: (entry.size("model"), entry.text("id"))))
    fields.done()
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
    if work.operator.granularity(operator_input(work, task)) == 1:
        return 0
    n_blocks = -(-task.base.n_elements // plan.block_elements)
    return PAGE_BYTES * n_blocks * len(task.experts)
