"""Open the source checkpoints of a composition."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mergepipe.checkpoints.contained_files import require_text_path
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.open_checkpoint import open_training_checkpoint

_OPENED_AT_ONCE = 8


def open_source_checkpoints(store: Store, paths: Sequence[Location]) -> list[TrainingCheckpoint]:
    """Open many checkpoints, several at a time: each takes some hundred small reads, one after another.

    Raises:
        MergePipeError: see `open_source_checkpoint`; of several, that of the first.
    """
    with ThreadPoolExecutor(min(_OPENED_AT_ONCE, len(paths)), "mergepipe-tailor-open") as pool:
        return list(pool.map(lambda path: open_source_checkpoint(store, path), paths))


def open_source_checkpoint(store: Store, path: Location) -> TrainingCheckpoint:
    """Open a checkpoint; a partial one never counts as complete, since no framework can resume it.

    Raises:
        MergePipeError: see `open_training_checkpoint`.
    """
    require_text_path(path)
    opened = open_training_checkpoint(store, path)
    if not opened.is_partial:
        return opened
    return replace(opened, missing=(*opened.missing, "the files of its framework: it is a partial checkpoint"))
