"""Canonical JSON and the digests taken of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

from blake3 import blake3


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys and no white space: the form that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(value: object) -> str:
    """BLAKE3-128 of the canonical JSON, 32 hex digits."""
    return blake3(canonical_json(value)).hexdigest(16)


def parse_digestible(raw: bytes, refuse: Callable[[str], NoReturn]) -> object:
    """Read JSON of which a digest can be taken: no key twice, no number or text without a canonical form.

    `refuse` is called with what is wrong, and raises.
    """

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(items)
        return found if len(found) == len(items) else refuse("a key stands twice in an object")

    def constant(name: str) -> NoReturn:
        refuse(f"{name} is not a number of JSON")

    try:
        document: object = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=constant)
        canonical_json(document)  # refuses what has no digest: half surrogate pairs, numbers out of range
    except (ValueError, RecursionError) as error:
        refuse(f"not JSON: {error}")
    return document
