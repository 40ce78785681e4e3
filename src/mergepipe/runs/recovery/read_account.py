"""Keep the account of expert bytes read for one output, in its staging directory, across all runs that write it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from mergepipe.core.canonical_json import canonical_json
from mergepipe.errors import CorruptError
from mergepipe.storage import owned
from mergepipe.storage.limits import ACCOUNT_BYTES
from mergepipe.storage.local import os_error
from mergepipe.storage.output import sync_directory
from mergepipe.storage.owner import ACCOUNT_NAME

ACCOUNT_FORMAT: Final = "mergepipe-reads/1"
_CHECK_DIGITS = 16
_DOING = "writing the account of what is read"


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
        self._path = directory / ACCOUNT_NAME
        self._is_durable = is_durable
        flags = os.O_WRONLY | os.O_APPEND
        try:
            try:
                self._descriptor = owned.open_file(self._path, flags=flags)
            except FileNotFoundError:
                self._descriptor = owned.create_file(self._path, flags=flags)
        except OSError as error:
            raise os_error(error, self._path, _DOING) from error
        try:
            if is_durable:
                sync_directory(directory)
                sync_directory(directory.parent)
        except BaseException:
            self.close()
            raise

    def record(self, totals: ReadTotals) -> None:
        """Append the bytes that may have been read in total: before reading a reservation, at the end the exact number.

        Raises:
            StorageError: it could not be written.
        """
        payload = canonical_json(
            {"expert_bytes": totals.expert_bytes, "forgiven_bytes": totals.forgiven_bytes, "format": ACCOUNT_FORMAT}
        )
        # A record begins with a newline: one that was torn before it spoils no other.
        try:
            owned.write_all(self._descriptor, b"\n" + _checksum(payload) + b" " + payload + b"\n")
            if self._is_durable:
                owned.sync_file(self._descriptor)
        except OSError as error:
            raise os_error(error, self._path, _DOING) from error

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_totals(directory: Path) -> ReadTotals:
    """Read the totals of earlier runs from a staging directory; zeros without an account.

    A torn last record tells of reads that were never made.

    Raises:
        CorruptError: `resume.account`, the account is there and cannot be understood.
        StorageError: it cannot be read.
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
        raise CorruptError.of("resume.account", path, "the account of what was read is damaged", hint)
    return ReadTotals()


def _parsed(line: bytes) -> ReadTotals | None:
    payload = line[_CHECK_DIGITS + 1 :]
    if line[: _CHECK_DIGITS + 1] != _checksum(payload) + b" ":
        return None
    record = json.loads(payload)
    if not isinstance(record, dict) or record.get("format") != ACCOUNT_FORMAT:
        return None
    return ReadTotals(int(record["expert_bytes"]), int(record["forgiven_bytes"]))


def _checksum(payload: bytes) -> bytes:
    return blake3(payload).hexdigest(_CHECK_DIGITS // 2).encode()
