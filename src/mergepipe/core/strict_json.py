"""JSON from files that may lie: one meaning or an error, in bounded depth; and the one form that is digested."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn, TypeAlias

from blake3 import blake3

from mergepipe.core.units import format_bytes
from mergepipe.errors import CorruptError


def canonical_json(value: object) -> bytes:
    """Encode as JSON with sorted keys and no white space, the form that is digested."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(value: object) -> str:
    """BLAKE3-128 of the canonical JSON, 32 hex digits."""
    return blake3(canonical_json(value)).hexdigest(16)


JsonValue: TypeAlias = "dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None"

MAX_DEPTH = 64
MOST_MADE_BYTES = 768 << 20
"""The memory of the values of one document: half of it goes into a log of 35 MB, a tenth into 262,000 tokens."""
MOST_AT_ONCE_BYTES = 32 << 20
"""Of a document whose members are read one by one otherwise: the header of 30,000 tensors is below it."""
MAX_INTEGER_DIGITS = 20  # 2**64 has 20; also keeps clear of Python's own limit on long integers
_SPACES = " \t\n\r"
_SPACE = re.compile(rf"[{_SPACES}]*")
_USUAL_CHARACTERS, _MOST_CHARACTERS = 1 << 10, 1 << 16  # of one value: the text of a tensor has 100
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD]")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def shown(value: object) -> str:
    """Quote an untrusted value for a message: control characters escaped, length bounded."""
    return _SHORT.repr(value)


def parse_object(
    raw: bytes, *, where: object, code: str, max_integer_digits: int = MAX_INTEGER_DIGITS, hint: str = ""
) -> dict[str, JsonValue]:
    """Parse one JSON object. `code` and `hint` are those of its errors, `where` the file named in them.

    Memory: at most `MOST_MADE_BYTES` for the values, as `made_bytes` estimates them, and the text.
    """
    rules = _Rules(where, code, max_integer_digits, hint)
    if made_bytes(raw) > MOST_MADE_BYTES:
        rules.refuse(f"its values take more than {format_bytes(MOST_MADE_BYTES)} of memory")
    text = rules.decode(raw)
    try:
        document: JsonValue = json.loads(
            text,
            object_pairs_hook=rules.unique_pairs,
            parse_int=rules.integer,
            parse_float=rules.real,
            parse_constant=rules.constant,
        )
    except json.JSONDecodeError as error:
        rules.refuse(f"not valid JSON: {error.msg} at character {error.pos}")
    except RecursionError:
        rules.refuse_depth()
    rules.check_depth(document, MAX_DEPTH)
    if not isinstance(document, dict):
        rules.refuse(f"a JSON object is needed, found {shown(document)}")
    rules.check_surrogates(raw, document)
    return document


def made_bytes(raw: bytes) -> int:
    """Estimate the memory that the values of a JSON text take, from its punctuation: up to three times what they do."""
    n_values = raw.count(b",") + raw.count(b"{") + raw.count(b"[")
    n_names = raw.count(b":")
    return 64 * (n_values + n_names) + 2 * len(raw)


def object_members(raw: bytes, *, where: object, code: str, nested: str = "") -> Iterator[tuple[str, str, JsonValue]]:
    """Yield the members of one JSON object one by one, so that the document never is in memory as a whole.

    Each as ("", key, value), but of an object under the key `nested` its members, as (nested, key, value).
    A text whose values take at most `MOST_AT_ONCE_BYTES` is parsed at once: that is fast. Memory: these bytes, or twice
    a longer text. Its values but strings have at most 64 Ki characters: short ones take 35 times their text.
    """
    if made_bytes(raw) <= MOST_AT_ONCE_BYTES:
        for key, value in parse_object(raw, where=where, code=code).items():
            if key == nested and nested and isinstance(value, dict):
                yield from ((key, name, inner) for name, inner in value.items())
            else:
                yield "", key, value
        return
    rules = _Rules(where, code, MAX_INTEGER_DIGITS)
    text = rules.decode(raw)
    checks = _SURROGATE_ESCAPE.search(raw) is not None
    reader = _MemberReader(text, rules)
    for outer, key, value in reader.members(nested):
        if checks:
            rules.check_surrogates(raw, {key: value})
        yield outer, key, value


class _MemberReader:
    """Reads one object of a text member by member, by the standard library's own scanner of values."""

    def __init__(self, text: str, rules: _Rules) -> None:
        self._text = text
        self._rules = rules
        self._decoder = json.JSONDecoder(
            object_pairs_hook=rules.unique_pairs,
            parse_int=rules.integer,
            parse_float=rules.real,
            parse_constant=rules.constant,
        )
        self._position = 0

    def members(self, nested: str) -> Iterator[tuple[str, str, JsonValue]]:
        """Yield all members; nothing but white space may follow them."""
        if self._next() != "{":
            self._rules.refuse(f"a JSON object is needed, found {shown(self._text[:40])}")
        yield from self._members("", nested)
        if self._next():
            self._refuse("extra data")

    def _members(self, outer: str, nested: str) -> Iterator[tuple[str, str, JsonValue]]:
        self._take("{")
        seen: set[str] = set()
        is_more = self._next() != "}"
        while is_more:
            key = self._key()
            if key in seen:
                self._rules.refuse(f"the key {shown(key)} occurs twice in one JSON object")
            seen.add(key)
            self._take(":")
            if key == nested and nested and self._next() == "{":
                yield from self._members(key, "")
            else:
                value = self._value()
                self._rules.check_depth(value, MAX_DEPTH - (2 if outer else 1))
                yield outer, key, value
            is_more = self._next() == ","
            if is_more:
                self._take(",")
        self._take("}")

    def _next(self) -> str:
        """Return the next character that is no white space; empty at the end."""
        match = _SPACE.match(self._text, self._position)
        self._position = self._position if match is None else match.end()
        return self._text[self._position : self._position + 1]

    def _take(self, character: str) -> None:
        if self._next() != character:
            self._refuse(f"'{character}' is needed")
        self._position += 1

    def _key(self) -> str:
        if self._next() != '"':
            self._refuse("a name in double quotes is needed")
        key = self._value()
        assert isinstance(key, str)
        return key

    def _value(self) -> JsonValue:
        is_text = self._next() == '"'
        for length in (len(self._text),) if is_text else (_USUAL_CHARACTERS, _MOST_CHARACTERS):
            piece = self._text if is_text else self._text[self._position : self._position + length]
            start = self._position if is_text else 0
            is_cut = not is_text and self._position + length < len(self._text)
            value: JsonValue
            try:
                value, end = self._decoder.raw_decode(piece, start)
            except json.JSONDecodeError as error:
                if not is_cut:
                    at = error.pos + self._position - start
                    self._rules.refuse(f"not valid JSON: {error.msg} at character {at}")
            except RecursionError:
                self._rules.refuse_depth()
            else:
                if not is_cut or end < length:  # a number may go on behind the piece
                    self._position += end - start
                    return value
        message = f"the value at character {self._position} has more than {_MOST_CHARACTERS} characters"
        return self._rules.refuse(message)

    def _refuse(self, reason: str) -> NoReturn:
        self._rules.refuse(f"not valid JSON: {reason} at character {self._position}")


@dataclass(frozen=True, slots=True)
class _Rules:
    """Checks that plain JSON parsing lacks."""

    where: object
    code: str
    max_integer_digits: int
    hint: str = ""

    def refuse(self, message: str) -> NoReturn:
        raise CorruptError.of(self.code, self.where, message, self.hint)

    def refuse_depth(self) -> NoReturn:
        self.refuse(f"JSON is nested deeper than {MAX_DEPTH} levels")

    def check_depth(self, value: JsonValue, most_levels: int) -> None:
        if is_too_deep(value, most_levels):
            self.refuse_depth()

    def decode(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse(f"JSON must be UTF-8, found byte 0x{raw[error.start]:02x} at {error.start}")

    def unique_pairs(self, pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    self.refuse(f"the key {shown(key)} occurs twice in one JSON object")
                seen.add(key)
        return unique

    def integer(self, text: str) -> int | float:
        if len(text) > self.max_integer_digits:
            self.refuse(f"the integer {shown(text)} has more than {self.max_integer_digits} characters")
        return -0.0 if text == "-0" else int(text)

    def real(self, text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            self.refuse(f"the number {shown(text)} is out of range")
        return number

    def constant(self, text: str) -> NoReturn:
        self.refuse(f"JSON has no number {text}")

    def check_surrogates(self, raw: bytes, document: JsonValue) -> None:
        if not _SURROGATE_ESCAPE.search(raw):
            return
        try:
            json.dumps(document, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            self.refuse("a string holds half of a surrogate pair, which is no character")


def is_too_deep(value: object, most_levels: int = MAX_DEPTH) -> bool:
    """Whether a parsed value has containers within each other at more than `most_levels`."""
    level = [value]
    for _ in range(most_levels + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = list(chain.from_iterable(item.values() if isinstance(item, dict) else item for item in containers))
    return True
