"""Hands what a run learns to the catalog: statistics in batches, content ids once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import Evidence, ModelRow
from mergepipe.engine.identity import content_id
from mergepipe.readers.base import Checkpoint
from mergepipe.recipe.resolve import MergeTask
from mergepipe.statistics import TensorStatistics
from mergepipe.storage.base import RangeFile

BATCH_TENSORS = 64


class StatisticsRecorder:
    """Takes statistics from the engine and commits them in batches, so that an interrupted run loses little."""

    def __init__(self, catalog: Catalog, base: ModelRow, evidence: Evidence) -> None:
        self._catalog = catalog
        self._base = base
        self._evidence = evidence
        self._owners: dict[tuple[str, Path], ModelRow] = {}
        self._batch: dict[str, dict[str, TensorStatistics]] = defaultdict(dict)
        self._rows: dict[str, ModelRow] = {}
        self._waiting = 0

    def expect(self, task: MergeTask, experts: Sequence[ModelRow]) -> None:
        """Say which models the experts of a task are."""
        for entry, row in zip(task.experts, experts, strict=True):
            self._owners[(task.name, entry.file)] = row
            self._rows[row.id] = row

    def take(self, task: MergeTask, e: int, statistics: TensorStatistics) -> None:
        """Keep the statistics of one expert's tensor; an `OnStatistics`."""
        row = self._owners[(task.name, task.experts[e].file)]
        self._batch[row.id][task.name] = statistics
        self._waiting += 1
        if self._waiting >= BATCH_TENSORS:
            self.flush()

    def flush(self) -> None:
        """Commit what is waiting."""
        for row_id, statistics in self._batch.items():
            self._catalog.put_many(self._rows[row_id], self._base, statistics, evidence=self._evidence)
        self._batch.clear()
        self._waiting = 0


def known_content_id(catalog: Catalog, checkpoint: Checkpoint, files: Mapping[Path, RangeFile]) -> str:
    """The content id of a checkpoint, read from its files only if the catalog does not know it yet."""
    row = catalog.register_model(checkpoint)
    if row.content_id is not None:
        return row.content_id
    identity = content_id(checkpoint, files)
    catalog.register_model(checkpoint, identity)
    return identity
