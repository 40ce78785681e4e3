"""Append sealed lines to a file of ours: the checksum before each line tells a torn one from a whole one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from blake3 import blake3

from mergepipe.storage import owned
from mergepipe.storage.ranges import os_error

APPENDING: Final = os.O_WRONLY | os.O_APPEND
_CHECK_DIGITS = 16


def sealed(payload: bytes, previous: str = "") -> bytes:
    """Return a line without its newline: the checksum, a space, the payload.

    Sealed with the checksum of the `previous` line, it is valid only at its position.
    """
    return blake3(previous.encode() + payload).hexdigest(_CHECK_DIGITS // 2).encode() + b" " + payload


def seal_of(line: bytes) -> str:
    """Return the checksum that a sealed line begins with."""
    return line[:_CHECK_DIGITS].decode()


def payload_of(line: bytes, previous: str = "") -> bytes | None:
    """Return the payload of a line without its newline; None if the line is torn or changed."""
    payload = line[_CHECK_DIGITS + 1 :]
    return payload if line == sealed(payload, previous) else None


class SealedFile:
    """An open file that lines are appended to. `doing` tells in errors what could not be done."""

    def __init__(self, path: Path, doing: str, open_descriptor: Callable[[], int]) -> None:
        self._path = path
        self._doing = doing
        self._descriptor = -1
        try:
            self._descriptor = open_descriptor()
        except OSError as error:
            raise os_error(error, path, doing) from error

    def append(self, lines: bytes, *, is_durable: bool = True) -> None:
        """Append bytes; with `is_durable` they survive a power loss."""
        try:
            owned.write_all(self._descriptor, lines)
            if is_durable:
                owned.sync_file(self._descriptor)
        except OSError as error:
            raise os_error(error, self._path, self._doing) from error

    def close(self) -> None:
        """Close the file; once is enough."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
