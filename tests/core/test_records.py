"""The codec of records: what it writes it reads again, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.core.records import AsText, RecordFormat, RefusedError, Size, decode, encode
from mergepipe.errors import CorruptError, UnsupportedError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: int = 0


ORIGIN = Point(0)


def _parse_hex(text: str) -> int:
    return int(text, 16)


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    size_bytes: Size
    shape: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("the name is forbidden")


@dataclass(frozen=True, slots=True)
class Whole:
    title: str
    colour: Colour
    parts: tuple[Part, ...]
    pair: tuple[float, bool]
    facts: Mapping[str, float | bool]
    address: Annotated[int, AsText(hex, _parse_hex)]
    first: Part | None
    point: Point = ORIGIN
    anything: object = None
    share: float = 1.0

    @property
    def length(self) -> int:
        return len(self.parts)


FORMAT = RecordFormat("test-whole", 2, Whole, "make it again", stated=("length",), variant="sample")
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PARTS = st.builds(Part, st.text("ab"), st.integers(0, 2**63 - 1), st.lists(st.integers(0, 9)).map(tuple))
WHOLES = st.builds(
    Whole,
    title=st.text(st.characters(exclude_categories=["Cs"])),
    colour=st.sampled_from(Colour),
    parts=st.lists(PARTS, max_size=3).map(tuple),
    pair=st.tuples(FLOATS, st.booleans()),
    facts=st.dictionaries(st.text("xyz"), FLOATS | st.booleans(), max_size=3),
    address=st.integers(0, 2**40),
    first=st.none() | PARTS,
    point=st.builds(Point, st.integers(-5, 5), st.integers(-5, 5)),
    share=FLOATS,
)
EXAMPLE = Whole("t", Colour.RED, (Part("a", 1), Part("b", 2, (3, 4))), (1.5, True), {"x": 1.0}, 255, None)


@given(WHOLES)
def test_decode__gives_back_what_was_encoded(whole: Whole) -> None:
    assert decode(Whole, json.loads(json.dumps(encode(whole)))) == whole
    assert FORMAT.parse(FORMAT.to_json(whole), "there") == whole


def test_encode__leaves_out_what_equals_its_default() -> None:
    content = encode(EXAMPLE)
    assert content == {
        "title": "t",
        "colour": "red",
        "parts": [{"name": "a", "size_bytes": 1}, {"name": "b", "size_bytes": 2, "shape": [3, 4]}],
        "pair": [1.5, True],
        "facts": {"x": 1.0},
        "address": "0xff",
        "first": None,
    }


def test_encode__writes_numbers_of_a_field_as_it_is_annotated() -> None:
    """So that a record and what is read of it have one digest."""
    content = encode(replace(EXAMPLE, share=2, facts={"x": 3, "y": True}))
    assert json.dumps(content).count("2.0") == 1
    assert '"facts": {"x": 3.0, "y": true}' in json.dumps(content)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("title", 5, "title: a string is needed, found 5"),
        ("colour", "green", "colour: one of red, blue is needed, found 'green'"),
        ("parts", {}, "parts: an array is needed, found {}"),
        ("parts", [{"name": "a"}], "parts[0]: 'size_bytes' is missing"),
        ("parts", [{"name": "a", "size_bytes": -1}], "parts[0].size_bytes: an integer from 0 on is needed, found -1"),
        ("parts", [{"name": "a", "size_bytes": True}], "parts[0].size_bytes: an integer from 0 on is needed"),
        ("parts", [{"name": "a", "size_bytes": 2**63}], "parts[0].size_bytes: an integer from 0 on is needed"),
        ("parts", [{"name": "a", "size_bytes": 1.0}], "parts[0].size_bytes: an integer from 0 on is needed"),
        ("parts", [{"name": "a", "size_bytes": 1, "shape": [1, "2"]}], "parts[0].shape[1]: an integer"),
        ("parts", [{"name": "a", "size": 1}], "parts[0]: unknown key 'size'; known: name, shape"),
        ("parts", [{"name": "forbidden", "size_bytes": 1}], "parts[0]: the name is forbidden"),
        ("pair", [1.0], "pair: 1 items, 2 are needed"),
        ("pair", [True, True], "pair[0]: a finite number is needed, found True"),
        ("pair", [float("inf"), True], "pair[0]: a finite number is needed, found inf"),
        ("facts", {"a b": "c"}, "facts.'a b': true or false or a finite number is needed, found 'c'"),
        ("address", "0xgg", "address: invalid literal"),
        ("first", 1, "first: an object is needed, found 1"),
        ("point", [1], "point: 1 items, 2 are needed"),
        ("titel", "t", "unknown key 'titel'; did you mean 'title'?"),
    ],
)
def test_decode__refuses_with_the_place_and_what_is_needed(key: str, value: object, message: str) -> None:
    content = encode(EXAMPLE)
    assert isinstance(content, dict)
    with pytest.raises(RefusedError) as caught:
        decode(Whole, {**content, key: value})
    assert str(caught.value).startswith(message)


def _changed(**changes: object) -> bytes:
    return json.dumps({**FORMAT.content(EXAMPLE), **changes}).encode()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "a JSON object is needed"),
        (b"{}", "its format is None, 'test-whole/2' is needed"),
        (_changed(format="test/2"), "its format is 'test/2'"),
        (_changed(format="test-whole/two"), "its format is"),
        (_changed(title="another"), "its digest is"),
        (_changed(length=3), "its length is 3, its content's '2'"),
        (_changed(title=None), "title: a string is needed"),
    ],
)
def test_parse__refuses_what_was_changed(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptError) as caught:
        FORMAT.parse(raw, "there")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("format.damaged", "there")
    assert problem.message.startswith(message)


@pytest.mark.parametrize(
    ("raw", "code", "hint"),
    [
        (_changed(format="test-whole/1"), "format.version", "make it again"),
        (_changed(format="test-whole/3"), "format.version", "use a newer version of MergePipe"),
        (_changed(kind="other"), "format.kind", ""),
    ],
)
def test_parse__names_another_version_and_another_kind(raw: bytes, code: str, hint: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        FORMAT.parse(raw, "there")
    assert (caught.value.code, caught.value.problems[0].hint) == (code, hint)


def test_recognises__by_the_beginning_of_a_file() -> None:
    assert FORMAT.recognises(FORMAT.to_json(EXAMPLE)[:60])
    assert not FORMAT.recognises(b'{\n "format": "test-whole/2",\n "kind": "other",')
    assert not FORMAT.recognises(b"other")
