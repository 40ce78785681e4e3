"""Record the progress of an unfinished store, atomically, and read it to resume the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mergepipe.core.canonical_json import canonical_json
from mergepipe.deltastore.header import INDEX_NAME
from mergepipe.deltastore.index import ROW_BYTES
from mergepipe.deltastore.writer import GROWING_FILES, DurableStore, index_digest, read_rows
from mergepipe.errors import MergePipeError
from mergepipe.snapshots.staging import CONTENT_NAME
from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.limits import PACK_PROGRESS_BYTES
from mergepipe.storage.local import os_error
from mergepipe.storage.output import replace_durably, sync_directory
from mergepipe.storage.sealed_lines import payload_of, sealed

PROGRESS_NAME = "pack.progress"
_FORMAT = "mergepipe-pack-progress/1"

Cuts = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PackProgress:
    """The durable part of an unfinished store. `key` identifies inputs and versions.

    `cuts` are those of the tensors that were begun, in order.
    """

    key: str
    durable: DurableStore
    cuts: tuple[Cuts | None, ...]


def note_progress(directory: Path, progress: PackProgress, ledger: Ledger) -> None:
    """Record in a staging directory the part of the store that is durable, and make the names of its files durable."""
    content = {"format": _FORMAT, "content": _inode_of(directory), **asdict(progress)}
    sync_directory(directory / CONTENT_NAME)
    replace_durably(directory / PROGRESS_NAME, sealed(canonical_json(content)), ledger)
    sync_directory(directory.parent)


def find_progress(directory: Path, key: str) -> PackProgress | None:
    """Find progress to resume in a staging directory, truncated to its durable part; None if there is none.

    The blocks were durable before they were recorded; the index is checked against its digest.
    """
    progress = _read(directory)
    if progress is None or progress.key != key or not _is_complete(directory / CONTENT_NAME, progress.durable):
        return None
    try:
        _truncate_to(directory, progress.durable)
    except OSError as error:
        raise os_error(error, directory, "resuming it") from error
    return progress


def _read(directory: Path) -> PackProgress | None:
    try:
        document = json.loads(payload_of(owned.read_file(directory / PROGRESS_NAME, PACK_PROGRESS_BYTES)) or b"")
        if document["format"] != _FORMAT:
            return None
        return None if document["content"] != _inode_of(directory) else _progress(document)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MergePipeError):
        return None  # torn or foreign: nothing to resume


def _progress(document: Mapping[str, object]) -> PackProgress | None:
    match document:
        case {
            "key": str(key),
            "durable": {"n_rows": int(n_rows), "file_bytes": dict(file_bytes), "index_blake3": str(index_blake3)},
            "cuts": list(all_cuts),
        }:
            sizes = {str(name): int(size) for name, size in file_bytes.items()}
            cuts = tuple(
                None if tensor_cuts is None else (float(tensor_cuts[0]), float(tensor_cuts[1]), float(tensor_cuts[2]))
                for tensor_cuts in all_cuts
            )
            return PackProgress(key, DurableStore(n_rows, sizes, index_blake3), cuts)
    return None


def _is_complete(content: Path, durable: DurableStore) -> bool:
    if durable.file_bytes.keys() != set(GROWING_FILES) or durable.file_bytes[INDEX_NAME] != durable.n_rows * ROW_BYTES:
        return False
    try:
        if any((content / name).stat().st_size < size for name, size in durable.file_bytes.items()):
            return False
        return index_digest(read_rows(content, durable.n_rows)) == durable.index_blake3
    except (OSError, MergePipeError):
        return False


def _truncate_to(directory: Path, durable: DurableStore) -> None:
    """Truncate or remove everything that is not durable."""
    owned.keep_only(directory / CONTENT_NAME, durable.file_bytes)


def _inode_of(directory: Path) -> list[int]:
    """Device and inode of the content directory."""
    status = (directory / CONTENT_NAME).stat()
    return [status.st_dev, status.st_ino]
