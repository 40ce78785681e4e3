"""Parse one JSON object field by field: every value typed, no field missing, no field unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from mergepipe.errors import CorruptError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FieldCodes:
    """The error codes of one format: for a key, for a value's type, for a value. `hint` says what to do."""

    key: str
    kind: str
    value: str
    hint: str


class JsonFields:
    """One JSON object of a document. Fields are taken one by one; `done` refuses the remaining ones."""

    def __init__(self, value: object, codes: FieldCodes, where: object, place: str = "") -> None:
        self._codes = codes
        self._where = where
        self._place = place
        if not isinstance(value, dict):
            self.fail(codes.kind, "an object is needed")
        self._values: dict[str, object] = value
        self._left: dict[str, object] = dict(value)
        self._known: list[str] = []

    def fail(self, code: str, message: str) -> NoReturn:
        """Refuse the document, naming the location of this object in it."""
        place = f"{self._place}: " if self._place else ""
        raise CorruptError.of(code, self._where, place + message, self._codes.hint)

    def refuse(self, message: str) -> NoReturn:
        """Refuse a value of this object."""
        self.fail(self._codes.value, message)

    def take(self, key: str) -> object:
        """Take the value of a required key."""
        self._known.append(key)
        if key not in self._left:
            self.fail(self._codes.key, f"'{key}' is missing")
        return self._left.pop(key)

    def has(self, key: str) -> bool:
        self._known.append(key)
        return key in self._left

    def remaining(self) -> tuple[str, ...]:
        """The keys not taken yet."""
        return tuple(self._left)

    def mapping(self) -> Mapping[str, object]:
        """The whole object, unparsed."""
        return self._values

    def text(self, key: str) -> str:
        value = self.take(key)
        return value if isinstance(value, str) else self._wrong(key, "is not a string")

    def optional_text(self, key: str) -> str | None:
        value = self.take(key)
        return value if value is None or isinstance(value, str) else self._wrong(key, "is not a string")

    def flag(self, key: str) -> bool:
        value = self.take(key)
        return value if isinstance(value, bool) else self._wrong(key, "is neither true nor false")

    def integer(self, key: str) -> int:
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, "is not an integer")
        return value

    def size(self, key: str) -> int:
        """An integer that is not negative."""
        value = self.integer(key)
        return value if value >= 0 else self.refuse(f"'{key}' is negative")

    def integers(self, key: str) -> tuple[int, ...]:
        values = self.array(key)
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            self._wrong(key, "is not an array of integers")
        return tuple(value for value in values if isinstance(value, int))

    def sizes(self, key: str) -> tuple[int, ...]:
        """Integers that are not negative."""
        values = self.integers(key)
        return values if all(value >= 0 for value in values) else self.refuse(f"'{key}' holds a negative number")

    def number(self, key: str) -> float:
        return self._number(self.take(key), key)

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(self._number(value, key) for value in self.array(key))

    def _number(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, "is not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return number if math.isfinite(number) else self.refuse(f"'{key}' is not finite")

    def array(self, key: str) -> list[object]:
        value = self.take(key)
        return value if isinstance(value, list) else self._wrong(key, "is not an array")

    def objects(self, key: str) -> Iterator[JsonFields]:
        for i, value in enumerate(self.array(key)):
            yield JsonFields(value, self._codes, self._where, f"{self._inside(key)}[{i}]")

    def object(self, key: str) -> JsonFields:
        return JsonFields(self.take(key), self._codes, self._where, self._inside(key))

    def optional_object(self, key: str) -> JsonFields | None:
        value = self.take(key)
        return None if value is None else JsonFields(value, self._codes, self._where, self._inside(key))

    def each(self, key: str, make: Callable[[JsonFields], T]) -> tuple[T, ...]:
        """Parse every object of an array with `make`, which must take all of its fields."""
        return tuple(fields.read(make) for fields in self.objects(key))

    def read(self, make: Callable[[JsonFields], T]) -> T:
        """Parse this object with `make`, which must take all of its fields."""
        made = make(self)
        self.done()
        return made

    def scalars(self) -> dict[str, float | bool]:
        """Take all remaining fields as numbers and flags."""
        return {key: self._scalar(key) for key in self.remaining()}

    def _scalar(self, key: str) -> float | bool:
        value = self.take(key)
        return value if isinstance(value, bool) else self._number(value, key)

    def done(self) -> None:
        """Refuse fields that were not taken."""
        for key in sorted(self._left):
            self.fail(self._codes.key, f"unknown key '{key[:40]}', {did_you_mean(key[:40], self._known)}")

    def _wrong(self, key: str, message: str) -> NoReturn:
        self.fail(self._codes.kind, f"'{key}' {message}")

    def _inside(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key
