"""Notices: parts of a recipe, and tensors, that have no effect, or another than it seems. Told, not refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_POSITION = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?: (?P<key>.*))?")


@dataclass(frozen=True, slots=True)
class Notice:
    """One part of a recipe that is ignored or changed: `message` says how, `elsewhere` what it would mean elsewhere.

    `key` is its place (`models[1].parameters.lambda`) in `line` of `file`; `other_lines` say the same thing again.
    `changes_result`: the result is another than what is written there asks for. Such a notice is a warning, which
    `--quiet` does not silence; any other only says that something has no effect.
    """

    code: str
    file: str
    line: int
    key: str
    message: str
    elsewhere: str = ""
    other_lines: tuple[int, ...] = ()
    changes_result: bool = False

    @property
    def kind(self) -> str:
        """The word that it is shown with."""
        return "warning" if self.changes_result else "notice"

    @property
    def where(self) -> str:
        """The position, as error messages write it."""
        return f"{self.file}:{self.line} {self.key}".rstrip() if self.line else self.file

    @property
    def text(self) -> str:
        """Everything but the position."""
        again = f" (also in line{'s' * (len(self.other_lines) > 1)} {', '.join(map(str, self.other_lines))})"
        return self.message + (f"; {self.elsewhere}" if self.elsewhere else "") + (again if self.other_lines else "")

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(frozen=True, slots=True)
class DroppedTensor:
    """A tensor of an expert that no task uses: `model` is the path as the recipe writes it."""

    model: str
    tensor: str
    reason: str


def notice_at(code: str, where: str, message: str, elsewhere: str = "", *, changes_result: bool = False) -> Notice:
    """Make a notice at a position as error messages write it: `recipe.yml:7 models[1].parameters.lambda`."""
    position = _POSITION.fullmatch(where)
    if position is None:
        return Notice(code, where, 0, "", message, elsewhere, changes_result=changes_result)
    file, line, key = position["file"], int(position["line"]), position["key"] or ""
    return Notice(code, file, line, key, message, elsewhere, changes_result=changes_result)


def told_once(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Join notices that say the same of several lines of a file, in order of their first line's report."""
    first: dict[tuple[str, str, str, str], Notice] = {}
    for notice in notices:
        same = (notice.code, notice.file, notice.message, notice.elsewhere)
        earlier = first.setdefault(same, notice)
        if notice.line not in (earlier.line, *earlier.other_lines):
            first[same] = replace(earlier, other_lines=(*earlier.other_lines, notice.line))
    return tuple(first.values())
