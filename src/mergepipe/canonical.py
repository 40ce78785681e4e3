"""Canonical JSON and the digests taken of it."""

from __future__ import annotations

import json

from blake3 import blake3


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys and no white space: the form that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(value: object) -> str:
    """BLAKE3-128 of the canonical JSON, 32 hex digits."""
    return blake3(canonical_json(value)).hexdigest(16)
