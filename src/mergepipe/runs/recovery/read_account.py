"""Keep the account of expert bytes read for one output, in its staging directory, across all runs that write it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mergepipe.core.canonical_json import canonical_json
from mergepipe.errors import CorruptError
from mergepipe.storage import owned
from mergepipe.storage.limits import ACCOUNT_BYTES
from mergepipe.storage.local import os_error
from mergepipe.storage.output import sync_directory
from mergepipe.storage.owner import ACCOUNT_NAME
from mergepipe.storage.sealed_lines import APPENDING, SealedFile, payload_of, sealed

ACCOUNT_FORMAT: Final = "mergepipe-reads/1"


@dataclass(frozen=True, slots=True)
class ReadTotals:
    """Expert bytes requested for one output: no more than `expert_bytes` count; `forgiven_bytes` were read before a
    run started over with the whole budget."""

    expert_bytes: int = 0
    forgiven_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.expert_bytes, self.forgiven_bytes) < 0:
            raise ValueError(f"negative bytes: {self}")

    def forgiven(self) -> ReadTotals:
        """Return the totals of a run that restarts with the whole budget: earlier bytes are forgiven."""
        return ReadTotals(0, self.forgiven_bytes + self.expert_bytes)


class ReadAccount:
    """An open account; records are appended, and the last complete one is valid."""

    def __init__(self, directory: Path, *, is_durable: bool) -> None:
        """Open or create the account in a staging directory; with `is_durable` every record survives a power loss."""
        self._is_durable = is_durable
        path = directory / ACCOUNT_NAME
        self._file = SealedFile(path, "writing the account of what is read", lambda: _opened(path))
        try:
            if is_durable:
                sync_directory(directory)
                sync_directory(directory.parent)
        except BaseException:
            self.close()
            raise

    def record(self, totals: ReadTotals) -> None:
        """Append the bytes that may have been read in total: before reading a reservation, then the exact number."""
        payload = canonical_json(
            {"expert_bytes": totals.expert_bytes, "forgiven_bytes": totals.forgiven_bytes, "format": ACCOUNT_FORMAT}
        )
        # A record begins with a newline: one that was torn before it spoils no other.
        self._file.append(b"\n" + sealed(payload) + b"\n", is_durable=self._is_durable)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _opened(path: Path) -> int:
    try:
        return owned.open_file(path, flags=APPENDING)
    except FileNotFoundError:
        return owned.create_file(path, flags=APPENDING)


def read_totals(directory: Path) -> ReadTotals:
    """Read the totals of earlier runs from a staging directory; zeros without an account.

    A torn last record tells of reads that were never made.
    """
    path = directory / ACCOUNT_NAME
    try:
        raw = owned.read_file(path, ACCOUNT_BYTES)
    except FileNotFoundError:
        return ReadTotals()
    except OSError as error:
        raise os_error(error, path, "reading it") from error
    lines = [line for line in raw.split(b"\n") if line]
    for line in reversed(lines):
        totals = _parsed(line)
        if totals is not None:
            return totals
    if len(lines) > 1 or (lines and raw.endswith(b"\n")):
        hint = "start over with --no-resume, which counts nothing of it"
        raise CorruptError.of("work-log.damaged", path, "the account of what was read is damaged", hint)
    return ReadTotals()


def _parsed(line: bytes) -> ReadTotals | None:
    payload = payload_of(line)
    if payload is None:
        return None
    record = json.loads(payload)
    if not isinstance(record, dict) or record.get("format") != ACCOUNT_FORMAT:
        return None
    return ReadTotals(int(record["expert_bytes"]), int(record["forgiven_bytes"]))
