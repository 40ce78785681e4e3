"""Seal what one process leaves for another: the checksum in front tells what is torn or changed from what is whole."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

_CHECK_DIGITS: Final = 16


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
