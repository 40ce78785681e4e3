"""Records: the one strict codec between frozen dataclasses and JSON, which their annotations drive.

A bool, number, string or None is itself, an enum its value, a tuple an array, a mapping an object, a dataclass an
object of its fields without those that equal their default, and what is annotated `AsText` a string. Numbers are
finite, integers have 64 bits. Laws: `decode(type(r), encode(r)) == r`; what `encode` cannot have written is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from mergepipe.core.strict_json import JsonValue, digest_of, parse_object, shown
from mergepipe.errors import CorruptError, UnsupportedError, did_you_mean

T = TypeVar("T")
_FORMAT, _KIND, _DIGEST = "format", "kind", "digest"
_CODE = "format.damaged"
_LARGEST = 2**63 - 1
_LEVELS_IN_LINES = 3


@dataclass(frozen=True, slots=True)
class Within:
    """An annotation of a field: an integer in `[least, most]`."""

    least: int
    most: int = _LARGEST


@dataclass(frozen=True, slots=True)
class AsText:
    """An annotation of a field that is written as a string; `parse` raises a ValueError or KeyError for a wrong one."""

    format: Callable[[Any], str]
    parse: Callable[[str], object]


Size = Annotated[int, Within(0)]
"""A count, or a number of bytes."""

Seed = Annotated[int, Within(-_LARGEST - 1, 2 * _LARGEST + 1)]
"""An integer of 64 bits, with a sign or without."""


class RefusedError(ValueError):
    """A value that is not one of a record: `place` is where it stands in the document."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.place = ""

    def inside(self, place: str) -> RefusedError:
        """Return the error with the place of what surrounds the value."""
        self.place = f"{place}.{self.place}" if self.place and not self.place.startswith("[") else place + self.place
        return self

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class _Codec(NamedTuple):
    """How values of one type are written and read, and what they are called."""

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode(record: object) -> JsonValue:
    """Return a record, or a tuple of records, as plain JSON values."""
    if type(record) is tuple:
        return [encode(item) for item in record]
    return cast("JsonValue", _codec_of(cast(Any, type(record))).encode(record))


def decode(kind: type[T], value: object) -> T:
    """Make a record of plain JSON values."""
    return cast("T", _codec_of(cast(Any, kind)).decode(value))


@dataclass(frozen=True, slots=True)
class RecordFormat(Generic[T]):
    """A format on disk: one JSON object with `format`, the fields of a `record`, and what is worked out of them.

    `variant` tells records of one format apart, under the key `kind`. `stated` are properties that are written, and
    compared when read. A sealed record ends with a `digest` of all of it. `again` says how to get a sound record
    ("merge again"), `elsewhere` what reads the other variants. Law: `f.parse(f.to_json(r), where) == r`.
    """

    name: str
    version: int
    record: type[T]
    again: str
    stated: tuple[str, ...] = ()
    variant: str = ""
    elsewhere: str = ""
    is_sealed: bool = True

    @property
    def _hint(self) -> str:
        return f"it is damaged, or another file: {self.again}"

    @property
    def title(self) -> str:
        """The value of the key `format`."""
        return f"{self.name}/{self.version}"

    def content(self, record: T) -> dict[str, JsonValue]:
        """Return the whole document as plain values."""
        fields = encode(record)
        assert isinstance(fields, dict)
        head = {_FORMAT: self.title, **({_KIND: self.variant} if self.variant else {})}
        content = {**head, **{name: getattr(record, name) for name in self.stated}, **fields}
        return {**content, _DIGEST: digest_of(content)} if self.is_sealed else content

    def to_json(self, record: T) -> bytes:
        """Encode as readable JSON with a stable order of keys."""
        return (_in_lines(self.content(record), _LEVELS_IN_LINES) + "\n").encode()

    def recognises(self, head: bytes) -> bool:
        """Whether a file that begins like this was written in this format, in whatever version."""
        kind = f'"{_KIND}": "{self.variant}"' if self.variant else ""
        return f'"{_FORMAT}": "{self.name}/'.encode() in head and kind.encode() in head

    def parse(self, raw: bytes, where: object) -> T:
        """Read a document; `where` names the file in messages."""
        return self.of_content(parse_object(raw, where=where, code=_CODE, hint=self._hint), where)

    def of_content(self, document: Mapping[str, object], where: object) -> T:
        """Read a document that is parsed already."""
        self._check_version(document.get(_FORMAT), where)
        envelope = [_FORMAT, *self.stated]
        if self.variant:
            envelope.append(_KIND)
            if document.get(_KIND) != self.variant:
                message = f"is of the kind {shown(document.get(_KIND))}, '{self.variant}' is needed"
                raise UnsupportedError.of("format.kind", where, message, self.elsewhere)
        fields = {key: value for key, value in document.items() if key not in envelope}
        if self.is_sealed:
            fields.pop(_DIGEST, None)
        try:
            record = decode(self.record, fields)
        except RefusedError as error:
            self._refuse(where, str(error))
        for name in self.stated:
            written, computed = document.get(name), getattr(record, name)
            if written != computed:
                self._refuse(where, f"its {name} is {shown(written)}, its content's '{computed}'")
        if self.is_sealed:
            computed = digest_of({key: value for key, value in document.items() if key != _DIGEST})
            if document.get(_DIGEST) != computed:
                self._refuse(where, f"its digest is {shown(document.get(_DIGEST))}, its content's '{computed}'")
        return record

    def _check_version(self, title: object, where: object) -> None:
        name, _, number = title.partition("/") if isinstance(title, str) else ("", "", "")
        if name != self.name or not (number.isascii() and number.isdigit() and len(number) < 10):
            self._refuse(where, f"its format is {shown(title)}, '{self.title}' is needed")
        if int(number) != self.version:
            hint = "use a newer version of MergePipe" if int(number) > self.version else self.again
            message = f"its format is '{title}', this version reads '{self.title}' only"
            raise UnsupportedError.of("format.version", where, message, hint)

    def _refuse(self, where: object, message: str) -> NoReturn:
        raise CorruptError.of(_CODE, where, message, self._hint)


def _in_lines(value: JsonValue, levels: int, start: str = "\n") -> str:
    """Encode as JSON with a line for each item of the outer levels. `indent` of the library is 10 times slower."""
    if not levels or not value or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = start + " "
    if isinstance(value, list):
        return f"[{inner}{f',{inner}'.join(_in_lines(item, levels - 1, inner) for item in value)}{start}]"
    items = (f"{_in_lines(key, 0)}: {_in_lines(item, levels - 1, inner)}" for key, item in value.items())
    return f"{{{inner}{f',{inner}'.join(items)}{start}}}"


# --- codecs of types ---


@cache
def _codec_of(kind: Any) -> _Codec:
    """Return the codec of a type as it is annotated."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _annotated(_codec_of(arguments[0]) if not isinstance(arguments[1], AsText) else None, arguments[1])
    if origin in (Union, types.UnionType):
        return _union([_codec_of(argument) for argument in arguments])
    if origin is tuple:
        return _array_codec(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_codec_of(arguments[1]))
    if dataclasses.is_dataclass(kind):
        return _record_codec(kind)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if issubclass(kind, Enum):
        return _enum(kind)
    if issubclass(kind, tuple):  # a named one
        hints = get_type_hints(kind, include_extras=True)
        codec = _array_codec(tuple(hints[name] for name in kind._fields))
        return codec._replace(decode=lambda value: kind(*codec.decode(value)))
    raise TypeError(f"{kind} is no type of a record")


def _same(value: Any) -> Any:
    return value


def _refuse(needed: str, value: object) -> RefusedError:
    return RefusedError(f"{needed} is needed, found {shown(value)}")


def _exact(name: str, kind: type) -> _Codec:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _refuse(name, value)
        return value

    return _Codec(name, _same, read)


def _integer(least: int, most: int) -> _Codec:
    name = "an integer" if least < 0 else f"an integer from {least} on"

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _refuse(name, value)
        return value

    return _Codec(name, _same, read)


def _read_number(value: Any) -> float:
    if type(value) not in (float, int) or not math.isfinite(value):
        raise _refuse("a finite number", value)
    return float(value)


def _annotated(codec: _Codec | None, note: object) -> _Codec:
    if isinstance(note, Within):
        return _integer(note.least, note.most)
    if isinstance(note, AsText):
        parse = note.parse

        def read(value: Any) -> object:
            text = _SCALARS[str].decode(value)
            try:
                return parse(text)
            except KeyError:
                raise RefusedError(f"{shown(text)} is unknown") from None
            except ValueError as error:
                raise RefusedError(str(error)) from None

        return _Codec("a string", note.format, read)
    assert codec is not None
    return codec


def _union(codecs: Sequence[_Codec]) -> _Codec:
    """Return the codec of a union of scalars, the exact ones first, or of one type and None."""
    codecs = sorted(codecs, key=lambda codec: codec is _SCALARS[float])
    others = [codec for codec in codecs if codec is not _SCALARS[types.NoneType]]
    if len(others) == 1 and len(codecs) == 2:
        only = others[0]
        return _Codec(
            f"{only.name} or null",
            lambda value: None if value is None else only.encode(value),
            lambda value: None if value is None else only.decode(value),
        )
    name = " or ".join(codec.name for codec in codecs)
    has_integers = any(codec is _SCALARS[int] for codec in codecs)

    def write(value: Any) -> Any:
        return float(value) if type(value) is int and not has_integers else value

    def read(value: Any) -> Any:
        for codec in codecs:
            try:
                return codec.decode(value)
            except RefusedError:
                continue
        raise _refuse(name, value)

    return _Codec(name, write, read)


def _read_items(value: Any, decoders: Sequence[Callable[[Any], Any]] | Callable[[Any], Any]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _refuse("an array", value)
    readers = [decoders] * len(value) if callable(decoders) else decoders
    if len(readers) != len(value):
        raise RefusedError(f"{len(value)} items, {len(readers)} are needed")
    items: list[Any] = []
    try:
        for item, read in zip(value, readers, strict=True):
            items.append(read(item))
    except RefusedError as error:
        raise error.inside(f"[{len(items)}]") from None
    return tuple(items)


def _array_codec(arguments: tuple[Any, ...]) -> _Codec:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        codec = _codec_of(arguments[0])
        write, read = codec.encode, codec.decode
        return _Codec(
            "an array",
            list if write is _same else lambda values: [write(value) for value in values],
            lambda value: _read_items(value, read),
        )
    codecs = [_codec_of(argument) for argument in arguments]
    readers = [codec.decode for codec in codecs]
    return _Codec(
        "an array",
        lambda values: [codec.encode(value) for codec, value in zip(codecs, values, strict=True)],
        lambda value: _read_items(value, readers),
    )


def _enum(kind: type[Enum]) -> _Codec:
    members = {member.value: member for member in kind}
    name = "one of " + ", ".join(map(str, members))

    def read(value: Any) -> Enum:
        if type(value) is not str or value not in members:
            raise _refuse(name, value)
        return members[value]

    return _Codec(name, lambda member: member.value, read)


def _mapping(codec: _Codec) -> _Codec:
    def read(value: Any) -> Mapping[str, Any]:
        values: dict[str, Any] = {}
        for name, item in _object(value).items():
            try:
                values[name] = codec.decode(item)
            except RefusedError as error:
                raise error.inside(name if name.isidentifier() else shown(name)) from None
        return values

    return _Codec("an object", lambda values: {name: codec.encode(value) for name, value in values.items()}, read)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse("an object", value)
    return value


class _Field(NamedTuple):
    codec: _Codec
    has_default: bool
    default: object


def _record_codec(kind: Any) -> _Codec:
    hints = get_type_hints(kind, include_extras=True)
    members: dict[str, _Field] = {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        has_default = field.default is not MISSING
        members[field.name] = _Field(_codec_of(hints[field.name]), has_default, field.default if has_default else None)

    def write(record: Any) -> dict[str, Any]:
        content = {}
        for name, (codec, has_default, default) in members.items():
            value = getattr(record, name)
            if not has_default or value != default:
                content[name] = codec.encode(value)
        return content

    def read(value: Any) -> Any:
        values = {}
        for name, item in _object(value).items():
            member = members.get(name)
            if member is None:
                raise RefusedError(f"unknown key {shown(name)}; {did_you_mean(name[:40], list(members))}")
            try:
                values[name] = member.codec.decode(item)
            except RefusedError as error:
                raise error.inside(name) from None
        if len(values) < len(members):
            for name, member in members.items():
                if name not in values and not member.has_default:
                    raise RefusedError(f"'{name}' is missing")
        try:
            return kind(**values)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    return _Codec("an object", write, read)


_SCALARS: dict[object, _Codec] = {
    types.NoneType: _exact("null", types.NoneType),
    bool: _exact("true or false", bool),
    int: _integer(-_LARGEST - 1, _LARGEST),
    float: _Codec("a finite number", float, _read_number),
    str: _exact("a string", str),
    object: _Codec("any value", _same, _same),
}
