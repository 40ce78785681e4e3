"""What pages and docstrings say of the code: the generated reference, formats on disk, and dotted names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tools.reference import pages
from tools.reference.error_codes import UnknownCodeError, error_codes

from support.command_line import command_tree
from support.places import DOCS
from support.source_code import trees_with

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def package(root: Path, **modules: str) -> Path:
    """A package of modules that are given as text."""
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text, encoding="utf-8")
    return root


@pytest.mark.transformers
def test_reference__is_what_the_code_says() -> None:
    for name, text in pages().items():
        written = (REFERENCE / name).read_text(encoding="utf-8")
        assert written == text, f"docs/reference/{name} is not what the code says: run `make reference`"
        if name == "cli.md":
            assert all(f"\n## mergepipe {command}" in text for command in command_tree().commands)


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


MOST_FORMATS = 10  # raised by a decision record alone
NOT_ON_DISK = {"mergepipe-report", "mergepipe-content"}  # what commands print, and what is digested
_TITLE = re.compile(r"(mergepipe-[a-z-]+)/\d+")
_ROW = re.compile(r"^\| [^|]+ \| `?([\w-]+)`? \|", re.MULTILINE)


def named_in_source() -> set[str]:
    """The names of formats: with a version, or in a constant or a call that is about a format."""
    names = set()
    for _, tree in trees_with("mergepipe-", "RecordFormat"):
        for node in ast.walk(tree):
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


_DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
_FILES = ("bin", "blocks", "json", "md", "pt", "safetensors", "stats", "yml")
_TENSORS = ("lm_head", "model", "output")  # names in checkpoints begin with these
_LIBRARIES = ("dataclasses", "torch")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    """The names that a module or a class binds, those of its methods' `self` too."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Assign(targets=targets):
                yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


@cache
def known_names() -> frozenset[str]:
    """The dotted ends of every module, and of what modules and classes hold: `work.Task.name` and `Task.name`."""
    known: set[str] = set()
    for place, tree in trees_with():
        path = ("mergepipe", *place.removesuffix(".py").removesuffix("/__init__").split("/"))
        owners = [(path, tree.body)]
        owners += [((*path, node.name), node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner, body in owners:
            for whole in (owner, *((*owner, name) for name in names_of(body))):
                known |= {".".join(whole[start:]) for start in range(len(whole) - 1)}
    return frozenset(known)


@cache
def codes_of_the_reference() -> frozenset[str]:
    return frozenset(re.findall(r"^\| `([a-z0-9_.-]+)` \|", (DOCS / "reference/errors.md").read_text(), re.MULTILINE))


def is_known(name: str, tree: _Documented) -> bool:
    first, last = name.split(".", 1)[0], name.rsplit(".", 1)[1]
    if name in known_names() or name in codes_of_the_reference() or last in _FILES or first in _TENSORS:
        return True
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    fields = set(names_of(tree.body)) if isinstance(tree, ast.ClassDef) else set()
    return first in {*arguments, *fields, *_LIBRARIES}


def dotted_names() -> Iterator[tuple[str, str, _Documented]]:
    for place, tree in trees_with("`"):
        for node in ast.walk(tree):
            if isinstance(node, _Documented):
                for name in _DOTTED.findall(ast.get_docstring(node) or ""):
                    yield place, name, node


def test_docstrings__name_what_exists() -> None:
    unknown = sorted({f"{place}: {name}" for place, name, tree in dotted_names() if not is_known(name, tree)})
    assert unknown == [], "\n".join(unknown)


@pytest.mark.parametrize("name", ["gaps.Gaps", "storage.local.no_such", "Plan.no_such", "mergepipe.no_such"])
def test_docstrings__that_name_what_is_gone_are_found(name: str) -> None:
    assert not is_known(name, ast.parse("def plan(options): ..."))


def test_papers_page__names_modules_and_commands_that_there_are() -> None:
    section = (
        (DOCS / "papers.md").read_text(encoding="utf-8").partition("### The papers' words")[2].partition("\n## ")[0]
    )
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    commands = set(command_tree().commands)
    assert len(rows) > 12
    for term, module, command in rows:
        modules = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", module)
        assert modules, term
        assert all((DOCS.parent / "src/mergepipe" / path).is_file() for path in modules), modules
        named = [text.split()[0] for text in re.findall(r"`([a-z]+)[^`_]*`", command)]
        assert named, term
        assert set(named) <= commands, term
