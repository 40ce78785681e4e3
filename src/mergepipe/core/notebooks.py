"""Display values in Python: a short `repr`, and a table in notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any

from mergepipe.core.escaping import printable

MOST_ROWS = 20
_MOST_CHARACTERS = 60
_BYTES_SUFFIXES = ("_bytes", "bytes")


class Displayed:
    """A dataclass whose `repr` counts long fields instead of printing them; notebooks show it as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in _values(self))
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        """Return the fields as a table, with tables of the values in them."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name.replace('_', ' '))}</th>"
            f"<td style='text-align:left'>{_cell(name, value)}</td></tr>"
            for name, value in _values(self)
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"


def _values(value: object) -> list[tuple[str, Any]]:
    assert is_dataclass(value)
    pairs = [(field.name, getattr(value, field.name)) for field in fields(value)]
    return [(name, item) for name, item in pairs if item is not None and item != () and item != ""]


def _is_many(value: object) -> bool:
    return isinstance(value, Sequence | Mapping) and not isinstance(value, str)


def _short(value: object) -> str:
    """Return a number or a short text as it is, the size of what is long."""
    if _is_many(value) and len(repr(value)) > _MOST_CHARACTERS:
        assert isinstance(value, Sequence | Mapping)
        return f"<{len(value)}>"
    if is_dataclass(value):
        return f"<{type(value).__name__}>"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 4]}...{text[-1]}"


def _cell(name: str, value: object) -> str:
    if _is_many(value) and value:
        assert isinstance(value, Sequence | Mapping)
        items = list(value)
        if all(is_dataclass(item) for item in items):
            return _table(items)
        texts = [f"{key}: {value[key]}" for key in value] if isinstance(value, Mapping) else [str(x) for x in items]
        more = f" and {len(texts) - MOST_ROWS} more" if len(texts) > MOST_ROWS else ""
        return escape(printable(", ".join(texts[:MOST_ROWS]) + more))
    return escape(printable(_text(name, value)))


def _table(items: Sequence[object]) -> str:
    names = [field.name for field in fields(items[0])]  # type: ignore[arg-type]  # each is a dataclass
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(printable(_text(name, getattr(item, name))))}</td>" for name in names) + "</tr>"
        for item in items[:MOST_ROWS]
    )
    more = f"<caption>{len(items) - MOST_ROWS} more</caption>" if len(items) > MOST_ROWS else ""
    return f"<table>{more}<tr>{head}</tr>{rows}</table>"


def _text(name: str, value: object) -> str:
    """Return a field as text; bytes in the unit that fits."""
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith(_BYTES_SUFFIXES):
        from mergepipe.core.units import format_bytes

        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return _short(value) if _is_many(value) or is_dataclass(value) else str(value)
