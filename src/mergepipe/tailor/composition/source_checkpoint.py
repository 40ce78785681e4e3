"""Open the source checkpoints of a composition."""

from __future__ import annotations

from dataclasses import replace

from mergepipe.checkpoints.contained_files import require_text_path
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.open_checkpoint import open_training_checkpoint


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
