"""JSON from files that may lie: one meaning or an error, in bounded depth."""

from __future__ import annotations

import json
import math
import re
import reprlib
from typing import NoReturn, TypeAlias

from mergepipe.core.values import dataclass
from mergepipe.errors import CorruptError

JsonValue: TypeAlias = "dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None"

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 20  # 2**64 has 20; also keeps clear of Python's own limit on long integers
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD]")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def shown(value: object) -> str:
    """Quote an untrusted value for a message: control characters escaped, length bounded."""
    return _SHORT.repr(value)


def parse_object(
    raw: bytes, *, where: object, code: str, max_integer_digits: int = MAX_INTEGER_DIGITS
) -> dict[str, JsonValue]:
    """Parse one JSON object. `code` is the prefix of the error codes, `where` the file named in messages.

    Raises:
        CorruptError: `.not_utf8`, `.not_json`, `.not_object`, `.too_deep`, `.duplicate_key`, `.bad_number` or
            `.lone_surrogate` after the prefix.
    """
    rules = _Rules(where, code, max_integer_digits)
    text = rules.decode(raw)
    if is_too_deep(raw):
        rules.refuse("too_deep", f"JSON is nested deeper than {MAX_DEPTH} levels")
    try:
        document: JsonValue = json.loads(
            text,
            object_pairs_hook=rules.unique_pairs,
            parse_int=rules.integer,
            parse_float=rules.real,
            parse_constant=rules.constant,
        )
    except json.JSONDecodeError as error:
        rules.refuse("not_json", f"not valid JSON: {error.msg} at character {error.pos}")
    if not isinstance(document, dict):
        rules.refuse("not_object", f"a JSON object is needed, found {shown(document)}")
    rules.check_surrogates(raw, document)
    return document


@dataclass(frozen=True, slots=True)
class _Rules:
    """Checks that plain JSON parsing lacks."""

    where: object
    code: str
    max_integer_digits: int

    def refuse(self, what: str, message: str) -> NoReturn:
        raise CorruptError.of(f"{self.code}.{what}", self.where, message)

    def decode(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse("not_utf8", f"JSON must be UTF-8, found byte 0x{raw[error.start]:02x} at {error.start}")

    def unique_pairs(self, pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    self.refuse("duplicate_key", f"the key {shown(key)} occurs twice in one JSON object")
                seen.add(key)
        return unique

    def integer(self, text: str) -> int | float:
        if len(text) > self.max_integer_digits:
            self.refuse("bad_number", f"the integer {shown(text)} has more than {self.max_integer_digits} characters")
        return -0.0 if text == "-0" else int(text)

    def real(self, text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            self.refuse("bad_number", f"the number {shown(text)} is out of range")
        return number

    def constant(self, text: str) -> NoReturn:
        self.refuse("bad_number", f"JSON has no number {text}")

    def check_surrogates(self, raw: bytes, document: JsonValue) -> None:
        if not _SURROGATE_ESCAPE.search(raw):
            return
        try:
            json.dumps(document, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            self.refuse("lone_surrogate", "a string holds half of a surrogate pair, which is no character")


def is_too_deep(raw: bytes) -> bool:
    """Whether brackets nest past `MAX_DEPTH` before the first syntax error, found without recursion."""
    if b"\\" in raw:
        raw = _ESCAPE.sub(b"", raw)
    brackets = _STRING.sub(b"", raw.translate(None, _NOT_STRUCTURE))
    depth = 0
    for byte in brackets:
        if byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        else:
            depth -= 1
    return False
