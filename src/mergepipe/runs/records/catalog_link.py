"""Record what a run computes in the catalog: statistics in batches, content ids once, snapshots at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import is_catalog_error
from mergepipe.catalog.rows import ModelRow
from mergepipe.checkpoints.content_id import content_id
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.errors import MergePipeError
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.location import Location

BATCH_TENSORS = 64
T = TypeVar("T")


class CatalogLink:
    """An optional catalog: its first failure becomes a notice, and from then on it is not used.

    Where it is `required`, trouble is an error.
    """

    def __init__(self, home: Path | None, *, required: bool = False) -> None:
        self.notices: list[str] = []
        self._home = home
        self._required = required
        self._catalog: Catalog | None = None

    @property
    def home(self) -> Path | None:
        """The catalog's directory; None where it is not used."""
        return self._home

    def use(self, action: Callable[[Catalog], T]) -> T | None:
        """Call `action` with the catalog, opening it on first use; return None where no catalog is usable."""
        if self._home is None:
            return None
        try:
            if self._catalog is None:
                self._catalog = Catalog.open(self._home)
            return action(self._catalog)
        except MergePipeError as error:
            if self._required or not is_catalog_error(error):
                raise
            self.notices.append(f"the catalog is not used: {error}")
            self.close()
            return None

    def close(self) -> None:
        """Close the catalog; nothing is recorded afterwards."""
        self._home = None
        if self._catalog is not None:
            catalog, self._catalog = self._catalog, None
            catalog.close()


class StatisticsRecorder:
    """Receives statistics from the engine and commits them in batches, so that an interrupted run loses few."""

    def __init__(self, link: CatalogLink, base: ModelRow) -> None:
        self._link = link
        self._base = base
        self._owners: dict[tuple[str, int], ModelRow] = {}
        self._batch: dict[str, dict[str, TensorStatistics]] = defaultdict(dict)
        self._rows: dict[str, ModelRow] = {}
        self._waiting = 0

    @property
    def expected(self) -> frozenset[str]:
        """Names of the tensors whose statistics are recorded."""
        return frozenset(name for name, _ in self._owners)

    def expect(self, task: MergeTask, experts: Sequence[ModelRow]) -> None:
        """Register the catalog rows of a task's experts."""
        for model, row in zip(task.expert_models, experts, strict=True):
            self._owners[task.name, model] = row
            self._rows[row.id] = row

    def take(self, task: MergeTask, e: int, statistics: TensorStatistics) -> None:
        """Queue the statistics of one expert's tensor; an `OnStatistics`."""
        row = self._owners[task.name, task.expert_models[e]]
        self._batch[row.id][task.base.name] = statistics
        self._waiting += 1
        if self._waiting >= BATCH_TENSORS:
            self.flush()

    def flush(self) -> None:
        """Commit the queued statistics."""
        for row_id, statistics in self._batch.items():
            self._put(self._rows[row_id], statistics)
        self._batch.clear()
        self._waiting = 0

    def _put(self, row: ModelRow, statistics: Mapping[str, TensorStatistics]) -> None:
        self._link.use(lambda catalog: catalog.put_many(row, self._base, statistics))


def known_content_id(link: CatalogLink, checkpoint: Checkpoint, files: Mapping[Location, RangeFile]) -> str:
    """Look up the content id of a checkpoint; read its files only if the catalog lacks it."""
    row = link.use(lambda catalog: catalog.register_model(checkpoint))
    if row is not None and row.content_id is not None:
        return row.content_id
    identity = content_id(checkpoint, files)
    link.use(lambda catalog: catalog.register_model(checkpoint, identity))
    return identity
