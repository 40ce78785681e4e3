"""Callbacks of a run of the engine, in the process that makes it: progress, statistics, and the bytes that are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mergepipe.engine.jobs import Tap
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.recipes.tasks import MergeTask
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

OnStatistics = Callable[[MergeTask, int, TensorStatistics], None]
"""Receives the statistics of one expert (by its index in the task) of one tensor."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Callbacks of one run, passed beside the work and never part of it: they have no effect on the output.

    `on_progress` is called about ten times a second, `on_statistics` for the tensors of which the work gathers
    statistics. Both are called on the calling thread. `watch` returns the opened files as they are to be read.
    """

    on_progress: Callable[[], None] = lambda: None
    on_statistics: OnStatistics = lambda _task, _expert, _statistics: None
    tap: Tap | None = None
    watch: Callable[[Mapping[Location, RangeFile]], Mapping[Location, RangeFile]] = lambda files: files


SILENT = Observer()
