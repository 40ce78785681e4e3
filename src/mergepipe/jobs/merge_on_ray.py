"""Merge on a Ray cluster: plan here, make each file of the output as a task, publish here.

Tasks get the place of the parts and a number, and return a `PartReport`. The plan lies in that place, as tensors and
the account of what is read do: nothing large passes through Ray. Only this module imports it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mergepipe
from mergepipe.core.units import format_bytes
from mergepipe.engine.output_parts import split_sizes
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import (
    ConflictError,
    CorruptError,
    LimitError,
    MergePipeError,
    NotFoundError,
    OutputError,
    StorageError,
    library,
)
from mergepipe.jobs.parts import check_output, check_parts_place, make_part_of
from mergepipe.jobs.plan import PlanRequest, make_plan
from mergepipe.jobs.snapshots import is_snapshot_of
from mergepipe.options import MergeOptions, OutputOptions
from mergepipe.planning.plan import Plan
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import MergeReport, PartReport, Progress, ProgressCallback
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, open_inputs
from mergepipe.runs.merge_settings import MergeSettings, merge_settings
from mergepipe.runs.parts import open_output, record_planning
from mergepipe.runs.stored_plan import STORED_PLAN_NAME, plan_in_record, plan_key, plan_record
from mergepipe.snapshots.parts import JOB_NAME, PartsPlace
from mergepipe.snapshots.parts_places import job_at, parts_place, plan_digests_at
from mergepipe.snapshots.staging import check_free_space
from mergepipe.storage.contract import PLAN_BYTES
from mergepipe.storage.ledger import Usage
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

TASK_RETRIES: Final = 3
"""How often Ray runs a task again whose process or node was lost. What a task raises is never tried again."""
MOST_THREADS: Final = 8
"""Threads of a task by default, if every node has so many: reads of one file keep hardly more of them busy."""
MOST_MEMORY_BYTES: Final = 4 << 30
_STOP_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1
_CONNECT_SECONDS: Final = 5.0
_TASK: Final = "mergepipe.jobs.merge_on_ray:make_part_of_plan"


@dataclass(frozen=True, slots=True)
class PartTask:
    """The arguments of one task. The plan is stored in the place of the parts."""

    out: Path | Location
    plan_digest: str
    number: int
    n_parts: int
    options: OutputOptions


def make_part_of_plan(payload: bytes) -> bytes:
    """Make the part that a pickled `PartTask` names, and return the pickled report: what a task calls."""
    task: PartTask = pickle.loads(payload)
    plan = _plan_of_parts(task.out, task.plan_digest)
    if plan is None:
        message = f"{socket.gethostname()} sees no parts of it"
        hint = "mount the same storage under the same path on every node"
        raise NotFoundError.of("ray.not-shared", task.out, message, hint)
    out = task.out if isinstance(task.out, Path) else str(task.out)
    settings = merge_settings(task.options.common(MergeOptions, seed=plan.seed), out)
    return pickle.dumps(make_part_of(plan, (task.number, task.n_parts), settings, publishes=False))


def run_merge_on_ray(
    recipe: Location | RecipeText, request: PlanRequest, cluster: OutputOptions, settings: MergeSettings
) -> MergeReport:
    """Plan a recipe, and make the plan's output on a cluster; an unfinished merge of this very request is resumed."""
    check_parts_place(settings.place)
    store = Stores(settings.engine.connections)
    inputs = open_inputs(recipe, store, settings.options)
    place, key = settings.place.absolute(), plan_key(inputs, repr(request))
    check_output(place, inputs, force=settings.options.force)
    digests = () if settings.options.resume is False else plan_digests_at(place)
    plan = next(filter(None, (_plan_of_parts(place, digest, key) for digest in digests)), None)
    if plan is None:
        plan = make_plan(store, inputs, request, CatalogLink(settings.home))
    return run_plan_on_ray(plan, cluster, settings, key, (inputs, store.ledger.usage()))


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
    cluster: OutputOptions,
    settings: MergeSettings,
    key: str = "",
    planning: tuple[Inputs, Usage] | None = None,
) -> MergeReport:
    """Make the output of a plan as tasks of a cluster, and publish it. If that fails, what is made is kept.

    `key` is that of the request that the plan answers, and `planning` what was read of the inputs to make it.
    """
    check_parts_place(settings.place)
    place = settings.place.absolute()
    planned = open_output(plan, settings.options.shard_bytes, Stores(settings.engine.connections))
    settings.base_model_ids.check_names(planned.inputs.source_models)
    check_output(place, planned.inputs, force=settings.options.force)
    if is_snapshot_of(place, plan.digest):
        raise OutputError.of("output.exists", place, "is what this plan makes", "remove it to make it again")
    parts = parts_place(place, planned.job(place), Path())
    if settings.options.resume and not parts.exists:
        hint = "run without --resume to start over"
        raise NotFoundError.of("resume.nothing", place, "nothing to resume: no part of it is made", hint)
    with RayCluster(cluster.address) as ray:
        shape = task_shape(ray.nodes(), cluster.threads, cluster.memory_bytes)
        parts.open()
        parts.replace(STORED_PLAN_NAME, plan_record(plan, key))
        if planning is not None:
            record_planning(parts, plan, *planning)
        options = replace(cluster, threads=shape.threads, memory_bytes=shape.memory_bytes, catalog=False)
        task = PartTask(place, plan.digest, 0, len(parts.job.shards), options)
        with _kept(parts):
            read_bytes = planned.inputs.resolution.base_bytes + plan.planned_bytes
            _make_all(ray, shape, parts, task, read_bytes, settings.on_progress)
    with _kept(parts):
        report = make_part_of(plan, None, settings).merge
    if report is None:
        raise OutputError.of("output.exists", place, "was published by another process meanwhile", "look at that")
    return report


def _make_all(
    ray: RayCluster,
    shape: EngineOptions,
    parts: PartsPlace,
    task: PartTask,
    read_bytes: int,
    on_progress: ProgressCallback | None,
) -> None:
    """Make what is not made yet, each shard as a part of its own."""
    sizes = [nbytes for _, nbytes in parts.job.shards]
    missing = {shard for shard in range(len(sizes)) if parts.done(shard) is None}
    if isinstance(parts.out, Path):
        check_free_space(parts.out, sum(sizes[shard] for shard in missing))
    total_bytes = max(1, read_bytes + sum(sizes))
    earlier_bytes = total_bytes * (sum(sizes) - sum(sizes[shard] for shard in missing)) // max(1, sum(sizes))
    done_bytes, refused = earlier_bytes, list[ConflictError]()

    def take(outcome: bytes | MergePipeError | None) -> None:
        nonlocal done_bytes
        if isinstance(outcome, ConflictError) and outcome.code == "parts.busy":
            refused.append(outcome)
        elif isinstance(outcome, MergePipeError):
            raise outcome
        elif outcome is not None:
            report: PartReport = pickle.loads(outcome)
            done_bytes += report.base_bytes + report.expert_bytes + report.output_bytes
        if on_progress is not None:
            on_progress(Progress("merge", done_bytes, total_bytes, (), earlier_bytes))

    take(None)
    dealt = enumerate(split_sizes(sizes, task.n_parts), 1)
    numbers = [number for number, part in dealt if not missing.isdisjoint(part.shards)]
    ray.run(_TASK, [pickle.dumps(replace(task, number=number)) for number in numbers], shape, take)
    if refused:
        raise ConflictError(*(problem for error in refused for problem in error.problems))


@contextlib.contextmanager
def _kept(parts: PartsPlace) -> Iterator[None]:
    """Tell what becomes of the parts if the output is not published; remove their place if nothing is there."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError, MergePipeError):
            if set(parts.names()) <= {JOB_NAME, STORED_PLAN_NAME}:
                parts.remove()
            else:
                n_shards = len(parts.job.shards)
                n_done = sum(parts.done(shard) is not None for shard in range(n_shards))
                place = parts.path.name if isinstance(parts.out, Path) else f"what lies at {parts.out}"
                made = f"{n_done} of {n_shards} files are made"
                error.add_note(f"{made}: the same command resumes there; to give up, remove {place}")
        raise


# --- the cluster ---


def task_shape(nodes: Sequence[EngineOptions], threads: int | None, memory_bytes: int | None) -> EngineOptions:
    """Choose what Ray reserves for a task, so that every node with a processor is used; half of its memory is left.

    `nodes` are what each node offers.
    """
    offering = [node for node in nodes if node.threads > 0]
    if not offering:
        message = "no node of the cluster offers a processor"
        raise LimitError.of("ray.resources", "Ray", message, "add one with `ray start --address`")
    n_threads = min(MOST_THREADS, *(node.threads for node in offering)) if threads is None else threads
    if memory_bytes is None:
        shares = [node.memory_bytes // 2 // max(1, node.threads // n_threads) for node in offering]
        memory_bytes = max(1, min(MOST_MEMORY_BYTES, *shares))
    if not any(node.threads >= n_threads and node.memory_bytes >= memory_bytes for node in offering):
        largest = max(offering, key=lambda node: (node.threads, node.memory_bytes))
        message = (
            f"a task is to have {n_threads} threads and {format_bytes(memory_bytes)} of memory, no node has that: the"
            f" largest has {largest.threads} and {format_bytes(largest.memory_bytes)}"
        )
        raise LimitError.of("ray.resources", "Ray", message, "lower --threads or --memory")
    return EngineOptions(n_threads, memory_bytes)


class RayCluster:
    """A connection to a Ray cluster while its context lasts: to the one at `address`, else to that which runs here.

    Where none runs, one is started on this machine and stopped at the end. A connection that this process has already
    is used, and stays.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._ray = library("ray", "--executor ray", "ray")
        self._is_ours = False

    def __enter__(self) -> RayCluster:
        if not self._ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
            handler = signal.getsignal(signal.SIGTERM)
            try:
                self._connect()
            finally:  # Ray puts a handler of its own there
                if handler is not None and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, handler)
            self._is_ours = True
        return self

    def _connect(self) -> None:
        host, _, port = (self._address or "").rpartition(":")
        try:
            if port.isdecimal() and "/" not in host:  # else it is none of a host and a port: `auto`, `ray://`
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
            self._ray.init(
                address=self._address, namespace="mergepipe", include_dashboard=False, log_to_driver=False,
                configure_logging=False, logging_level="ERROR",
            )  # fmt: skip
        except (OSError, OverflowError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            where = self._address or os.environ.get("RAY_ADDRESS") or "Ray"
            reason = str(error).strip().partition("\n")[0]
            message = f"no cluster could be reached: {reason}"
            hint = "check --address, and `ray status` on a node; after a crash, `ray stop` forgets the cluster"
            raise NotFoundError.of("ray.unreachable", where, message, hint) from error

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self._ray.shutdown()

    def nodes(self) -> tuple[EngineOptions, ...]:
        """Return what the living nodes offer to tasks."""
        offers = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return tuple(EngineOptions(int(offer.get("CPU", 0)), int(offer.get("memory", 0))) for offer in offers)

    def run(
        self,
        function: str,
        payloads: Sequence[bytes],
        shape: EngineOptions,
        on_outcome: Callable[[bytes | MergePipeError | None], None],
    ) -> None:
        """Call `function` (`package.module:name`) with each payload, on any node; payloads and results are small.

        `on_outcome` is called with what each task returned or raised, as they end, and with None about ten times a
        second. What it raises cancels the other tasks, and they have ended when it is raised here.
        """
        task = self._ray.remote(_task()).options(
            num_cpus=shape.threads, memory=shape.memory_bytes, max_retries=TASK_RETRIES, retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        pending = [task.remote(mergepipe.__version__, function, payload) for payload in payloads]
        try:
            while pending:
                ended, pending = self._ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
                on_outcome(None)
                for reference in ended:
                    on_outcome(self._outcome(reference))
        except BaseException:
            self._cancel(pending)
            raise

    def _outcome(self, reference: Any) -> bytes | MergePipeError:
        try:
            outcome: bytes | str = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MergePipeError):
                return error.cause
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            message = f"processes or nodes of a task were lost {TASK_RETRIES + 1} times: {reason}"
            hint = "check `ray status`, or lower --memory; then run the same command again"
            raise StorageError.of("ray.lost", "Ray", message, hint) from error
        if isinstance(outcome, bytes):
            return outcome
        message = f"{outcome}, this is version {mergepipe.__version__}"
        return ConflictError.of("ray.version", "mergepipe", message, "install the same version on all nodes")

    def _cancel(self, references: list[Any]) -> None:
        """Interrupt tasks, and end the processes of those that go on."""
        for is_forced, seconds in ((False, _STOP_SECONDS), (True, _KILL_SECONDS)):
            for reference in references:
                with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                    self._ray.cancel(reference, force=is_forced)
            if references:
                _, references = self._ray.wait(references, num_returns=len(references), timeout=seconds)


def _task() -> Callable[[str, str, bytes], bytes | str]:
    """Return what a task does: a nested function, which travels by value and so says what its node lacks in words."""

    def call(version: str, function: str, payload: bytes) -> bytes | str:
        import socket
        from importlib import import_module

        try:
            installed = import_module("mergepipe").__version__
        except ModuleNotFoundError:
            return f"it is not installed on {socket.gethostname()}"
        if installed != version:
            return f"version {installed} is installed on {socket.gethostname()}"
        module, _, name = function.partition(":")
        result: bytes = getattr(import_module(module), name)(payload)
        return result

    return call
