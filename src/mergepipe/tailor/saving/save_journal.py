"""Append to and read the logs of partial saves in a run's directory; rank 0 appends durably."""

from __future__ import annotations

import os
from pathlib import Path

from mergepipe.storage import owned
from mergepipe.storage.limits import SAVE_LOG_BYTES
from mergepipe.storage.local import os_error
from mergepipe.storage.ranges import read_descriptor_range
from mergepipe.storage.regular import read_small
from mergepipe.tailor.saving.save_log import SaveLog, SaveRecord, read_log, start_line

LOG_NAME = "partial-saves.jsonl"
PAPER_LOG_NAME = "flags.jsonl"


def read_journal(run: Path) -> SaveLog:
    """Read the saves so far; none without a log.

    Raises:
        CorruptError: a line is no line of ours.
        StorageError: the log cannot be read.
    """
    path = run / LOG_NAME
    raw = read_small(path, SAVE_LOG_BYTES) if path.exists() else b""
    return read_log(raw.decode("utf-8", errors="surrogateescape"), path.name)


def note_save(run: Path, record: SaveRecord) -> None:
    """Append a published save to both logs."""
    _append(run / PAPER_LOG_NAME, record.to_paper_line())
    _append(run / LOG_NAME, record.to_line())


def note_start(run: Path, step: int) -> None:
    """Append that training resumes from `step`: later saves are abandoned."""
    _append(run / LOG_NAME, start_line(step))


def _append(path: Path, line: str) -> None:
    """Append one line durably, after removing a line that a crash truncated."""
    try:
        owned.make_folders(path.parent)
        flags = os.O_RDWR | os.O_APPEND
        is_new = not owned.is_there(path)
        descriptor = owned.create_file(path, flags=flags) if is_new else owned.open_file(path, flags=flags)
        try:
            size_bytes = os.fstat(descriptor).st_size
            content = read_descriptor_range(descriptor, path, 0, size_bytes)
            if not content.endswith(b"\n") and content:
                os.ftruncate(descriptor, content.rfind(b"\n") + 1)
            owned.write_all(descriptor, line.encode())
            owned.sync_file(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, path, "appending a line") from error
