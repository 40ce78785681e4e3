"""Mark safetensors files whose tensors are differences from a base, and recognise the mark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.location import Location

KIND_KEY = "mergepipe.kind"
BASE_KEY = "mergepipe.base"
FULL_KEY = "mergepipe.full"
DELTA_KIND = "delta"
_DIGEST_DIGITS = 32


@dataclass(frozen=True, slots=True)
class DeltaMark:
    """`base` identifies the base (32 hex digits); `full` names the tensors that are stored as weights after all."""

    base: str
    full: frozenset[str] = frozenset()


def mark_of(metadata: Mapping[str, str], path: Location) -> DeltaMark | None:
    """Read the mark of a file with this metadata; None where it holds plain weights.

    Raises:
        UnsupportedError: it is marked as something that this version does not know.
        CorruptError: the mark is incomplete.
    """
    kind = metadata.get(KIND_KEY)
    if kind is None:
        return None
    if kind != DELTA_KIND:
        raise UnsupportedError.of("delta.kind", path, f"{KIND_KEY} is {shown(kind)}, only '{DELTA_KIND}' is known")
    base = metadata.get(BASE_KEY, "")
    if len(base) != _DIGEST_DIGITS or not set(base) <= set("0123456789abcdef"):
        raise CorruptError.of("delta.mark", path, f"{BASE_KEY} must be 32 hex digits, found {shown(base)}")
    return DeltaMark(base, _names(metadata.get(FULL_KEY, "[]"), path))


def _names(text: str, path: Location) -> frozenset[str]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptError.of("delta.mark", path, f"{FULL_KEY} must be a JSON list of names, found {shown(text)}")
    return frozenset(names)
