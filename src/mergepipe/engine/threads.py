"""Make a merge on the threads of this process, as one part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergepipe.engine.make_part import make_part
from mergepipe.engine.work import SILENT, EngineOptions, MergeWork, Observer, PartResult, whole
from mergepipe.snapshots.shards import DurableProgress
from mergepipe.storage.contract import Store


@dataclass(frozen=True, slots=True)
class ThreadExecutor:
    """An `Executor` that uses the threads and memory of `options`, and reads through `store`."""

    store: Store
    options: EngineOptions

    def run(
        self,
        work: MergeWork,
        directory: Path,
        observer: Observer = SILENT,
        progress: DurableProgress | None = None,
    ) -> PartResult:
        """See `Executor.run`."""
        return make_part(work, whole(work.output), directory, self.store, self.options, observer, progress)
