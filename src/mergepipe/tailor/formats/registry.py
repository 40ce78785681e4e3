"""The training formats: each is registered here by one line, and tried when a path is opened."""

from __future__ import annotations

from mergepipe.errors import NotFoundError
from mergepipe.storage.contract import Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.contract import CheckpointKind, ForeignKind, TrainingFormat
from mergepipe.tailor.formats.dcp import DcpFormat
from mergepipe.tailor.formats.deepspeed import ZeroFormat
from mergepipe.tailor.formats.fsdp import FsdpFormat
from mergepipe.tailor.formats.hf_trainer import HfFormat, WeightsFormat
from mergepipe.tailor.formats.one_file import OneFileFormat
from mergepipe.tailor.formats.partial import PartialKind
from mergepipe.tailor.formats.universal import UniversalFormat
from mergepipe.tailor.formats.verl import VerlFormat

# --- the training formats: each is registered here by one line ---


_FILE = OneFileFormat()
_FOLDERS: tuple[TrainingFormat, ...] = (
    DcpFormat(),
    UniversalFormat(),
    FsdpFormat(),
    HfFormat(),
    ZeroFormat(),
    VerlFormat(),
    WeightsFormat(),
)

TRAINING_FORMATS: tuple[TrainingFormat, ...] = (_FILE, *_FOLDERS)
CHECKPOINT_KINDS: tuple[CheckpointKind, ...] = (_FILE, PartialKind(_FOLDERS), ForeignKind(), *_FOLDERS)
"""In the order in which paths are tried: files first; a partial checkpoint holds files of its framework too."""


def format_named(name: str) -> TrainingFormat:
    """The format of that name; see `TrainingCheckpoint.format`."""
    return {training_format.name: training_format for training_format in TRAINING_FORMATS}[name]


# --- opens a path as a training checkpoint, whichever format it turns out to be ---


def open_training_checkpoint(store: Store, path: Location, home: Location | None = None) -> TrainingCheckpoint:
    """Open a directory or a file of any kind of `CHECKPOINT_KINDS`.

    Reads structure and step counters, never another tensor byte. `home` is where it will lie, if that is elsewhere.
    """
    if not is_folder(store, path) and not is_file(store, path):
        raise NotFoundError.of("model.not-found", path, "there is no such directory or file")
    kind = next((candidate for candidate in CHECKPOINT_KINDS if candidate.recognise(store, path)), None)
    if kind is None:
        looked_for = "; ".join(candidate.looked_for for candidate in CHECKPOINT_KINDS if candidate.looked_for)
        raise NotFoundError.of("model.not-found", path, "no training checkpoint is here", f"looked for {looked_for}")
    return kind.open(store, path, home or path)
