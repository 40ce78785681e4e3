"""Declare how reports are shown, and lay them out in facts and tables: the same on a terminal and in a notebook.

A field or a property with a label is a fact, `label  value`, in the order of the class's body. A tuple is a fact for
each item. Without a label a report is laid out in its place, rows become a table or, where they hold tables
themselves, a section each, and a text stands as it is. What is None or empty is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mergepipe.core.units import format_bytes, format_percent, format_rate, format_seconds, plural

# --- escape text from inputs for output: one function each for terminal, Markdown, YAML and JSON ---
# Names in files are untrusted: they may hold line breaks, terminal control sequences and characters that change the
# text direction. For HTML, the template escapes what `printable` returns.


_YAML_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_MARKDOWN_SPECIAL = re.compile(r"([\\`*\[\]<>|#&!])")
_BACKTICKS = re.compile("`+")


class WrittenAsText:
    """A value that is shown and stored as `str(value)`."""

    __slots__ = ()


def printable(text: str) -> str:
    """Return `text` as one line for a terminal, with everything that is not printable escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shortened(text: str, limit: int = 60) -> str:
    """Return `text` on one line: cut to `limit` characters with an ellipsis, unprintable characters escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return printable(cut)


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


def json_line(value: object) -> str:
    """Return `value` as ASCII JSON: dataclasses as objects, paths as strings, times in ISO 8601.

    NaN and infinities become null.
    """
    return json.dumps(_plain(value), allow_nan=False)


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


# --- reports in facts and tables ---


F = TypeVar("F", bound=Callable[..., Any])
Form = str | Callable[[Any], str | Sequence[object]]
Fact = tuple[str, str]
MOST_ROWS = 20  # of a table in a notebook
_MOST_CHARACTERS = 60
_MOST_PATTERNS = 4
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")
_MARK = "shown"
_NOTHING = "-"
_FORM_OF_SUFFIX: Mapping[str, Callable[[float], str]] = {
    "per_second": format_rate, "bytes": format_bytes, "seconds": format_seconds, "share": format_percent,
    "loss": "{:.6g}".format, "losses": "{:.6g}".format,
}  # fmt: skip
"""How a number is written, by the end of its field's name; losses of near merges differ in the third digit."""


@dataclass(frozen=True, slots=True)
class Shown:
    """How a field is shown: its label, and its `form`, a template such as `{read_bytes} read` or a function.

    Both are given the report or, of a tuple, each item, unless it is told `once`. `{files:file}` in a template is a
    count with its noun. A function returns one text, several, or an empty one for nothing. A label may be a template,
    too. A field that is `optional` is left out where it is 0.
    """

    label: str = ""
    form: Form = ""
    optional: bool = False
    once: bool = False

    def facts(self, report: object, name: str, value: object) -> Iterator[Fact]:
        """Return a value as a fact, a tuple as one for each item."""
        for item in value if isinstance(value, list | tuple) and not self.once else (report,):
            label = self.label.format_map(_Parts(item)) if "{" in self.label else self.label
            for text in self.texts(item, name, value if item is report else item):
                yield label, text

    def texts(self, subject: object, name: str, value: object) -> list[str]:
        """Return what is told of a value of a report, or of an item."""
        if not self.form:
            return [text_of(name, value)]
        text = self.form(subject) if callable(self.form) else self.form.format_map(_Parts(subject))
        return ([text] if text else []) if isinstance(text, str) else list(map(str, text))


def shown(
    label: str = "",
    form: Form = "",
    *,
    optional: bool = False,
    once: bool = False,
    default: Any = MISSING,
    default_factory: Any = MISSING,
) -> Any:
    """Declare a field that is shown."""
    mark = {_MARK: Shown(label, form, optional, once)}
    return field(default=default, default_factory=default_factory, metadata=mark)


def told(label: str = "", form: Form = "") -> Callable[[F], F]:
    """Mark the function of a property that is shown."""

    def mark(function: F) -> F:
        vars(function)[_MARK] = Shown(label, form)
        return function

    return mark


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under their heads."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Displayed]) -> Table:
        """Make a table of reports, a row each; columns in which no row has anything are left out."""
        columns = {}
        for name, mark in rows[0].SHOWN.items():
            cells = [_cell(row, name, mark) for row in rows]
            if set(cells) != {_NOTHING}:
                columns[mark.label] = cells
        return cls(tuple(columns), tuple(zip(*columns.values(), strict=True)))


Section = list[Fact] | Table | str


class Displayed:
    """A dataclass that is shown by its marked fields and properties. Its `repr` counts long fields.

    `COMPUTED` are the properties that `repr` and JSON have after the fields.
    """

    __slots__ = ()
    COMPUTED: ClassVar[tuple[str, ...]] = ()
    SHOWN: ClassVar[Mapping[str, Shown]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "SHOWN" not in vars(cls):  # `dataclass` makes a class with slots again, without its fields
            marks = ((name, _mark_of(value)) for name, value in vars(cls).items())
            cls.SHOWN = {name: mark for name, mark in marks if mark is not None}

    def __repr__(self) -> str:
        declared_fields = fields(self)  # type: ignore[arg-type]  # a dataclass
        names = (*(declared.name for declared in declared_fields), *self.COMPUTED)
        values = ((name, getattr(self, name)) for name in names)
        texts = (f"{name}={_short(value)}" for name, value in values if not _is_left_out(value, Shown()))
        return f"{type(self).__name__}({', '.join(texts)})"

    def _repr_html_(self) -> str:
        """Return the facts and tables for a notebook."""
        return f"<p>{escape(type(self).__name__)}</p>" + "".join(_html(section) for section in sections(self))


def sections(report: Displayed) -> list[Section]:
    """Lay a report out: lists of facts, tables and texts, in order."""
    parts: list[Section] = []
    facts: list[Fact] = []
    for name, mark in report.SHOWN.items():
        value = getattr(report, name)
        if _is_left_out(value, mark):
            continue
        if mark.label:
            told_facts = list(mark.facts(report, name, value))
            parts.extend([facts] if told_facts and not facts else [])
            facts.extend(told_facts)
            continue
        facts = []
        if isinstance(value, Displayed):
            parts.extend(sections(value))
        elif isinstance(value, tuple):
            holds_tables = not all(mark.label for mark in value[0].SHOWN.values())
            parts.extend([part for row in value for part in sections(row)] if holds_tables else [Table.of(value)])
        else:
            parts.append(value)
    return parts


def text_of(name: str, value: object) -> str:
    """Return a value as text: numbers by the end of the field's name, else with three digits."""
    match value:
        case None:
            return _NOTHING
        case bool():
            return "yes" if value else "no"
        case float() | int():
            suffixed = (form for suffix, form in _FORM_OF_SUFFIX.items() if name.endswith(suffix))
            form = next(suffixed, "{:.3g}".format if isinstance(value, float) else str)
            return form(value)
        case datetime():
            return f"{value:%Y-%m-%d %H:%M}"
        case list() | tuple():
            return ", ".join(text_of(name, item) for item in value)
        case _:
            return str(value)


def shorten_names(names: Iterable[str]) -> str:
    """List names with their numbers replaced by `*`: `model.layers.*.bias (28), rotary.inv_freq`."""
    patterns = Counter(_NUMBER.sub("*", name) for name in names)
    listed = [
        (pattern if len(pattern) <= _MOST_CHARACTERS else f"{pattern[: _MOST_CHARACTERS - 3]}...")
        + (f" ({count})" if count > 1 else "")
        for pattern, count in list(patterns.items())[:_MOST_PATTERNS]
    ]
    n_more = sum(list(patterns.values())[_MOST_PATTERNS:])
    return ", ".join(listed) + (f", and {n_more} more" if n_more else "")


def names_by_reason(reasons_and_names: Iterable[tuple[str, str]]) -> list[str]:
    """Write one line a reason, with the names that it holds for."""
    groups: dict[str, list[str]] = {}
    for reason, name in reasons_and_names:
        groups.setdefault(reason, []).append(name)
    return [f"{reason}: {shorten_names(names)}" for reason, names in groups.items()]


def share_text(part: float, whole: float) -> str:
    """A share in percent with three digits: `12.5 %`; `-` of nothing."""
    return format_percent(part / whole) if whole else _NOTHING


def _mark_of(member: object) -> Shown | None:
    if isinstance(member, Field):
        return member.metadata.get(_MARK)
    return vars(member.fget).get(_MARK) if isinstance(member, property) and member.fget is not None else None


def _is_left_out(value: object, mark: Shown) -> bool:
    return value is None or (mark.optional and not value) or (isinstance(value, str | tuple | list) and not value)


def _cell(row: Displayed, name: str, mark: Shown) -> str:
    value = getattr(row, name)
    if _is_left_out(value, mark):
        return _NOTHING
    return ", ".join(mark.texts(row, name, value)) or _NOTHING


class _Parts(Mapping[str, "_Part"]):
    """The fields of a report by name, for a template."""

    def __init__(self, report: object) -> None:
        self._report = report

    def __getitem__(self, name: str) -> _Part:
        return _Part(name, getattr(self._report, name))

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Part:
    """A field in a template: its text or, with a noun, its count."""

    name: str
    value: Any

    def __format__(self, noun: str) -> str:
        if not noun:
            return text_of(self.name, self.value)
        return plural(self.value if isinstance(self.value, int) else len(self.value), noun)


def _short(value: object) -> str:
    """Return a number or a short text as it is, the size of what is long."""
    text = repr(value)
    if isinstance(value, list | tuple | Mapping) and len(text) > _MOST_CHARACTERS:
        return f"<{len(value)}>"
    if is_dataclass(value):
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 4]}...{text[-1]}"


def _html(section: Section) -> str:
    if isinstance(section, str):
        return f"<pre>{escape(section)}</pre>"
    if isinstance(section, Table):
        rows = [_html_row("th", section.head), *(_html_row("td", row) for row in section.rows[:MOST_ROWS])]
        n_more = len(section.rows) - MOST_ROWS
        rows += [f"<caption>{n_more} more</caption>"] if n_more > 0 else []
    else:
        rows = [_html_row("td", fact) for fact in section]
    return f"<table>{''.join(rows)}</table>"


def _html_row(tag: str, cells: Iterable[str]) -> str:
    row = "".join(f"<{tag} style='text-align:left'>{escape(printable(cell))}</{tag}>" for cell in cells)
    return f"<tr>{row}</tr>"
