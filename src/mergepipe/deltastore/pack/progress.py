"""Log which part of an unfinished store is durable, and read that to resume the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mergepipe.deltastore.header import INDEX_NAME
from mergepipe.deltastore.index import ROW_BYTES
from mergepipe.deltastore.writer import GROWING_FILES, DurableStore, index_digest, read_rows
from mergepipe.errors import MergePipeError
from mergepipe.snapshots.staging import CONTENT_NAME
from mergepipe.snapshots.work_log import LoggedWork, WorkLog, content_identity, forget_work_log, read_work_log
from mergepipe.storage import owned
from mergepipe.storage.output import sync_directory
from mergepipe.storage.ranges import os_error

Cuts = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PackProgress:
    """The durable part of an unfinished store, and the log that tells of it.

    `cuts` are those of the tensors that were begun, in order.
    """

    durable: DurableStore
    cuts: tuple[Cuts | None, ...]
    logged: LoggedWork


def note_progress(log: WorkLog, directory: Path, durable: DurableStore, new_cuts: Sequence[Cuts | None]) -> None:
    """Log the part of the store in a staging directory that is durable, with the cuts of tensors begun since."""
    sync_directory(directory / CONTENT_NAME)
    log.append({"kind": "unit", "durable": asdict(durable), "cuts": list(new_cuts)}, is_durable=True)


def find_progress(directory: Path, key: str) -> PackProgress | None:
    """Find progress to resume in a staging directory, truncated to its durable part; None if there is none.

    The blocks were durable before they were recorded; the index is checked against its digest.
    """
    logged = read_work_log(directory)
    progress = None if logged is None or logged.key != key else _progress(logged)
    if (
        progress is None
        or progress.logged.content != content_identity(directory)
        or not _is_complete(directory / CONTENT_NAME, progress.durable)
    ):
        forget_work_log(directory)
        return None
    try:
        owned.keep_only(directory / CONTENT_NAME, progress.durable.file_bytes)
    except OSError as error:
        raise os_error(error, directory, "resuming it") from error
    return progress


def _progress(logged: LoggedWork) -> PackProgress | None:
    durable: DurableStore | None = None
    cuts: list[Cuts | None] = []
    try:
        for record in logged.records:
            match record:
                case {"kind": "unit", "durable": dict(part), "cuts": list(new_cuts)}:
                    durable = _durable(part)
                    cuts.extend(
                        None if one is None else (float(one[0]), float(one[1]), float(one[2])) for one in new_cuts
                    )
    except (ValueError, TypeError, LookupError, OverflowError):
        return None
    return None if durable is None else PackProgress(durable, tuple(cuts), logged)


def _durable(part: Mapping[str, object]) -> DurableStore:
    match part:
        case {"n_rows": int(n_rows), "file_bytes": dict(file_bytes), "index_blake3": str(index_blake3)}:
            return DurableStore(n_rows, {str(name): int(size) for name, size in file_bytes.items()}, index_blake3)
    raise ValueError("not the durable part of a store")


def _is_complete(content: Path, durable: DurableStore) -> bool:
    if durable.file_bytes.keys() != set(GROWING_FILES) or durable.file_bytes[INDEX_NAME] != durable.n_rows * ROW_BYTES:
        return False
    try:
        if any((content / name).stat().st_size < size for name, size in durable.file_bytes.items()):
            return False
        return index_digest(read_rows(content, durable.n_rows)) == durable.index_blake3
    except (OSError, MergePipeError):
        return False
