"""Fields of a JSON object are taken with their types; what is missing, wrong or left over is refused by its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mergepipe.core.json_fields import FieldCodes, JsonFields
from mergepipe.errors import CorruptError

CODES = FieldCodes("x.key", "x.type", "x.value", "make it again")
CONTENT = {"name": "a", "size": 3, "parts": [{"size": 1}, {"size": -2}], "none": None, "far": 10**400, "flags": [True]}


def fields() -> JsonFields:
    return JsonFields(CONTENT, CODES, "f.json")


@pytest.mark.parametrize(
    ("read", "code", "message"),
    [
        (lambda f: f.text("size"), "x.type", "'size' is not a string"),
        (lambda f: f.optional_text("size"), "x.type", "'size' is not a string"),
        (lambda f: f.integer("name"), "x.type", "'name' is not an integer"),
        (lambda f: f.flag("size"), "x.type", "'size' is neither true nor false"),
        (lambda f: f.number("far"), "x.value", "'far' is not finite"),
        (lambda f: f.integers("flags"), "x.type", "'flags' is not an array of integers"),
        (lambda f: f.array("name"), "x.type", "'name' is not an array"),
        (lambda f: f.text("nmae"), "x.key", "'nmae' is missing"),
        (lambda f: f.object("name"), "x.type", "name: an object is needed"),
        (lambda f: f.each("parts", lambda p: p.size("size")), "x.value", "parts[1]: 'size' is negative"),
        (lambda f: f.each("parts", lambda p: p.has("sise")), "x.key", "parts[0]: unknown key 'size', did you mean"),
    ],
)
def test_json_fields__refuse_what_is_not_asked_for(
    read: Callable[[JsonFields], object], code: str, message: str
) -> None:
    with pytest.raises(CorruptError) as caught:
        read(fields())
    assert (caught.value.code, caught.value.problems[0].where) == (code, "f.json")
    assert caught.value.problems[0].message.startswith(message)


def test_json_fields__give_what_is_there() -> None:
    found = fields()
    assert (found.text("name"), found.size("size"), found.optional_text("none")) == ("a", 3, None)
    assert [part.integer("size") for part in found.objects("parts")] == [1, -2]
    assert found.remaining() == ("far", "flags")
    assert found.mapping() == CONTENT
