"""The log of saves during training: one JSON object per line, which rank 0 appends durably."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from mergepipe.checkpoints.directory import is_plain_name
from mergepipe.core.records import AsText, RefusedError, Size, decode, encode
from mergepipe.core.strict_json import parse_object, shown
from mergepipe.errors import CorruptError
from mergepipe.storage import owned
from mergepipe.storage.limits import SAVE_LOG_BYTES
from mergepipe.storage.ranges import os_error, read_descriptor_range, read_small
from mergepipe.tailor.selection import Unit, unit_named

LOG_NAME = "partial-saves.jsonl"
_SAVE, _START = "save", "start"
_CODE = "save-log.damaged"
_Units: TypeAlias = tuple[Annotated[Unit, AsText(str, unit_named)], ...]


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """One save: which `units` were saved at `step` into `folder`, beside the log.

    `model_units` are all units of the model. `strategy`, `saved_bytes`, `full_bytes` and `seconds` are for the reader.
    Without a folder it is a (re)start of training at `step`.
    """

    step: Size
    units: _Units = ()
    folder: str | None = None
    is_full: bool | None = None
    model_units: _Units = ()
    strategy: str = ""
    saved_bytes: Size = 0
    full_bytes: Size = 0
    seconds: float = 0.0

    def to_line(self) -> str:
        """Format as a line of the log. Law: `read_log(r.to_line())` gives `r` back."""
        fields = encode(self)
        assert isinstance(fields, dict)
        event = _START if self.folder is None else _SAVE
        return json.dumps({"event": event, **fields}, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True)
class SaveLog:
    """The saves of a log that belong to the run's final course, in order of steps, each step once.

    When training went back to an earlier step, what had been saved past it belongs to a branch that was given up
    (`dropped_steps`). `cut_line` is the number of a last line that a crash cut short, else 0.
    """

    records: tuple[SaveRecord, ...]
    dropped_steps: tuple[int, ...] = ()
    cut_line: int = 0


def read_log(text: str, where: object = "log") -> SaveLog:
    """Read a log."""
    lines = text.split("\n")
    is_cut = bool(lines[-1].strip()) and not _is_json(lines[-1])
    complete = lines[:-1] if is_cut else lines
    records: list[SaveRecord] = []
    dropped: set[int] = set()
    for event in [_read_line(line, f"{where}:{i}") for i, line in enumerate(complete, 1) if line.strip()]:
        dropped |= {r.step for r in records if r.step > event.step}
        records = [r for r in records if r.step < event.step or (event.folder is None and r.step == event.step)]
        records += [event] if event.folder is not None else []
    return SaveLog(tuple(records), tuple(sorted(dropped)), len(lines) if is_cut else 0)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _read_line(text: str, where: str) -> SaveRecord:
    document = parse_object(text.encode("utf-8", "surrogatepass"), where=where, code=_CODE)
    try:
        event = document.pop("event", None)
        record = decode(SaveRecord, document)
        if event == _START:
            return SaveRecord(record.step)
        if event != _SAVE:
            raise RefusedError(f"unknown event {shown(event)}")
        if record.folder is None or not is_plain_name(record.folder) or record.is_full is None:
            raise RefusedError("'folder' must be a name in the run's directory, 'is_full' true or false")
        return record
    except RefusedError as error:
        raise CorruptError.of(_CODE, where, str(error)) from None


def read_journal(run: Path) -> SaveLog:
    """Read the saves of a run so far; none without a log."""
    path = run / LOG_NAME
    raw = read_small(path, SAVE_LOG_BYTES) if path.exists() else b""
    return read_log(raw.decode("utf-8", errors="surrogateescape"), path.name)


def append_record(run: Path, record: SaveRecord) -> None:
    """Append a published save, or a start, durably, after removing a line that a crash truncated."""
    path = run / LOG_NAME
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
            owned.write_all(descriptor, record.to_line().encode())
            owned.sync_file(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, path, "appending a line") from error
