"""Run the pipeline: reader threads fill buffers, compute threads process them, one writer writes in output order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import NO_TURNS, BaseBytes, ComputedTensor, LeveledTensor, Turns
from mergepipe.core.linear_algebra import one_blas_thread
from mergepipe.engine.jobs import Job, Pass, Stage
from mergepipe.engine.segments import (
    BufferSizes,
    Computation,
    HoldLimits,
    Piece,
    Read,
    SegmentLayout,
    SegmentShape,
    lay_out,
)
from mergepipe.errors import StorageError
from mergepipe.recipes.tasks import MergeTask
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output import SpilledFiles
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import BufferPool, request

FEWEST_READERS = 8
LOOKAHEAD_BUFFERS = 8  # or two a compute thread: more than a disk needs only costs their first touch
REMOTE_LOOKAHEAD_BUFFERS = 192  # a network is never idle while a large tensor is computed
BATCH_BYTES = 1 << 20  # of small reads that one thread makes one after the other
TICK_SECONDS = 0.1


Sink = Callable[[Iterable[Piece], NDArray[np.uint8]], None]
"""Receives the pieces of each finished segment and their buffer, in output order, on one thread."""

Bases = dict[int, BaseBytes]
"""The base's bytes in one buffer, by where they begin, for all that are encoded on them."""

_Order = tuple[Read, ...] | Computation
"""What a reader thread does at once: reads of one file, or the computation of elements."""

Fill = Callable[[Computation, NDArray[np.uint8], Bases], None]
"""Fetches the elements that a computation names into their place in a buffer."""


@dataclass(slots=True)
class _Filled:
    """A buffer that is being processed by one job."""

    job: _RunningJob
    layout: SegmentLayout
    buffer: NDArray[np.uint8]
    orders_left: int = 0
    is_held: bool = False  # by its job, for passes after the one that read it
    on_base: list[Computation] = field(default_factory=list)  # what can start only when all else is there
    bases: Bases = field(default_factory=dict)


@dataclass(slots=True)
class _RunningJob:
    """A job with its current pass and the segments that the pass still waits for.

    `opened` holds what computed tensors keep between their blocks, as long as the job runs. `spill`: the files, where
    what is read of experts is kept on disk.
    """

    job: Job
    passes: Iterator[Pass]
    current: Pass
    files: Mapping[Location, RangeFile]
    spill: SpilledFiles | None
    unread: deque[SegmentShape] = field(default_factory=deque)
    pending: int = 0
    buffers: int = 0
    n_held: int = 0  # of these, held between passes
    held: list[_Filled] = field(default_factory=list)
    opened: dict[tuple[int, bool], Fill] = field(default_factory=dict)
    finished: bool = False

    def close(self) -> None:
        """Give up what was spilled. Nothing is read any more."""
        if self.spill is not None:
            self.spill.close()


class _Step(Enum):
    """The step that a worker completed on a buffer."""

    FILLED = auto()  # by one of its reads or computations
    COMPUTED = auto()
    WRITTEN = auto()


_Event = tuple[_Step, _Filled] | BaseException
"""A success or a failure reported by a worker thread."""


class Pipeline:
    """Runs jobs in order over open files of `store`. For one run only.

    Buffers of `sizes` take `memory_bytes`. As many requests are made at once as the most able store of the files takes;
    a run that ends early gives up those that could take long. `scratch_folder` is where jobs spill.
    """

    def __init__(
        self,
        tasks: Sequence[MergeTask],
        files: Mapping[Location, RangeFile],
        store: Store,
        sizes: BufferSizes,
        memory_bytes: int,
        sink: Sink | None,
        threads: int,
        on_tick: Callable[[], None] = lambda: None,
        scratch_folder: Path = Path(),
    ) -> None:
        self._tasks = tasks
        self._files = files
        self._store = store
        self._sizes = sizes
        self._pool = BufferPool(sizes.total_bytes, memory_bytes)
        self._sink = sink
        self._threads = threads
        self._on_tick = on_tick
        self._scratch_folder = scratch_folder
        self._readers = max((store.terms(file).most_requests for file in files), default=FEWEST_READERS)
        self._lookahead_buffers = max(LOOKAHEAD_BUFFERS, 2 * threads)
        self._is_dear = any(store.terms(file).request_cost_bytes for file in files)
        if self._is_dear:  # 3/4 of all buffers at most
            ahead = max(self._lookahead_buffers, self._pool.limit * 3 // 4)
            self._lookahead_buffers = min(REMOTE_LOOKAHEAD_BUFFERS, ahead)
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._read_queue: SimpleQueue[tuple[_Filled, _Order] | None] = SimpleQueue()
        self._compute_queue: SimpleQueue[tuple[_Filled, Stage] | None] = SimpleQueue()
        self._write_queue: SimpleQueue[_Filled | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._turns = threading.Semaphore(threads)
        self._active: deque[_RunningJob] = deque()
        self._ready: dict[int, _Filled] = {}
        self._next_to_write = 0
        self._next_tick = 0.0

    def hold_limits(self, tasks: Sequence[MergeTask] | None) -> HoldLimits:
        """Return how many buffers one tensor may keep between passes.

        On local disks only as many as `tasks` need: reading again is cheap there.
        """
        if tasks is None or self._is_dear:
            return HoldLimits.of(self._pool.limit)
        return HoldLimits.sparing(self._pool.limit, self._sizes, tasks)

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs to completion, or raise the first worker's error after every thread has stopped."""
        workers: list[threading.Thread] = []
        try:
            for loop in (*[self._read_loop] * self._readers, *[self._compute_loop] * self._threads, self._write_loop):
                self._start(loop, workers)
            with one_blas_thread():
                self._coordinate(iter(jobs))
        except BaseException:
            self._stopping.set()
            self._store.abort()
            raise
        finally:
            try:
                self._stop(workers)
            except KeyboardInterrupt:  # it came while stopping: no worker may outlive this call
                self._stop(workers)
                raise
            finally:
                for running in self._active:
                    running.close()

    # -- the coordinating thread ---------------------------------------------------------------------------------

    def _coordinate(self, jobs: Iterator[Job]) -> None:
        reading = self._admit(jobs)
        while True:
            while reading is not None and self._issue_reads(reading):
                reading = self._admit(jobs)
            if reading is None and not self._active:
                return
            self._tick()
            with contextlib.suppress(Empty):
                self._handle(self._events.get(timeout=TICK_SECONDS))

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._on_tick()

    def _admit(self, jobs: Iterator[Job]) -> _RunningJob | None:
        """Start the next job; None after the last."""
        job = next(jobs, None)
        if job is None:
            return None
        passes = job.passes()
        spill = SpilledFiles(self._files, self._scratch_folder) if job.spills else None
        running = _RunningJob(job, passes, next(passes), self._files if spill is None else spill, spill)
        self._active.append(running)
        self._begin_pass(running, running.current)
        return running

    def _begin_pass(self, running: _RunningJob, new: Pass) -> None:
        running.current = new
        running.pending = len(new.segments)
        if new.repeated and running.spill is not None:
            running.spill.replay()
        running.unread = deque(new.unread)
        held, running.held = running.held, []
        for filled in held:
            self._compute_queue.put((filled, new.stage))

    def _issue_reads(self, running: _RunningJob) -> bool:
        """Request reads of segments while buffers are free; True once this job has no more to read."""
        while running.unread:
            if not self._may_read_on(running):
                return False
            buffer = self._pool.take()
            if buffer is None:
                return False
            self._request(running, running.unread.popleft(), buffer)
        return running.finished or running.current.last_reads

    def _may_read_on(self, running: _RunningJob) -> bool:
        """Whether one more buffer may be filled.

        Look-ahead is limited, except for the oldest job when it must hold its whole tensor.
        """
        oldest = self._active[0]
        ahead = sum(job.buffers for job in self._active if job is not oldest)
        if running is oldest and not running.current.holds_all:
            ahead += oldest.buffers - oldest.n_held
        return ahead < self._lookahead_buffers

    def _request(self, running: _RunningJob, shape: SegmentShape, buffer: NDArray[np.uint8]) -> None:
        layout = lay_out(shape, self._tasks, self._sizes.raw_bytes, lambda path: self._files[path].alignment)
        if running.current.repeated and running.spill is None:
            layout = _as_analysis(layout)
        filled = _Filled(running, layout, buffer)
        running.buffers += 1
        now: list[_Order] = list(_batched(layout.reads, 0 if self._is_dear else BATCH_BYTES))
        for computation in layout.computations:
            if computation.key not in running.opened:
                on_base = computation.on_base
                opened = _opened(computation.source, running.files, on_base=on_base, turns=self._turns)
                running.opened[computation.key] = opened
            if computation.on_base and computation.base_offset not in filled.bases:
                stored = buffer[computation.base_offset : computation.base_offset + computation.base_bytes]
                filled.bases[computation.base_offset] = BaseBytes(stored)
            (filled.on_base if computation.on_base else now).append(computation)
        self._order(filled, now)

    def _order(self, filled: _Filled, orders: Sequence[_Order]) -> None:
        """Queue these reads, then the computations that depend on them."""
        if not orders and filled.on_base:
            orders, filled.on_base = filled.on_base, []
        filled.orders_left = len(orders)
        if not orders:
            self._compute_queue.put((filled, filled.job.current.stage))
        for order in orders:
            self._read_queue.put((filled, order))

    def _handle(self, event: _Event) -> None:
        if isinstance(event, BaseException):
            raise event
        step, filled = event
        match step:
            case _Step.FILLED:
                filled.orders_left -= 1
                if filled.orders_left == 0:
                    self._order(filled, ())
            case _Step.COMPUTED:
                self._after_compute(filled)
            case _Step.WRITTEN:
                self._release(filled)
                self._retire()

    def _after_compute(self, filled: _Filled) -> None:
        running, number = filled.job, filled.layout.shape.number
        if number in running.current.held:
            running.n_held += not filled.is_held
            filled.is_held = True
            running.held.append(filled)
        elif running.current.writes:
            self._ready[number] = filled
            while (following := self._ready.pop(self._next_to_write, None)) is not None:
                self._write_queue.put(following)
                self._next_to_write += 1
        else:
            self._release(filled)
        running.pending -= 1
        if running.pending == 0:
            new = next(running.passes, None)
            if new is None:
                running.finished = True
                self._retire()
            else:
                self._begin_pass(running, new)

    def _release(self, filled: _Filled) -> None:
        filled.job.buffers -= 1
        filled.job.n_held -= filled.is_held
        self._pool.give_back(filled.buffer)

    def _retire(self) -> None:
        while self._active and self._active[0].finished and self._active[0].buffers == 0:
            self._active.popleft().close()

    # -- worker threads --------------------------------------------------------------------------------------------

    def _start(self, loop: Callable[[], None], workers: list[threading.Thread]) -> None:
        thread = threading.Thread(target=self._guard, args=(loop,), daemon=True, name=f"mergepipe-{loop.__name__}")
        workers.append(thread)  # first, so that an interrupt cannot come between
        try:
            thread.start()
        except RuntimeError as error:  # what the interpreter makes of a refusal
            if isinstance(error.__context__, KeyboardInterrupt):  # or of an interrupt while it waits for the start
                raise error.__context__ from None
            raise StorageError.of(
                "storage.exhausted", "--threads", "the system starts no more threads for this process",
                "lower --threads, or raise the limits on its threads and memory (ulimit -u, ulimit -v)",
            ) from error  # fmt: skip

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            with one_blas_thread():
                loop()
        except BaseException as error:  # every failure is raised again by the coordinating thread
            self._events.put(error)

    def _read_loop(self) -> None:
        while (entry := self._read_queue.get()) is not None and not self._stopping.is_set():
            filled, order = entry
            if isinstance(order, Computation):
                filled.job.opened[order.key](order, filled.buffer, filled.bases)
            else:
                _read(order, filled.buffer, filled.job.files)
            self._events.put((_Step.FILLED, filled))

    def _compute_loop(self) -> None:
        while (order := self._compute_queue.get()) is not None and not self._stopping.is_set():
            filled, stage = order
            with self._turns:
                filled.job.job.compute(stage, filled.layout, filled.buffer)
            self._events.put((_Step.COMPUTED, filled))

    def _write_loop(self) -> None:
        while (filled := self._write_queue.get()) is not None and not self._stopping.is_set():
            assert self._sink is not None  # an analysis ends before
            self._sink(filled.job.job.results(filled.layout), filled.buffer)
            self._events.put((_Step.WRITTEN, filled))

    def _stop(self, workers: Sequence[threading.Thread]) -> None:
        self._stopping.set()
        for _ in range(self._readers):
            self._read_queue.put(None)
        for _ in range(self._threads):
            self._compute_queue.put(None)
        self._write_queue.put(None)
        for worker in workers:
            if worker.ident is not None:  # it was started
                worker.join()


def _as_analysis(layout: SegmentLayout) -> SegmentLayout:
    """Charge the reads to analysis: they come on top of the one pass that every merge makes."""
    return replace(
        layout,
        reads=tuple(replace(read, purpose=Purpose.ANALYSIS) for read in layout.reads),
        computations=tuple(replace(order, purpose=Purpose.ANALYSIS) for order in layout.computations),
    )


def _batched(reads: Sequence[Read], batch_bytes: int) -> Iterator[tuple[Read, ...]]:
    """Join neighbours of one file into batches of about so many bytes at most; larger reads are alone."""
    for _, of_file in groupby(reads, attrgetter("file")):
        group = tuple(of_file)
        most = max(1, batch_bytes * len(group) // sum(read.nbytes for read in group))
        yield from (group[first : first + most] for first in range(0, len(group), most))


def _read(batch: Sequence[Read], buffer: NDArray[np.uint8], files: Mapping[Location, RangeFile]) -> None:
    file = files[batch[0].file]
    for read in batch:
        view = buffer[read.buffer_offset : read.buffer_offset + read.nbytes]
        request(file, read.offset, view, min(read.nbytes, file.size_bytes - read.offset), read.purpose)


def _opened(
    source: ComputedTensor, files: Mapping[Location, RangeFile], *, on_base: bool, turns: Turns = NO_TURNS
) -> Fill:
    """Return a function that fetches elements of a computed tensor into their place in a buffer."""
    if on_base and isinstance(source, LeveledTensor):
        fetch_on_base = source.opened_on_base(files, turns)

        def fill_on_base(order: Computation, buffer: NDArray[np.uint8], bases: Bases) -> None:
            fetch_on_base(order.span, bases[order.base_offset], order.place_in(buffer), order.purpose)

        return fill_on_base
    fetch = source.opened(files)
    return lambda order, buffer, _: fetch(order.span, order.place_in(buffer), order.purpose)
