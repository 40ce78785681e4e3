"""Texts that are compared with recorded files, and the form in which results are recorded: without what moves.

`pytest --update-goldens` writes the files anew; see `tests/surface`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import mergepipe

WIDTH = 150
"""A JSON value that fits in so many columns stands on one line."""
MOVING = {
    re.compile(r"seconds|_ns$|per_second|^(created|started|finished|time|times|modified)$"): "<time>",
    re.compile(r"^(free|peak_rss|payload|file|output|catalog|metadata|read)_bytes$"): "<bytes>",
    re.compile(r"^(pid|host|inode|version|threads|mergepipe_version)$"): "<machine>",
}
"""Fields whose values change from run to run or from machine to machine, and what is recorded of them."""
_REPLACED = (
    (re.compile(r"\b[0-9a-f]{16,}\b"), "<digest>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|\+00:00)?"), "<time>"),
)
_PRECISE = re.compile(r"\b\d+\.\d{13,}(e[-+]?\d+)?\b")


@dataclass(frozen=True, slots=True)
class Goldens:
    """Recorded files in a folder; with `is_updating` they are written instead of compared."""

    folder: Path
    is_updating: bool

    def check(self, name: str, texts: Mapping[str, str]) -> None:
        """Compare texts with the files of the folder `name`, one a text; what differs fails as unified diffs."""
        folder = self.folder / name
        if self.is_updating:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("*.txt"):
                path.unlink()
            for title, text in texts.items():
                (folder / f"{title.replace(' ', '-')}.txt").write_text(text, encoding="utf-8")
        recorded = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}
        found = {title.replace(" ", "-"): text for title, text in texts.items()}
        titles = sorted(recorded.keys() | found)
        differing = [title for title in titles if _rounded(recorded.get(title)) != _rounded(found.get(title))]
        diffs = ["\n".join(_diff(title, recorded.get(title, ""), found.get(title, ""))) for title in differing]
        if diffs:
            raise AssertionError(f"if this is meant: pytest tests/surface --update-goldens\n{chr(10).join(diffs)}")


def _rounded(text: str | None) -> str | None:
    """Round numbers of full precision to 12 digits: in which order sums are taken depends on the processor."""
    return None if text is None else _PRECISE.sub(lambda number: f"{float(number[0]):.12g}", text)


def _diff(title: str, recorded: str, found: str) -> Iterator[str]:
    before, after = recorded.splitlines(), found.splitlines()
    return difflib.unified_diff(before, after, f"{title} (recorded)", title, lineterm="", n=2)


def steady_text(text: str, places: Mapping[str, str]) -> str:
    """A text with digests, times, this version and the given places replaced by names."""
    for place, name in sorted(places.items(), key=lambda each: -len(each[0])):
        text = text.replace(place, name)
    text = text.replace(mergepipe.__version__, "<version>")
    for pattern, name in _REPLACED:
        text = pattern.sub(name, text)
    return text


def steady_value(value: object, places: Mapping[str, str], key: str = "") -> object:
    """A JSON value with what moves replaced by names."""
    name = next((name for pattern, name in MOVING.items() if pattern.search(key)), None)
    if name is not None and value is not None and not isinstance(value, dict | list):
        return name
    match value:
        case dict():
            return {steady_text(k, places): steady_value(each, places, k) for k, each in value.items()}
        case list():
            return [steady_value(each, places, key) for each in value]
        case str():
            return steady_text(value, places)
        case _:
            return value


def layout(value: object, indent: str = "") -> str:
    """A JSON value of few lines of some width: a table row stays one line, so a diff shows rows."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list) or not value:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        entries = [f"{json.dumps(key, ensure_ascii=False)}: {layout(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(f"{inner}{entry}" for entry in entries) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{inner}{layout(each, inner)}" for each in value) + f"\n{indent}]"
