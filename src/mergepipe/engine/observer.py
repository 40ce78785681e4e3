"""Observe a run of the engine from the process that makes it: progress, statistics, and the bytes that are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.engine.pipeline.segment_layout import Piece
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.snapshots.shards import ShardProgress

OnStatistics = Callable[[MergeTask, int, TensorStatistics], None]
"""Receives the statistics of one expert (by its index in the task) of one tensor."""


@dataclass(frozen=True, slots=True)
class Tap:
    """Shows the bytes read of some tensors (by name), piece by piece, before they are merged.

    `look` is called once for each piece, from compute threads, with the buffer that it lies in.
    """

    tensors: frozenset[str]
    look: Callable[[MergeTask, Piece, NDArray[np.uint8]], None]


def _ignore_progress(_: ShardProgress | None) -> None:
    """Ignore progress."""


def _ignore_statistics(_: MergeTask, __: int, ___: TensorStatistics) -> None:
    """Ignore statistics."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Callbacks of one run, passed beside the work and never part of it: they have no effect on the output.

    `on_progress` is called about ten times a second with the shard that is being written, if any; `on_statistics` for
    the tensors of which the work gathers statistics. Both are called on the calling thread.
    """

    on_progress: Callable[[ShardProgress | None], None] = _ignore_progress
    on_statistics: OnStatistics = _ignore_statistics
    tap: Tap | None = None


SILENT = Observer()
