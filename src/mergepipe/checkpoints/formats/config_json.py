"""A model's configuration as loaders parse it: one judgement for what is merged and for what is verified."""

from __future__ import annotations

import json
from typing import Any

from mergepipe.core.strict_json import MAX_DEPTH, is_too_deep, shown
from mergepipe.errors import CorruptError

Json = dict[str, Any]

_HINT = "put the model's own configuration in its place"


def parse_config(raw: bytes, where: object) -> Json:
    """Parse a configuration: one JSON object in UTF-8, nested no deeper than `MAX_DEPTH`.

    As in loaders, the last of two equal keys counts, and NaN and half surrogate pairs pass.

    Raises:
        CorruptError: `config.not-json`, `config.not-object`, `config.too-deep`.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"is not JSON: byte 0x{raw[error.start]:02x} at {error.start} is not UTF-8"
        raise CorruptError.of("config.not-json", where, message, _HINT) from None
    if is_too_deep(raw):
        raise CorruptError.of("config.too-deep", where, f"is nested deeper than {MAX_DEPTH} levels", _HINT)
    try:
        content = json.loads(text)
    except ValueError as error:
        message = f"is not JSON: {error}" if raw.strip() else "is empty, a JSON object is needed"
        raise CorruptError.of("config.not-json", where, message, _HINT) from None
    if not isinstance(content, dict):
        raise CorruptError.of("config.not-object", where, f"is not a JSON object, found {shown(content)}", _HINT)
    return content


def config_bytes(content: Json) -> bytes:
    """Write a configuration; text that is no UTF-8 (half surrogate pairs) is escaped as it was."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode()
