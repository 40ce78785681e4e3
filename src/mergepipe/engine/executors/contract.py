"""The executor contract: divide a merge into parts and make them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mergepipe.engine.observer import SILENT, Observer
from mergepipe.engine.work import MergeWork, PartResult
from mergepipe.snapshots.shards import DurableProgress


class Executor(Protocol):
    """Makes all parts of a merge, wherever it wants and in any order; none of that changes the bytes.

    A worker needs the work's value and storage that reaches its files and the staging directory, nothing else.
    """

    def run(
        self,
        work: MergeWork,
        directory: Path,
        observer: Observer = SILENT,
        progress: DurableProgress | None = None,
    ) -> PartResult:
        """Write the work's shards into the staging `directory`, and return the sum of the results of its parts.

        What `progress` says is durable already is neither read nor written.

        Raises:
            MergePipeError: as `make_part`, from any worker; every worker has stopped.
        """
        ...
