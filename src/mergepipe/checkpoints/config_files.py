"""Configurations of models: JSON from others, read as loaders read it, and written."""

from __future__ import annotations

import json
from typing import Any

from mergepipe.core.strict_json import MAX_DEPTH, is_too_deep, shown
from mergepipe.errors import damaged

Json = dict[str, Any]
TIED_KEY = "tie_word_embeddings"

_HINT = "put the model's own configuration in its place"


def parse_config(raw: bytes, where: object) -> Json:
    """Parse a configuration: one JSON object in UTF-8, nested no deeper than `MAX_DEPTH`.

    As in loaders, the last of two equal keys counts, and NaN and half surrogate pairs pass.
    """
    content = _parsed(raw, where)
    if not isinstance(content, dict):
        raise damaged(where, f"is not a JSON object, found {shown(content)}", _HINT)
    return content


def _parsed(raw: bytes, where: object) -> object:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"is not JSON: byte 0x{raw[error.start]:02x} at {error.start} is not UTF-8"
        raise damaged(where, message, _HINT) from None
    try:
        content: object = json.loads(text)
        if is_too_deep(content):
            raise RecursionError
    except RecursionError:
        raise damaged(where, f"is nested deeper than {MAX_DEPTH} levels", _HINT) from None
    except ValueError as error:
        message = f"is not JSON: {error}" if raw.strip() else "is empty, a JSON object is needed"
        raise damaged(where, message, _HINT) from None
    return content


def config_bytes(content: Json) -> bytes:
    """Write a configuration; text that is no UTF-8 (half surrogate pairs) is escaped as it was."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode()
