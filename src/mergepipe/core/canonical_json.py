"""Canonical JSON, and digests of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

from blake3 import blake3


def canonical_json(value: object) -> bytes:
    """Encode as JSON with sorted keys and no white space, the form that is digested."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(value: object) -> str:
    """BLAKE3-128 of the canonical JSON, 32 hex digits."""
    return blake3(canonical_json(value)).hexdigest(16)


def parse_digestible(raw: bytes, refuse: Callable[[str], NoReturn]) -> object:
    """Parse JSON that has a canonical form: no duplicate keys, only finite numbers and valid text.

    `refuse` is called with the reason, and must raise.
    """

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(items)
        return members if len(members) == len(items) else refuse("an object has the same key twice")

    def constant(name: str) -> NoReturn:
        refuse(f"{name} is not a valid JSON number")

    try:
        document: object = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=constant)
        canonical_json(document)  # refuses what has no digest: half surrogate pairs, numbers out of range
    except (ValueError, RecursionError) as error:
        refuse(f"not JSON: {error}")
    return document
