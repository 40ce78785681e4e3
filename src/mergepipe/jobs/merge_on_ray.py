"""Merge on a Ray cluster: plan here, make the parts of the plan as Ray tasks, publish here.

Tasks get the place of the parts directory and a number, and return a `PartReport`. The plan lies in the parts
directory, as tensors and the account of what is read do.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mergepipe.engine.executors.ray_tasks import Outcome, RayCluster, TaskShape, task_shape
from mergepipe.engine.work import plan_output, split
from mergepipe.errors import MergePipeError, NotFoundError, OutputError, UnsupportedError
from mergepipe.jobs.parts import REPEATABLE, PartChoice, run_part
from mergepipe.jobs.plan import PlanRequest, make_plan
from mergepipe.options import DEFAULT_SHARD_BYTES, RunOptions
from mergepipe.planning.plan import Plan
from mergepipe.recipes.parse.yaml_source import RecipeText
from mergepipe.reports import MergeReport, PartReport, Progress, ProgressCallback
from mergepipe.runs.budget.probe import Prober
from mergepipe.runs.inputs.opened import open_inputs
from mergepipe.runs.merge_run import MergeSettings
from mergepipe.runs.parts import PlannedOutput, open_output
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.runs.recovery.resume import Resume
from mergepipe.runs.settings import ClusterRequest, run_settings
from mergepipe.runs.snapshots import is_snapshot_of
from mergepipe.runs.stored_plan import STORED_PLAN_NAME, plan_key, store_plan, stored_plan
from mergepipe.snapshots.parts_directory import PartsDirectory, parts_directory, read_job
from mergepipe.snapshots.parts_place import JOB_NAME
from mergepipe.snapshots.staging import check_free_space, check_target
from mergepipe.storage import owned
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

PARTS_PER_SLOT: Final = 4
"""How many parts a place for a task makes: so that all end at about the same time, and a lost one costs little."""
SMALLEST_SHARD_BYTES: Final = DEFAULT_SHARD_BYTES // 16
_TASK: Final = "mergepipe.jobs.merge_on_ray:make_part_of_plan"


@dataclass(frozen=True, slots=True)
class PartTask:
    """The arguments of one task. The plan is stored in the parts directory."""

    out: Path
    plan_digest: str
    number: int
    n_parts: int
    shard_bytes: int
    force: bool
    resume: Resume
    options: RunOptions


def make_part_of_plan(payload: bytes) -> bytes:
    """Make the part that a pickled `PartTask` names, and return the pickled report: what a task calls.

    Raises:
        NotFoundError: `ray.not-shared`, this machine does not see the parts directory.
        MergePipeError: as `run_part`.
    """
    task: PartTask = pickle.loads(payload)
    directory = parts_directory(task.out, task.plan_digest)
    plan = stored_plan(directory, None)
    if plan is None:
        message = f"{socket.gethostname()} sees no {directory.name} beside it"
        hint = "mount the same storage under the same path on every node"
        raise NotFoundError.of("ray.not-shared", task.out, message, hint)
    settings = run_settings(task.options, plan.seed, force=task.force, shard_bytes=task.shard_bytes)
    report = run_part(
        plan, task.out, PartChoice(task.number, task.n_parts, publishes=False), replace(settings, resume=task.resume),
        started=time.perf_counter(), on_progress=None,
    )  # fmt: skip
    return pickle.dumps(report)


def run_merge_on_ray(
    recipe: Location | RecipeText,
    out: Path,
    request: PlanRequest,
    cluster: ClusterRequest,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Plan a recipe, and make the plan's output on a cluster; an unfinished merge of this very request is resumed.

    Raises:
        MergePipeError: as `run_plan_on_ray` and `make_plan`.
    """
    store = Stores(settings=settings.engine.remote)
    inputs = open_inputs(recipe, store, request.allow_dropped, strictness=settings.strictness)
    key = plan_key(inputs, repr(request))
    plan = None if settings.resume is Resume.NEVER else _unfinished_plan(out, key)
    if plan is None:
        speeds = request.pricing.speeds(inputs, store, settings.home, settings.engine.threads)
        with closing(CatalogLink(settings.home)) as link:
            prober = Prober(store, settings.engine, lambda: None) if request.probes else None
            plan = make_plan(store, inputs, request, link, speeds=speeds, prober=prober)
    return run_plan_on_ray(plan, out, cluster, settings, started=started, on_progress=on_progress, key=key)


def _unfinished_plan(out: Path, key: str) -> Plan | None:
    """Return the plan that an interrupted run was given for the same request."""
    mark = parts_directory(out, "").name
    with contextlib.suppress(OSError):
        for name, _ in owned.list_folder(out.absolute().parent):
            if name.startswith(mark) and (plan := stored_plan(out.absolute().parent / name, key)) is not None:
                return plan
    return None


def run_plan_on_ray(
    plan: Plan,
    out: Path,
    cluster: ClusterRequest,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
    key: str = "",
) -> MergeReport:
    """Make the output of a plan as tasks of a cluster, and publish it. `key` is the request that the plan answers.

    If that fails, what is made is kept in the parts directory.

    Raises:
        UnsupportedError: `ray.extra`, Ray is not installed; `parts.reuse`; `ray.bucket`.
        NotFoundError: `ray.connect`, no cluster; `ray.not-shared`, a node does not see OUT; `resume.nothing`.
        LimitError: `ray.resources`; `parts.budget`, the budget does not allow to read again what a lost worker read.
        ConflictError: `ray.version`, a node has another version; `parts.other-job`.
        StorageError: `ray.lost`.
        MergePipeError: as `run_part`, from any task.
    """
    if settings.destination is not None:
        message = "tasks of Ray make their files beside it, in a folder"
        hint = "merge into a shared folder, then push it"
        raise UnsupportedError.of("ray.bucket", settings.destination, message, hint)
    out = out.absolute()
    planned = open_output(plan, DEFAULT_SHARD_BYTES, Stores(settings=settings.engine.remote))
    check_target(out, [checkpoint.path for checkpoint in planned.inputs.checkpoints], force=settings.force)
    if is_snapshot_of(out, plan.digest):
        raise OutputError.of("output.exists", out, "is what this plan makes", "remove it to make it again")
    with contextlib.ExitStack() as stack:
        with RayCluster(cluster.address) as ray:
            shape = task_shape(ray.nodes(), cluster.threads, cluster.memory_bytes)
            n_slots = sum(node.slots(shape) for node in ray.nodes())
            run = _RayRun(planned, out, settings, shape, n_slots, on_progress)
            shard_bytes = run.open_parts(cluster.shard_bytes, key)
            stack.enter_context(run.kept())
            run.make_all(ray)
        settings = replace(settings, shard_bytes=shard_bytes)
        choice = PartChoice(None, 1, finishes=True)
        report = run_part(plan, out, choice, settings, started=started, on_progress=on_progress).merge
    if report is None:
        raise OutputError.of("output.exists", out, "was published by another process meanwhile", "look at that")
    return report


class _RayRun:
    """Makes all files of one output as tasks of a cluster."""

    def __init__(
        self,
        planned: PlannedOutput,
        out: Path,
        settings: MergeSettings,
        shape: TaskShape,
        n_slots: int,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._planned = planned
        self._out = out
        self._settings = settings
        self._shape = shape
        self._n_slots = n_slots
        self._on_progress = on_progress
        self._shard_bytes = DEFAULT_SHARD_BYTES
        self._parts = PartsDirectory(out, planned.job(out))
        self._done_bytes = self._earlier_bytes = 0
        self._total_bytes = 1
        self._refused: list[MergePipeError] = []

    def open_parts(self, shard_bytes: int | None, key: str) -> int:
        """Make the parts directory with the plan in it, and return the size of files that it is for."""
        if self._settings.resume is Resume.REQUIRED and not self._parts.exists:
            hint = "run without --resume to start over"
            raise NotFoundError.of("resume.nothing", self._out, "nothing to resume: no part of it is made", hint)
        self._choose_shards(shard_bytes)
        self._parts.open()
        store_plan(self._parts.path, key, self._planned.plan)
        return self._shard_bytes

    def _choose_shards(self, shard_bytes: int | None) -> None:
        """Lay out files of the size that was given or is in use already, else as many as suit the cluster."""
        tasks = self._planned.inputs.resolution.tasks
        sizes = shard_sizes(self._planned.output.total_bytes, self._n_slots) if shard_bytes is None else (shard_bytes,)
        used = read_job(self._parts.path)
        for size in sizes:
            planned = replace(self._planned, output=plan_output(tasks, size))
            if size == sizes[0] or planned.job(self._out) == used:
                self._planned, self._shard_bytes = planned, size
        self._parts = PartsDirectory(self._out, self._planned.job(self._out))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Tell what becomes of the parts if the output is not published; remove their directory if nothing is there."""
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
        place = self._parts.path.name
        return f"{n_done} of {n_shards} files are made: the same command resumes there; to give up, remove {place}"

    def make_all(self, ray: RayCluster) -> None:
        """Make what is not made yet.

        Raises:
            LimitError, ConflictError: some files could not be read for again; all others are made first.
        """
        sizes = [nbytes for _, nbytes in self._parts.job.shards]
        done = [self._parts.done(shard) is not None for shard in range(len(sizes))]
        missing_bytes = sum(nbytes for nbytes, is_done in zip(sizes, done, strict=True) if not is_done)
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
            raise type(self._refused[0])(*(problem for error in self._refused for problem in error.problems))

    def _payload(self, number: int, n_parts: int) -> bytes:
        options = RunOptions(
            threads=self._shape.threads, memory_bytes=self._shape.memory_bytes, catalog=False,
            connections=self._settings.engine.remote.connections,
        )  # fmt: skip
        task = PartTask(
            self._out, self._planned.plan.digest, number, n_parts, self._shard_bytes, self._settings.force,
            self._settings.resume, options,
        )  # fmt: skip
        return pickle.dumps(task)

    def _take(self, outcome: Outcome | None) -> None:
        match outcome:
            case bytes():
                report: PartReport = pickle.loads(outcome)
                self._done_bytes += report.base_bytes + report.expert_bytes + report.output_bytes
            case MergePipeError():
                if outcome.code not in REPEATABLE:
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
