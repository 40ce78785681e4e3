"""Open the source checkpoints of a composition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mergepipe.checkpoints.contained_files import require_text_path
from mergepipe.storage.contract import Store, is_file
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.open_checkpoint import open_training_checkpoint
from mergepipe.tailor.formats.partial_manifest import MANIFEST_NAME


def open_source_checkpoint(store: Store, path: Path) -> TrainingCheckpoint:
    """Open a checkpoint; a partial one never counts as complete, since no framework can resume it.

    Raises:
        MergePipeError: see `open_training_checkpoint`.
    """
    require_text_path(path)
    opened = open_training_checkpoint(store, path)
    if not is_file(store, path / MANIFEST_NAME):
        return opened
    return replace(opened, missing=(*opened.missing, "the files of its framework: it is a partial checkpoint"))
