"""Parse, format, append to and read the logs of saves during training: one JSON object per line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mergepipe.checkpoints.directory import is_plain_name
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.errors import CorruptError
from mergepipe.storage import owned
from mergepipe.storage.limits import SAVE_LOG_BYTES
from mergepipe.storage.ranges import os_error, read_descriptor_range, read_small
from mergepipe.tailor.selection import EMBED, LM_HEAD, NORM, Unit, UnitKind, layer

# --- parse and format logs of saves during training: one JSON object per line, in the paper's form or MergePipe's ---


SAVE = "save"
START = "start"
_CODE = "save-log.damaged"
_PLAIN_UNITS = {str(unit): unit for unit in (EMBED, NORM, LM_HEAD)}
_PAPER_KEYS = frozenset({"step", "flag"})
_OWN_KEYS = frozenset({"event", "step"})
_MAX_STEP = 2**62
_MAX_LAYERS = 10**6


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """One save: which `units` were saved at `step`.

    `folder` (beside the log), `is_full` and `model_units` (all units of the model) are unknown in the paper's form.
    `strategy`, `saved_bytes`, `full_bytes` and `seconds` are for the reader; zero where unknown.
    """

    step: int
    units: tuple[Unit, ...]
    folder: str | None = None
    is_full: bool | None = None
    model_units: tuple[Unit, ...] = ()
    strategy: str = ""
    saved_bytes: int = 0
    full_bytes: int = 0
    seconds: float = 0.0

    def to_line(self) -> str:
        """Format as MergePipe's log line. Law: `read_log(r.to_line())` gives `r` back."""
        return _line({
            "event": SAVE, "step": self.step, "full": self.is_full, "folder": self.folder,
            "units": [str(unit) for unit in self.units], "model": [str(unit) for unit in self.model_units],
            "strategy": self.strategy, "bytes": self.saved_bytes, "full_bytes": self.full_bytes,
            "seconds": round(self.seconds, 6),
        })  # fmt: skip

    def to_paper_line(self) -> str:
        """The paper's line: 0 = final norm, 1..L = layers, L+1 = lm_head, L+2 = embeddings; other units have none."""
        n_layers = sum(unit.kind is UnitKind.LAYER for unit in self.model_units)
        numbers = {NORM: 0, LM_HEAD: n_layers + 1, EMBED: n_layers + 2}
        numbers |= {layer(index): index + 1 for index in range(n_layers)}
        return _line({"step": self.step, "flag": sorted(numbers[u] for u in self.units if u in numbers)})


def start_line(step: int) -> str:
    """Format MergePipe's log line for a (re)start of training at `step`."""
    return _line({"event": START, "step": step})


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
    """Read a log in either form. `n_layers` is needed for the paper's where no line names the embeddings."""
    lines = text.split("\n")
    is_cut = bool(lines[-1].strip()) and not _is_json(lines[-1])
    complete = lines[:-1] if is_cut else lines
    parsed = [_Line(f"{where}:{i}", line).parse() for i, line in enumerate(complete, 1) if line.strip()]
    found_layers = n_layers if n_layers is not None else _paper_layers(parsed)
    records: list[SaveRecord] = []
    dropped: list[int] = []
    for event in parsed:
        beyond = event.step + 1 if event.is_start else event.step
        dropped += [r.step for r in records if r.step >= beyond and (event.is_start or r.step > event.step)]
        records = [r for r in records if r.step < beyond]
        if not event.is_start:
            records.append(event.record(found_layers))
    return SaveLog(tuple(records), tuple(sorted(set(dropped))), len(lines) if is_cut else 0)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Event:
    """One line. `flags` are the paper's numbers, None in our own form."""

    where: str
    step: int
    is_start: bool
    flags: tuple[int, ...] | None = None
    recorded: SaveRecord | None = None

    def record(self, n_layers: int) -> SaveRecord:
        if self.recorded is not None:
            return self.recorded
        return SaveRecord(self.step, tuple(sorted(self._units(n_layers))))

    def _units(self, n_layers: int) -> Iterator[Unit]:
        for number in dict.fromkeys(self.flags or ()):
            if number > n_layers + 2:
                raise CorruptError.of(
                    _CODE, self.where, f"unit {number} of a model with {n_layers} layers",
                    f"0 is the final norm, 1 to {n_layers} the layers, {n_layers + 1} lm_head, {n_layers + 2} embed",
                )  # fmt: skip
            yield {0: NORM, n_layers + 1: LM_HEAD, n_layers + 2: EMBED}.get(number, layer(max(0, number - 1)))


def _paper_layers(events: Iterable[_Event]) -> int:
    """Return the number of layers, from MergePipe's lines, or from the largest number, which is the embeddings'."""
    listed = list(events)
    for event in listed:
        if event.recorded is not None and event.recorded.model_units:
            return sum(unit.kind is UnitKind.LAYER for unit in event.recorded.model_units)
    return max((number for event in listed for number in event.flags or ()), default=2) - 2


@dataclass(frozen=True, slots=True)
class _Line:
    """One raw line of the log."""

    where: str
    text: str

    def parse(self) -> _Event:
        document = parse_object(self.text.encode("utf-8", "surrogatepass"), where=self.where, code=_CODE)
        if document.keys() >= _PAPER_KEYS:
            return _Event(self.where, self._step(document), is_start=False, flags=self._flags(document["flag"]))
        if not document.keys() >= _OWN_KEYS:
            self._refuse('neither {"step", "flag"} nor {"event", "step", ...}')
        if document["event"] == START:
            return _Event(self.where, self._step(document), is_start=True)
        if document["event"] != SAVE:
            self._refuse(f"unknown event {shown(document['event'])}")
        return _Event(self.where, self._step(document), is_start=False, recorded=self._own(document))

    def _refuse(self, message: str) -> NoReturn:
        raise CorruptError.of(_CODE, self.where, message)

    def _step(self, document: Mapping[str, JsonValue]) -> int:
        return self._count(document["step"], "step")

    def _count(self, value: JsonValue, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_STEP:
            self._refuse(f"'{key}' must be a count, found {shown(value)}")
        return value

    def _flags(self, value: JsonValue) -> tuple[int, ...]:
        if not isinstance(value, list):
            self._refuse(f"'flag' must be a list of unit numbers, found {shown(value)}")
        numbers = tuple(self._count(number, "flag") for number in value)
        if any(number > _MAX_LAYERS for number in numbers):
            self._refuse(f"unit {max(numbers)} is beyond any model")
        return numbers

    def _own(self, document: Mapping[str, JsonValue]) -> SaveRecord:
        folder, full = document.get("folder"), document.get("full")
        if not isinstance(folder, str) or not is_plain_name(folder) or not isinstance(full, bool):
            self._refuse("'folder' must be a name in the run's directory, 'full' true or false")
        strategy, seconds = document.get("strategy", ""), document.get("seconds", 0.0)
        if not isinstance(strategy, str) or not isinstance(seconds, int | float):
            self._refuse("'strategy' must be a word, 'seconds' a number")
        return SaveRecord(
            step=self._step(document),
            units=self._units(document.get("units")),
            folder=folder,
            is_full=full,
            model_units=self._units(document.get("model")),
            strategy=strategy,
            saved_bytes=self._count(document.get("bytes", 0), "bytes"),
            full_bytes=self._count(document.get("full_bytes", 0), "full_bytes"),
            seconds=float(seconds),
        )

    def _units(self, value: JsonValue) -> tuple[Unit, ...]:
        if not isinstance(value, list):
            self._refuse(f"units must be a list of names, found {shown(value)}")
        return tuple(self._unit(name) for name in value)

    def _unit(self, name: JsonValue) -> Unit:
        text = name if isinstance(name, str) else ""
        number = text.removeprefix("layer ")
        if text in _PLAIN_UNITS:
            return _PLAIN_UNITS[text]
        if number != text and number.isascii() and number.isdecimal() and len(number) < len(str(_MAX_LAYERS)):
            return layer(int(number))
        if not text.startswith("other:") or text == "other:":
            self._refuse(f"{shown(name)} names no unit")
        return Unit(UnitKind.OTHER, name=text.removeprefix("other:"))


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
