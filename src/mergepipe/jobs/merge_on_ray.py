"""Merge on a Ray cluster: plan here, make the parts of the plan as Ray tasks, publish here.

Tasks get the place of the parts and a number, and return a `PartReport`. The plan lies in that place, as
tensors and the account of what is read do.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mergepipe.engine.ray_tasks import Outcome, RayCluster, TaskShape, task_shape
from mergepipe.engine.work import plan_output, split
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, NotFoundError, OutputError
from mergepipe.jobs.parts import PartChoice, check_output, run_part
from mergepipe.jobs.plan import PlanRequest, make_plan
from mergepipe.options import DEFAULT_SHARD_BYTES, OutputOptions
from mergepipe.planning.plan import Plan
from mergepipe.recipes.fields import Strictness
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import MergeReport, PartReport, Progress, ProgressCallback
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, open_inputs
from mergepipe.runs.parts import PlannedOutput, open_output, record_planning
from mergepipe.runs.progress import Resume
from mergepipe.runs.settings import MergeSettings, output_place, run_settings
from mergepipe.runs.snapshots import is_snapshot_of
from mergepipe.runs.stored_plan import STORED_PLAN_NAME, plan_in_record, plan_key, plan_record
from mergepipe.snapshots.parts import JOB_NAME
from mergepipe.snapshots.parts_places import job_at, parts_place, plan_digests_at
from mergepipe.snapshots.staging import check_free_space
from mergepipe.storage.ledger import Ledger, Usage
from mergepipe.storage.limits import PLAN_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

PARTS_PER_SLOT: Final = 4
"""How many parts a place for a task makes: so that all end at about the same time, and a lost one costs little."""
SMALLEST_SHARD_BYTES: Final = DEFAULT_SHARD_BYTES // 16
_TASK: Final = "mergepipe.jobs.merge_on_ray:make_part_of_plan"
_PREPARATION: Final = "mergepipe.jobs.merge_on_ray:load_kernels"


@dataclass(frozen=True, slots=True)
class PartTask:
    """The arguments of one task. The plan is stored in the place of the parts."""

    out: Path | Location
    plan_digest: str
    number: int
    n_parts: int
    strictness: Strictness
    options: OutputOptions


def make_part_of_plan(payload: bytes) -> bytes:
    """Make the part that a pickled `PartTask` names, and return the pickled report: what a task calls."""
    task: PartTask = pickle.loads(payload)
    plan = _plan_of_parts(task.out, task.plan_digest)
    if plan is None:
        message = f"{socket.gethostname()} sees no parts of it"
        hint = "mount the same storage under the same path on every node"
        raise NotFoundError.of("ray.not-shared", task.out, message, hint)
    settings = run_settings(task.options, plan.seed)
    staged, settings = output_place(
        task.out if isinstance(task.out, Path) else str(task.out), settings, task.options.home
    )
    report = run_part(
        plan, staged, PartChoice(task.number, task.n_parts, publishes=False),
        replace(settings, strictness=task.strictness),
        started=time.perf_counter(), on_progress=None,
    )  # fmt: skip
    return pickle.dumps(report)


def load_kernels(payload: bytes) -> bytes:
    """Import what every part needs, so that the first part of a process does not wait for it: a task as well."""
    import mergepipe.kernels.merge
    import mergepipe.kernels.reduce

    del mergepipe
    return payload


def run_merge_on_ray(
    recipe: Location | RecipeText,
    out: Path,
    request: PlanRequest,
    cluster: OutputOptions,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Plan a recipe, and make the plan's output on a cluster; an unfinished merge of this very request is resumed."""
    store = Stores(settings=settings.engine.remote)
    inputs = open_inputs(recipe, store, request.allow_dropped, strictness=settings.strictness)
    place = settings.destination or out.absolute()
    check_output(place, inputs, force=settings.force)
    key = plan_key(inputs, repr(request))

    def decide() -> PlannedOutput:
        plan = None if settings.resume is Resume.NEVER else _unfinished_plan(place, key)
        if plan is None:
            with closing(CatalogLink(settings.home)) as link:
                plan = make_plan(store, inputs, request, link)
        return _opened(plan, settings)

    return _publish(decide, inputs, out, cluster, settings, store.ledger, key, started, on_progress)


def _unfinished_plan(out: Path | Location, key: str) -> Plan | None:
    """Return the plan that an interrupted run was given for the same request."""
    plans = (_plan_of_parts(out, digest, key) for digest in plan_digests_at(out))
    return next((plan for plan in plans if plan is not None), None)


def _plan_of_parts(out: Path | Location, plan_digest: str, key: str | None = None) -> Plan | None:
    """Return the plan that lies with the parts of an output, if it answers the request `key`, if one is given."""
    with contextlib.suppress(CorruptError, ConflictError):
        job = job_at(out, plan_digest)
        if job is not None:
            parts = parts_place(out, job, Path())
            raw = parts.read(STORED_PLAN_NAME, PLAN_BYTES)
            return plan_in_record(raw, key, Location.of(parts.path / STORED_PLAN_NAME))
    return None


def run_plan_on_ray(
    plan: Plan,
    out: Path,
    cluster: OutputOptions,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Make the output of a plan as tasks of a cluster, and publish it. If that fails, what is made is kept."""
    planned = _opened(plan, settings)
    settings.base_model_ids.check_names(planned.inputs.leaf_models)
    check_output(settings.destination or out.absolute(), planned.inputs, force=settings.force)
    return _publish(lambda: planned, planned.inputs, out, cluster, settings, Ledger(), "", started, on_progress)


def _opened(plan: Plan, settings: MergeSettings) -> PlannedOutput:
    return open_output(plan, DEFAULT_SHARD_BYTES, Stores(settings=settings.engine.remote))


def _publish(
    decide: Callable[[], PlannedOutput],
    inputs: Inputs,
    out: Path,
    cluster: OutputOptions,
    settings: MergeSettings,
    ledger: Ledger,
    key: str,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Decide on a plan while the processes of tasks start, make its parts, and publish its output.

    `ledger` counts what is read of `inputs` to decide, `key` is the request that the plan answers.
    """
    place = settings.destination or out.absolute()
    with contextlib.ExitStack() as stack:
        with RayCluster(cluster.address) as ray:
            shape = task_shape(ray.nodes(), cluster.threads, cluster.memory_bytes)
            n_slots = sum(node.slots(shape) for node in ray.nodes())
            ray.prepare(_PREPARATION, n_slots, shape)
            planned = decide()
            if is_snapshot_of(place, planned.plan.digest):
                raise OutputError.of("output.exists", place, "is what this plan makes", "remove it to make it again")
            run = _RayRun(planned, place, settings, cluster, shape, n_slots, on_progress)
            shard_bytes = run.open_parts(key, inputs, ledger.usage())
            stack.enter_context(run.kept())
            run.make_all(ray)
        settings = replace(settings, shard_bytes=shard_bytes)
        choice = PartChoice(None, 1, finishes=True)
        report = run_part(planned.plan, out, choice, settings, started=started, on_progress=on_progress).merge
    if report is None:
        raise OutputError.of("output.exists", place, "was published by another process meanwhile", "look at that")
    return report


class _RayRun:
    """Makes all files of one output as tasks of a cluster."""

    def __init__(
        self,
        planned: PlannedOutput,
        out: Path | Location,
        settings: MergeSettings,
        cluster: OutputOptions,
        shape: TaskShape,
        n_slots: int,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._planned = planned
        self._out = out
        self._settings = settings
        self._cluster = cluster
        self._shape = shape
        self._n_slots = n_slots
        self._on_progress = on_progress
        self._shard_bytes = DEFAULT_SHARD_BYTES
        self._parts = parts_place(out, planned.job(out), Path())
        self._done_bytes = self._earlier_bytes = 0
        self._total_bytes = 1
        self._refused: list[ConflictError] = []

    def open_parts(self, key: str, opened: Inputs, planning: Usage) -> int:
        """Make the place of the parts with the plan and what was read for it, and return its files' greatest size."""
        if self._settings.resume is Resume.REQUIRED and not self._parts.exists:
            hint = "run without --resume to start over"
            raise NotFoundError.of("resume.nothing", self._out, "nothing to resume: no part of it is made", hint)
        self._choose_shards(self._cluster.shard_bytes)
        self._parts.open()
        self._parts.replace(STORED_PLAN_NAME, plan_record(self._planned.plan, key))
        record_planning(self._parts, self._planned.plan, opened, planning)
        return self._shard_bytes

    def _choose_shards(self, shard_bytes: int | None) -> None:
        """Lay out files of the size that was given or is in use already, else as many as suit the cluster."""
        inputs = self._planned.inputs
        sizes = shard_sizes(self._planned.output.total_bytes, self._n_slots) if shard_bytes is None else (shard_bytes,)
        used = job_at(self._out, self._planned.plan.digest)
        for size in sizes:
            planned = replace(self._planned, output=plan_output(inputs.resolution.tasks, size, inputs.base.components))
            if size == sizes[0] or planned.job(self._out) == used:
                self._planned, self._shard_bytes = planned, size
        self._parts = parts_place(self._out, self._planned.job(self._out), Path())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Tell what becomes of the parts if the output is not published; remove their place if nothing is there."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError, MergePipeError):
                if set(self._parts.names()) <= {JOB_NAME, STORED_PLAN_NAME}:
                    self._parts.remove()
                else:
                    error.add_note(self._kept_note())
            raise

    def _kept_note(self) -> str:
        n_shards = len(self._parts.job.shards)
        n_done = sum(self._parts.done(shard) is not None for shard in range(n_shards))
        place = self._parts.path.name if isinstance(self._out, Path) else f"what lies at {self._out}"
        return f"{n_done} of {n_shards} files are made: the same command resumes there; to give up, remove {place}"

    def make_all(self, ray: RayCluster) -> None:
        """Make what is not made yet."""
        sizes = [nbytes for _, nbytes in self._parts.job.shards]
        done = [self._parts.done(shard) is not None for shard in range(len(sizes))]
        missing_bytes = sum(nbytes for nbytes, is_done in zip(sizes, done, strict=True) if not is_done)
        if isinstance(self._out, Path):
            check_free_space(self._out, missing_bytes)
        reads = self._planned.inputs.resolution.base_bytes + self._planned.plan.planned_bytes
        self._total_bytes = max(1, reads + sum(sizes))
        self._earlier_bytes = self._total_bytes * (sum(sizes) - missing_bytes) // max(1, sum(sizes))
        n_parts = max(1, min(len(sizes), PARTS_PER_SLOT * self._n_slots))
        numbers = [
            number
            for number, part in enumerate(split(self._planned.output, n_parts), 1)
            if not all(done[shard] for shard in part.shards)
        ]
        self._tick()
        ray.run(_TASK, [self._payload(number, n_parts) for number in numbers], self._shape, self._take)
        if self._refused:
            raise ConflictError(*(problem for error in self._refused for problem in error.problems))

    def _payload(self, number: int, n_parts: int) -> bytes:
        options = OutputOptions(
            threads=self._shape.threads, memory_bytes=self._shape.memory_bytes, catalog=False,
            connections=self._settings.engine.remote.connections, home=self._cluster.home,
            force=self._settings.force, shard_bytes=self._shard_bytes,
        )  # fmt: skip
        task = PartTask(self._out, self._planned.plan.digest, number, n_parts, self._settings.strictness, options)
        return pickle.dumps(task)

    def _take(self, outcome: Outcome | None) -> None:
        match outcome:
            case bytes():
                report: PartReport = pickle.loads(outcome)
                self._done_bytes += report.base_bytes + report.expert_bytes + report.output_bytes
            case MergePipeError():
                if not isinstance(outcome, ConflictError) or outcome.code != "parts.busy":
                    raise outcome
                self._refused.append(outcome)
        self._tick()

    def _tick(self) -> None:
        if self._on_progress is not None:
            done_bytes = self._earlier_bytes + self._done_bytes
            self._on_progress(Progress("merge", done_bytes, self._total_bytes, (), self._earlier_bytes))


def shard_sizes(total_bytes: int, n_slots: int) -> tuple[int, ...]:
    """Return the sizes of files that may suit a cluster, the most suitable first: the default, halved so many times.

    Law: an output that is small for the cluster is cut into several files a slot, as long as they are not small.
    """
    sizes = [DEFAULT_SHARD_BYTES]
    while sizes[-1] > SMALLEST_SHARD_BYTES:
        sizes.append(sizes[-1] // 2)
    enough = [size for size in sizes if total_bytes >= size * PARTS_PER_SLOT * n_slots]
    best = max(enough, default=sizes[-1])
    return (best, *(size for size in sizes if size != best))
