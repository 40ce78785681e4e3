"""The generated pages of the reference say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.reference import pages
from tools.reference.error_codes import UnknownCodeError, error_codes

from mergepipe.cli.app import build_command

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def package(root: Path, **modules: str) -> Path:
    """A package of modules that are given as text."""
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text, encoding="utf-8")
    return root


def test_reference__is_what_the_code_says() -> None:
    for name, text in pages().items():
        written = (REFERENCE / name).read_text(encoding="utf-8")
        assert written == text, f"docs/reference/{name} is not what the code says: run `make reference`"
        if name == "cli.md":
            assert all(f"\n## mergepipe {command}" in text for command in build_command().commands)


def test_error_codes__are_followed_through_helpers_constants_and_choices(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        rules="""
PREFIX = "table"


class Rules:
    code: str
    where: str

    def refuse(self, what, message):
        raise CorruptError.of(f"{self.code}.{what}", self.where, message)

    def check(self, value):
        self.refuse("row", f"row {value} is empty")


def read(raw, *, code):
    return Rules(code, "file").check(raw)


class Codes:
    key: str
    hint: str


CODES = Codes("field.key", "write it again")


def take(codes: Codes, fields, key):
    if key not in fields:
        raise CorruptError.of(codes.key, key, "a field is missing", codes.hint)


def choose(value):
    kind = "hole" if value else "overlap"
    raise UnsupportedError.of(f"{PREFIX}.{kind}", value, "rows must touch")


def collect(names):
    gone = [Problem("table.gone", name, "is gone") for name in names]
    raise NotFoundError(*gone)
""",
        caller="""
from rules import read


def load(raw):
    return read(raw, code="header"), read(raw, code="index")
""",
    )
    entries = error_codes(source)
    assert {code: (entry.classes, entry.messages) for code, entry in entries.items()} == {
        "field.key": ({"CorruptError"}, ["a field is missing"]),
        "header.row": ({"CorruptError"}, ["row … is empty"]),
        "index.row": ({"CorruptError"}, ["row … is empty"]),
        "table.hole": ({"UnsupportedError"}, ["rows must touch"]),
        "table.overlap": ({"UnsupportedError"}, ["rows must touch"]),
        "table.gone": ({"NotFoundError"}, ["is gone"]),
    }


def test_error_codes__refuse_a_code_that_the_syntax_does_not_tell(tmp_path: Path) -> None:
    source = package(tmp_path, rules="def fail(names):\n    raise CorruptError.of(names[0], '', 'is wrong')\n")
    with pytest.raises(UnknownCodeError, match=r"rules\.py:2: the code names\[0\] is not followed"):
        error_codes(source)
