"""The log of saves during training: one JSON object per line, which rank 0 appends durably."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from mergepipe.checkpoints.directory import is_plain_name
from mergepipe.core.records import AsText, RefusedError, Size, decode, encode
from mergepipe.core.strict_json import parse_object, shown
from mergepipe.errors import CorruptError
from mergepipe.storage.contract import SAVE_LOG_BYTES
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.output import make_folders, replace_durably
from mergepipe.storage.ranges import read_small
from mergepipe.tailor.selection import Unit, unit_named

LOG_NAME = "partial-saves.jsonl"
_SAVE = "save"
_START = "start"
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
    for number, line in enumerate(complete, 1):
        if not line.strip():
            continue
        event = _read_line(line, f"{where}:{number}")
        is_save = event.folder is not None
        while records and (records[-1].step > event.step or (is_save and records[-1].step == event.step)):
            given_up = records.pop()
            if given_up.step > event.step:
                dropped.add(given_up.step)
        if is_save:
            records.append(event)
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
    """Append a published save, or a start, durably and in one step; a line that a crash truncated goes."""
    path = run / LOG_NAME
    make_folders(run)
    content = read_small(path, SAVE_LOG_BYTES) if path.exists() else b""
    complete = content[: content.rfind(b"\n") + 1]
    replace_durably(path, complete + record.to_line().encode(), Ledger())
