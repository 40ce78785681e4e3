"""Parse, format, append to and read the logs of saves during training: one JSON object per line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

from mergepipe.checkpoints.directory import is_plain_name
from mergepipe.core.records import AsText, RefusedError, Size, Within, decode, encode
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError
from mergepipe.storage import owned
from mergepipe.storage.limits import SAVE_LOG_BYTES
from mergepipe.storage.ranges import os_error, read_descriptor_range, read_small
from mergepipe.tailor.selection import EMBED, LM_HEAD, NORM, Unit, UnitKind, layer, unit_named

# --- parse and format logs of saves during training: one JSON object per line, in the paper's form or MergePipe's ---


SAVE = "save"
START = "start"
_CODE = "save-log.damaged"
_MOST_LAYERS = 10**6
_Units: TypeAlias = tuple[Annotated[Unit, AsText(str, unit_named)], ...]


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """One save: which `units` were saved at `step`.

    `folder` (beside the log), `is_full` and `model_units` (all units of the model) are unknown in the paper's form.
    `strategy`, `saved_bytes`, `full_bytes` and `seconds` are for the reader; zero where unknown.
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

    def to_line(self, event: str = SAVE) -> str:
        """Format as MergePipe's log line. Law: `read_log(r.to_line())` gives `r` back."""
        fields = encode(self)
        assert isinstance(fields, dict)
        return _line({"event": event, **fields})

    def to_paper_line(self) -> str:
        """The paper's line: 0 = final norm, 1..L = layers, L+1 = lm_head, L+2 = embeddings; other units have none."""
        n_layers = sum(unit.kind is UnitKind.LAYER for unit in self.model_units)
        numbers = {NORM: 0, LM_HEAD: n_layers + 1, EMBED: n_layers + 2}
        numbers |= {layer(index): index + 1 for index in range(n_layers)}
        return _line({"step": self.step, "flag": sorted(numbers[u] for u in self.units if u in numbers)})


def start_line(step: int) -> str:
    """Format MergePipe's log line for a (re)start of training at `step`."""
    return SaveRecord(step).to_line(START)


def _line(document: Mapping[str, object]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True)
class SaveLog:
    """The saves of a log that belong to the run's final course, in order of steps, each step once.

    When training went back to an earlier step, what had been saved past it belongs to a branch that was given up
    (`dropped_steps`). `cut_line` is the number of a last line that a crash cut short, else 0.
    """

    records: tuple[SaveRecord, ...]
    dropped_steps: tuple[int, ...] = ()
    cut_line: int = 0


def read_log(text: str, where: object = "log", n_layers: int | None = None) -> SaveLog:
    """Read a log in either form. `n_layers` is needed for the paper's where no line names the embeddings.

    Raises:
        CorruptError: `save-log.damaged`, a line is in neither form.
    """
    lines = text.split("\n")
    is_cut = bool(lines[-1].strip()) and not _is_json(lines[-1])
    complete = lines[:-1] if is_cut else lines
    events = [_read_line(line, f"{where}:{i}") for i, line in enumerate(complete, 1) if line.strip()]
    n_layers = _n_layers(events) if n_layers is None else n_layers
    records: list[SaveRecord] = []
    dropped: set[int] = set()
    for event in events:
        is_start = isinstance(event, SaveRecord) and event.folder is None
        dropped |= {r.step for r in records if r.step > event.step}
        records = [r for r in records if r.step < event.step or (is_start and r.step == event.step)]
        if not is_start:
            records.append(event if isinstance(event, SaveRecord) else event.record(n_layers))
    return SaveLog(tuple(records), tuple(sorted(dropped)), len(lines) if is_cut else 0)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _PaperLine:
    """One line in the paper's form; `where` names it in messages."""

    step: Size
    flag: tuple[Annotated[int, Within(0, _MOST_LAYERS)], ...]
    where: str = ""

    def record(self, n_layers: int) -> SaveRecord:
        """Return the save of a model of `n_layers` layers."""
        beyond = next((number for number in self.flag if number > n_layers + 2), None)
        if beyond is not None:
            raise CorruptError.of(
                _CODE, self.where, f"unit {beyond} of a model with {n_layers} layers",
                f"0 is the final norm, 1 to {n_layers} the layers, {n_layers + 1} lm_head, {n_layers + 2} embed",
            )  # fmt: skip
        others = {0: NORM, n_layers + 1: LM_HEAD, n_layers + 2: EMBED}
        units = {others[number] if number in others else layer(number - 1) for number in self.flag}
        return SaveRecord(self.step, tuple(sorted(units)))


def _n_layers(events: Iterable[SaveRecord | _PaperLine]) -> int:
    """Return the number of layers, from MergePipe's lines, or from the largest number, which is the embeddings'."""
    largest = 2
    for event in events:
        if isinstance(event, _PaperLine):
            largest = max(largest, *event.flag, 0)
        elif event.model_units:
            return sum(unit.kind is UnitKind.LAYER for unit in event.model_units)
    return largest - 2


def _read_line(text: str, where: str) -> SaveRecord | _PaperLine:
    """Read one line; a start is a record without a folder."""
    document: dict[str, JsonValue] = parse_object(text.encode("utf-8", "surrogatepass"), where=where, code=_CODE)
    try:
        if document.keys() >= {"step", "flag"}:
            return replace(decode(_PaperLine, {key: document[key] for key in ("step", "flag")}), where=where)
        if not document.keys() >= {"event", "step"}:
            raise RefusedError('neither {"step", "flag"} nor {"event", "step", ...}')
        event = document.pop("event")
        if event == START:
            return SaveRecord(decode(SaveRecord, document).step)
        if event != SAVE:
            raise RefusedError(f"unknown event {shown(event)}")
        record = decode(SaveRecord, document)
        if record.folder is None or not is_plain_name(record.folder) or record.is_full is None:
            raise RefusedError("'folder' must be a name in the run's directory, 'is_full' true or false")
        return record
    except RefusedError as error:
        raise CorruptError.of(_CODE, where, str(error)) from None


# --- append to and read the logs of partial saves in a run's directory; rank 0 appends durably ---


LOG_NAME = "partial-saves.jsonl"
PAPER_LOG_NAME = "flags.jsonl"


def read_journal(run: Path) -> SaveLog:
    """Read the saves so far; none without a log."""
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
