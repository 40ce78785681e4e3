"""The training formats: each is registered here by one line, and tried when a path is opened."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mergepipe.checkpoints.directory import require_text_path
from mergepipe.core.units import first_names
from mergepipe.errors import MergePipeError, NotFoundError, UnsupportedError
from mergepipe.storage.contract import FileKind, Store, is_file, is_folder
from mergepipe.storage.location import WEB_SCHEMES, Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.contract import TrainingFormat, refuse_foreign, step_of_name
from mergepipe.tailor.formats.dcp import DCP
from mergepipe.tailor.formats.deepspeed import UNIVERSAL, ZERO
from mergepipe.tailor.formats.hf_trainer import ONE_FILE, TRAINER, WEIGHTS
from mergepipe.tailor.formats.partial import MANIFEST_NAME, read_partial
from mergepipe.tailor.formats.sharded import FSDP, MEGATRON, VERL

TRAINING_FORMATS: tuple[TrainingFormat, ...] = (
    ONE_FILE, MEGATRON, DCP, UNIVERSAL, FSDP, TRAINER, ZERO, VERL, WEIGHTS,
)  # fmt: skip
"""In the order in which paths are tried; partial checkpoints, which hold files of their framework too, come before."""


_MOST_NAMES = 6


def format_named(name: str) -> TrainingFormat:
    """The format of that name; see `TrainingCheckpoint.format`."""
    return {training_format.name: training_format for training_format in TRAINING_FORMATS}[name]


# --- opens a path as a training checkpoint, whichever format it turns out to be ---


def open_training_checkpoint(store: Store, path: Location, home: Location | None = None) -> TrainingCheckpoint:
    """Open a directory or a file of any format, or a partial checkpoint.

    Reads structure and step counters, never another tensor byte. `home` is where it will lie, if that is elsewhere.
    """
    refuse_unlisted(path)
    if not is_folder(store, path) and not is_file(store, path):
        raise NotFoundError.of("model.not-found", path, "there is no such directory or file")
    if is_file(store, path / MANIFEST_NAME):
        return read_partial(store, path, TRAINING_FORMATS)
    if is_folder(store, path):
        refuse_foreign(store, path)
    known = next((candidate for candidate in TRAINING_FORMATS if candidate.recognise(store, path)), None)
    if known is None:
        raise _no_checkpoint(store, path)
    return known.open(store, path, home or path)


def refuse_unlisted(path: Location) -> None:
    """Refuse a place whose files cannot be listed: a part of a checkpoint there would be missing in silence."""
    if path.scheme in WEB_SCHEMES:
        message = "is on a web server, which lists no files: the optimizer's state would be missing in silence"
        hint = "download it, or put it in a bucket or on the Hub"
        raise UnsupportedError.of("checkpoint.unsupported", path, message, hint)


def _no_checkpoint(store: Store, path: Location) -> MergePipeError:
    """Make the error for a folder that is no checkpoint: it names those in it, or what checkpoints are read."""
    entries = store.list(path) if is_folder(store, path) else ()
    steps = {entry.name: step_of_name(entry.name) for entry in entries if entry.kind is FileKind.FOLDER}
    names = sorted((name for name in steps if steps[name] is not None), key=lambda name: (steps[name], name))
    if names:
        message = f"is a folder of checkpoints: {first_names(names[::-1], _MOST_NAMES)}"
        hint = f"name the checkpoints themselves; the newest is {path / names[-1]}"
        return NotFoundError.of("model.not-found", path, message, hint)
    hint = "name the folder that the Trainer, DeepSpeed, FSDP, torch DCP, Megatron-Core or verl saved"
    return NotFoundError.of("model.not-found", path, "no training checkpoint is here", hint)


# --- open the source checkpoints of a composition ---


_OPENED_AT_ONCE = 8


def open_source_checkpoints(store: Store, paths: Sequence[Location]) -> list[TrainingCheckpoint]:
    """Open many checkpoints, several at a time: each takes some hundred small reads, one after another."""
    with ThreadPoolExecutor(min(_OPENED_AT_ONCE, len(paths)), "mergepipe-tailor-open") as pool:
        return list(pool.map(lambda path: open_source_checkpoint(store, path), paths))


def open_source_checkpoint(store: Store, path: Location) -> TrainingCheckpoint:
    """Open a checkpoint, of a remote one its present version; a partial one never counts as complete.

    No framework can resume a partial one.
    """
    require_text_path(path)
    refuse_unlisted(path)
    opened = open_training_checkpoint(store, store.pin(path))
    if not opened.is_partial:
        return opened
    return replace(opened, missing=(*opened.missing, "the files of its framework: it is a partial checkpoint"))
