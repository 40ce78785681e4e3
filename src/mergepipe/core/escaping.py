"""Escape text from inputs for output: one function each for terminal, Markdown, YAML and JSON.

Names in files are untrusted: they may hold line breaks, terminal control sequences and characters that change the text
direction. For HTML, the template escapes what `printable` returns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path

_YAML_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_MARKDOWN_SPECIAL = re.compile(r"([\\`*\[\]<>|#&!])")
_BACKTICKS = re.compile("`+")


class WrittenAsText:
    """A value whose `str` is what users and records see of it, as a path's is."""

    __slots__ = ()


def printable(text: str) -> str:
    """Return `text` as one line for a terminal, with everything that is not printable escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Return text of several lines with all but line feeds escaped as by `printable`."""
    return "\n".join(printable(line) for line in text.split("\n"))


def as_line(value: object) -> object:
    """Apply `printable` to text and paths, return other values unchanged: a filter for template expressions."""
    is_text = isinstance(value, str | Path | WrittenAsText) and not hasattr(
        value, "__html__"
    )  # markup is escaped already
    return printable(str(value)) if is_text else value


def markdown_text(text: str) -> str:
    """Return `text` as plain text in Markdown, without formatting or HTML."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", printable(text))


def markdown_code(text: str) -> str:
    """Return `text` as a Markdown code span that is valid in a table."""
    shown = printable(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in _BACKTICKS.findall(shown)), default=0))
    space = " " if shown[:1] in ("`", "") or shown[-1:] == "`" else ""
    return f"{fence}{space}{shown}{space}{fence}"


def yaml_scalar(text: str) -> str:
    """Return `text` as a double-quoted YAML string that parses to the same text."""
    return f'"{"".join(map(_yaml_character, text))}"'


def _yaml_character(character: str) -> str:
    if character in _YAML_ESCAPES:
        return _YAML_ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def yaml_document(content: object, width: int) -> str:
    """Return `content` in block style, in its order; characters beyond ASCII are unescaped if all are printable."""
    import yaml

    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=width)
    if text == printable_lines(text):
        return text
    escaped: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=False, width=width)
    return escaped


def json_line(value: object, indent: int | None = None) -> str:
    """Return `value` as ASCII JSON: dataclasses as objects, paths as strings, times in ISO 8601.

    NaN and infinities become null.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path | WrittenAsText):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(f"not for JSON: {type(value).__name__}")
