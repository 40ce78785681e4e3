"""Opens a path as a training checkpoint, whichever format it turns out to be."""

from __future__ import annotations

from mergepipe.errors import NotFoundError
from mergepipe.storage.contract import Store, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.registry import CHECKPOINT_KINDS


def open_training_checkpoint(store: Store, path: Location, home: Location | None = None) -> TrainingCheckpoint:
    """Open a Trainer checkpoint, a DeepSpeed tag or save directory, a DCP directory or a partial checkpoint of ours.

    Reads structure and step counters, never another tensor byte. `home` is where it will lie, if that is elsewhere.

    Raises:
        NotFoundError: there is no such directory, or no training checkpoint in it.
        CorruptError, MismatchError: it contradicts itself.
        UnsupportedError: a kind this version does not read.
    """
    if not is_folder(store, path):
        raise NotFoundError.of("tailor.path", path, "there is no such directory")
    kind = next((candidate for candidate in CHECKPOINT_KINDS if candidate.recognise(store, path)), None)
    if kind is None:
        looked_for = "; ".join(candidate.looked_for for candidate in CHECKPOINT_KINDS if candidate.looked_for)
        raise NotFoundError.of("tailor.none", path, "no training checkpoint is here", f"looked for {looked_for}")
    return kind.open(store, path, home or path)
