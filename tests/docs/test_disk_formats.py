"""The table of formats lists every format on disk that the source names, and there are not to be more of them."""

from __future__ import annotations

import ast
import re

from support.places import DOCS
from support.source_code import source_texts

MOST_FORMATS = 10  # raised by a decision record alone
NOT_ON_DISK = {"mergepipe-report", "mergepipe-content"}  # what commands print, and what is digested
_TITLE = re.compile(r"(mergepipe-[a-z-]+)/\d+")
_ROW = re.compile(r"^\| [^|]+ \| `?([\w-]+)`? \|", re.MULTILINE)


def named_in_source() -> set[str]:
    """The names of formats: with a version, or in a constant or a call that is about a format."""
    names = set()
    for code in source_texts().values():
        for node in ast.walk(ast.parse(code)):
            match node:
                case ast.Constant(value=str(text)) if match_ := _TITLE.fullmatch(text):
                    names.add(match_[1])
                case ast.Call(func=ast.Name(id="RecordFormat"), args=[ast.Constant(value=str(name)), *_]):
                    names.add(name)
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str(name))) if (
                    target.endswith(("FORMAT_NAME", "FORMAT"))
                ) and re.fullmatch(r"mergepipe-[a-z-]+", name):
                    names.add(name)
    return names - NOT_ON_DISK


def listed() -> list[str]:
    rows = _ROW.findall((DOCS / "internals" / "formats" / "index.md").read_text(encoding="utf-8"))
    return [row for row in rows if row != "format"]


def test_formats__are_all_listed_and_not_more_than_there_were() -> None:
    assert {name for name in listed() if name.startswith("mergepipe-")} == named_in_source()
    assert len(listed()) == len(set(listed())) <= MOST_FORMATS
