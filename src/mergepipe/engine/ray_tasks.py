"""Run functions of this package as tasks of a Ray cluster. Nothing large passes through it; only this imports ray."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import mergepipe
from mergepipe.errors import (
    ConflictError,
    LimitError,
    MergePipeError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)

TASK_RETRIES: Final = 3
"""How often Ray runs a task again whose process or node was lost. What a task raises is never tried again."""
MOST_THREADS: Final = 8
"""Threads of a task by default, if every node has so many: reads of one file keep hardly more of them busy."""
MOST_MEMORY_BYTES: Final = 4 << 30
STOP_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1
_HEAD_SECONDS: Final = 5.0
_HEAD_LOOKS: Final = 3
"""The head is asked for so often, and is lost when that many times in a row it was not there. After a minute without it
Ray ends this process, with a text of its own."""

Outcome = bytes | MergePipeError
OnOutcome = Callable[[Outcome | None], None]


@dataclass(frozen=True, slots=True)
class TaskShape:
    """The resources that Ray reserves for one task."""

    threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """The resources that a node of a cluster offers to tasks."""

    threads: int
    memory_bytes: int

    def slots(self, shape: TaskShape) -> int:
        """Return how many tasks run there at once."""
        return min(self.threads // shape.threads, self.memory_bytes // shape.memory_bytes)


def task_shape(nodes: Sequence[ClusterNode], threads: int | None, memory_bytes: int | None) -> TaskShape:
    """Choose what a task gets, so that every node with a processor is used; half of a node's memory is left."""
    offering = [node for node in nodes if node.threads > 0]
    if not offering:
        message = "no node of the cluster offers a processor"
        raise LimitError.of("ray.resources", "Ray", message, "add one with `ray start --address`")
    n_threads = min(MOST_THREADS, *(node.threads for node in offering)) if threads is None else threads
    if memory_bytes is None:
        shares = [node.memory_bytes // 2 // max(1, node.threads // n_threads) for node in offering]
        memory_bytes = max(1, min(MOST_MEMORY_BYTES, *shares))
    shape = TaskShape(n_threads, memory_bytes)
    if not any(node.slots(shape) for node in offering):
        largest = max(offering, key=lambda node: (node.threads, node.memory_bytes))
        message = (
            f"a task is to have {n_threads} threads and {memory_bytes} bytes of memory, and no node offers that: the "
            f"largest has {largest.threads} and {largest.memory_bytes}"
        )
        raise LimitError.of("ray.resources", "Ray", message, "lower --threads or --memory")
    return shape


class RayCluster:
    """A connection to a Ray cluster while its context lasts: to the one at `address`, else to that which runs here.

    Where none runs, one is started on this machine and stopped at the end. A connection that this process has already
    is used, and stays.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        try:
            import ray
        except ImportError as error:
            message = "Ray is not installed"
            raise UnsupportedError.of("extra.missing", "--executor ray", message, "install mergepipe[ray]") from error
        self._ray: Any = ray
        self._is_ours = False
        self._preparing: list[Any] = []
        self._is_lost = False

    def __enter__(self) -> RayCluster:
        if not self._ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
            with _kept_handler(signal.SIGTERM):
                self._connect()
            self._is_ours = True
        return self

    def _connect(self) -> None:
        if self._address is not None and not _Head(self._address).answers():
            raise self._no_cluster("nothing answers there")
        try:
            self._ray.init(
                address=self._address, namespace="mergepipe", include_dashboard=False, log_to_driver=False,
                configure_logging=False, logging_level="ERROR",
            )  # fmt: skip
        except (
            ConnectionError, RuntimeError, ValueError, TimeoutError, self._ray.exceptions.RayError,
        ) as error:  # fmt: skip
            raise self._no_cluster(str(error).strip().partition("\n")[0]) from error

    def _no_cluster(self, reason: str) -> MergePipeError:
        where = self._address or os.environ.get("RAY_ADDRESS") or "Ray"
        hint = "check --address, and `ray status` on a node; after a crash, `ray stop` forgets the cluster"
        return NotFoundError.of("ray.unreachable", where, f"no cluster could be reached: {reason}", hint)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ours and not self._is_lost:
            self._ray.shutdown()

    def nodes(self) -> tuple[ClusterNode, ...]:
        """Return what the living nodes offer."""
        offers = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return tuple(ClusterNode(int(offer.get("CPU", 0)), int(offer.get("memory", 0))) for offer in offers)

    def prepare(self, function: str, n_tasks: int, shape: TaskShape) -> None:
        """Start processes for tasks that are run later, and call `function` in them; nobody waits for that."""
        task = self._task_of(shape)
        self._preparing = [task.remote(mergepipe.__version__, function, b"") for _ in range(n_tasks)]

    def run(self, function: str, payloads: Sequence[bytes], shape: TaskShape, on_outcome: OnOutcome) -> None:
        """Call `function` (`package.module:name`) with each payload, on any node; payloads and results are small.

        `on_outcome` is called with what each task returned or raised, as they end, and with None about ten times a
        second. What it raises cancels the other tasks, and they have ended when it is raised here.
        """
        task = self._task_of(shape)
        pending = [task.remote(mergepipe.__version__, function, payload) for payload in payloads]
        head = _Head(self._ray.get_runtime_context().gcs_address)
        try:
            while pending:
                ended, pending = self._ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
                on_outcome(None)
                if head.is_lost():
                    raise self._lost_head(head)
                for reference in ended:
                    on_outcome(self._outcome(reference))
        except BaseException:
            if not self._is_lost:
                self._cancel(pending)
            raise

    def _lost_head(self, head: _Head) -> MergePipeError:
        """Give the cluster up: nothing more can be asked of it, not even to stop."""
        self._is_lost = True
        message = f"the head of the cluster at {head.address} does not answer any more"
        return StorageError.of("ray.lost", "Ray", message, "start a cluster again, then run the same command")

    def _task_of(self, shape: TaskShape) -> Any:
        return self._ray.remote(_task()).options(
            num_cpus=shape.threads, memory=shape.memory_bytes, max_retries=TASK_RETRIES, retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )  # fmt: skip

    def _outcome(self, reference: Any) -> Outcome:
        try:
            content, is_error = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # a mistake of ours: as if it were raised here
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            message = f"processes or nodes of a task were lost {TASK_RETRIES + 1} times: {reason}"
            hint = "check `ray status`, or lower --memory; then run the same command again"
            raise StorageError.of("ray.lost", "Ray", message, hint) from error
        if not is_error:
            outcome: Outcome = content
            return outcome
        if isinstance(content, str):
            return _other_version(content)
        raised = pickle.loads(content)
        assert isinstance(raised, MergePipeError)
        return raised

    def _cancel(self, references: list[Any]) -> None:
        """Interrupt tasks, and end the processes of those that go on."""
        for is_forced, seconds in ((False, STOP_SECONDS), (True, _KILL_SECONDS)):
            for reference in references:
                with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                    self._ray.cancel(reference, force=is_forced)
            if references:
                _, references = self._ray.wait(references, num_returns=len(references), timeout=seconds)


class _Head:
    """Looks from time to time whether the head of a cluster still takes connections."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._next_look = time.monotonic() + _HEAD_SECONDS
        self._n_missed = 0

    def is_lost(self) -> bool:
        """Whether it was not there so often that it is lost; looks if it is time to."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _HEAD_SECONDS
            self._n_missed = 0 if self.answers() else self._n_missed + 1
        return self._n_missed >= _HEAD_LOOKS

    def answers(self) -> bool:
        """Whether it takes connections; also where its address is none of a host and a port (`auto`, `ray://`)."""
        host, _, port = self.address.rpartition(":")
        if not port.isdecimal() or "/" in host:
            return True
        try:
            socket.create_connection((host.strip("[]"), int(port)), _HEAD_SECONDS).close()
        except (OSError, OverflowError):
            return False
        return True


def _task() -> Callable[[str, str, bytes], tuple[bytes | str, bool]]:
    """Return what a task does: a nested function, which travels by value and so says what its node lacks.

    It returns a result, or with True the pickled error, or in words which version is installed there.
    """

    def call(version: str, function: str, payload: bytes) -> tuple[bytes | str, bool]:
        import pickle
        import socket
        from importlib import import_module

        try:
            installed = import_module("mergepipe").__version__
        except ModuleNotFoundError:
            return f"it is not installed on {socket.gethostname()}", True
        if installed != version:
            return f"version {installed} is installed on {socket.gethostname()}", True
        module, _, name = function.partition(":")
        try:
            result: bytes = getattr(import_module(module), name)(payload)
        except import_module("mergepipe.errors").MergePipeError as error:
            return pickle.dumps(error), True
        return result, False

    return call


def _other_version(installed: str) -> MergePipeError:
    message = f"{installed}, this is version {mergepipe.__version__}"
    return ConflictError.of("ray.version", "mergepipe", message, "install the same version on all nodes")


@contextlib.contextmanager
def _kept_handler(number: signal.Signals) -> Iterator[None]:
    """Put this process's handler of a signal back, in place of what is installed in the context."""
    handler = signal.getsignal(number)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)
