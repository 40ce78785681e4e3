"""Reads a stored manifest back into its value: strictly, every key known, every value of its type, the sid checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Final, NoReturn, TypeVar

from mergepipe.canonical import digest_of, parse_digestible
from mergepipe.errors import CorruptError, UnsupportedError, did_you_mean
from mergepipe.manifest import (
    MANIFEST_FORMAT,
    MANIFEST_VERSION,
    Coverage,
    DroppedRecord,
    FileRecord,
    InputRecord,
    Manifest,
    OutputFileRecord,
    OutputTensor,
    RealizedBytes,
    SmallFileRecord,
)

T = TypeVar("T")
COMPOSITE_NAME: Final = "mergepipe-composite"
_HINT = "the snapshot is damaged: merge again"
_NAME = MANIFEST_FORMAT.partition("/")[0]
_OWN_KEYS: Final = ("format", "sid", "digest")


def manifest_of_json(raw: bytes, where: object = "manifest") -> Manifest:
    """Read what `Manifest.to_json` wrote. Law: `manifest_of_json(m.to_json()) == m`.

    Raises:
        UnsupportedError: `manifest.version`.
        CorruptError: `manifest.json`, `manifest.field`, or `manifest.sid` or `manifest.digest` where that is
            not the content's.
    """
    top = _Object(_parse(raw, where), where, "")
    check_format(top.text("format"), where)
    sid = top.text("sid")
    manifest = _manifest(top)
    if manifest.sid != sid:
        raise CorruptError.of("manifest.sid", where, f"its sid is '{sid[:40]}', its content's '{manifest.sid}'", _HINT)
    _check_digest(top, where)
    return manifest


def check_format(text: str, where: object) -> None:
    """Refuse a manifest whose `format` is not the one that is written.

    Raises:
        UnsupportedError: `manifest.version`, another version; `manifest.composite`, another kind of manifest.
        CorruptError: `manifest.field`, it is no manifest.
    """
    name, _, number = text.partition("/")
    version = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
    if name == COMPOSITE_NAME:
        message = "is the record of a training checkpoint that tailor composed, not of a merged snapshot"
        hint = "`mergepipe tailor inspect` says what the checkpoint holds"
        raise UnsupportedError.of("manifest.composite", where, message, hint)
    if name != _NAME or version < 1:
        message = f"its format is '{text[:40]}', '{MANIFEST_FORMAT}' is needed"
        raise CorruptError.of("manifest.field", where, message, _HINT)
    if version != MANIFEST_VERSION:
        message = f"its format is '{text[:40]}', this version reads '{MANIFEST_FORMAT}' only"
        hint = "use a newer version of MergePipe" if version > MANIFEST_VERSION else "merge again"
        raise UnsupportedError.of("manifest.version", where, message, hint)


def _check_digest(top: _Object, where: object) -> None:
    stated = top.text("digest")
    found = digest_of({key: value for key, value in top.mapping().items() if key != "digest"})
    if stated != found:
        message = f"its digest is '{stated[:40]}', its content's '{found}'"
        raise CorruptError.of("manifest.digest", where, message, _HINT)


def _parse(raw: bytes, where: object) -> object:
    def refuse(reason: str) -> NoReturn:
        raise CorruptError.of("manifest.json", where, reason, _HINT)

    return parse_digestible(raw, refuse)


class _Object:
    """One JSON object whose keys are taken one by one."""

    def __init__(self, value: object, where: object, place: str) -> None:
        self._where = where
        self._place = place
        if not isinstance(value, dict):
            self.refuse("an object is needed")
        self._values: dict[str, object] = value

    def refuse(self, message: str) -> NoReturn:
        place = f"{self._place}: " if self._place else ""
        raise CorruptError.of("manifest.field", self._where, place + message, _HINT)

    def only(self, known: Sequence[str]) -> None:
        """Refuse keys that are not among `known`."""
        for key in sorted(self._values.keys() - set(known)):
            self.refuse(f"unknown key '{key[:40]}', {did_you_mean(key[:40], known)}")

    def take(self, key: str) -> object:
        return self._values[key] if key in self._values else self.refuse(f"'{key}' is missing")

    def text(self, key: str) -> str:
        value = self.take(key)
        return value if isinstance(value, str) else self.refuse(f"'{key}' is not a string")

    def optional_text(self, key: str) -> str | None:
        return None if self.take(key) is None else self.text(key)

    def integer(self, key: str) -> int:
        return self._integer(self.take(key), key)

    def size(self, key: str) -> int:
        value = self.integer(key)
        return value if value >= 0 else self.refuse(f"'{key}' is negative")

    def sizes(self, key: str) -> tuple[int, ...]:
        found = tuple(self._integer(value, key) for value in self._list(key))
        return found if all(value >= 0 for value in found) else self.refuse(f"'{key}' holds a negative number")

    def each(self, key: str, make: Callable[[_Object], T]) -> tuple[T, ...]:
        return tuple(
            make(_Object(value, self._where, f"{self._inside(key)}[{i}]")) for i, value in enumerate(self._list(key))
        )

    def inner(self, key: str) -> _Object:
        return _Object(self.take(key), self._where, self._inside(key))

    def optional_inner(self, key: str) -> _Object | None:
        return None if self.take(key) is None else self.inner(key)

    def mapping(self) -> Mapping[str, object]:
        return self._values

    def scalars(self) -> dict[str, float | int | str]:
        return {key: self._scalar(key) for key in self._values}

    def _scalar(self, key: str) -> float | int | str:
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, float | int | str):
            self.refuse(f"'{key}' is neither a number nor a string")
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(f"'{key}' is not finite")
        return value

    def _list(self, key: str) -> list[object]:
        value = self.take(key)
        return value if isinstance(value, list) else self.refuse(f"'{key}' is not an array")

    def _integer(self, value: object, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(f"'{key}' is not an integer")
        return value

    def _inside(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _manifest(top: _Object) -> Manifest:
    top.only((*_OWN_KEYS, *_names(Manifest)))
    plan, coverage = top.optional_inner("plan"), top.optional_inner("coverage")
    return Manifest(
        version=top.text("version"),
        operator=top.text("operator"),
        recipe=top.text("recipe"),
        seed=top.integer("seed"),
        inputs=top.each("inputs", _input),
        files=top.each("files", _output_file),
        tensors=top.each("tensors", _tensor),
        dropped=top.each("dropped", _dropped),
        realized=_realized(top.inner("realized")),
        plan_digest=top.optional_text("plan_digest"),
        plan=None if plan is None else plan.mapping(),
        coverage=None if coverage is None else _coverage(coverage),
        run=top.inner("run").scalars(),
        blocks=_small_file(top.inner("blocks")),
        sidecars=top.each("sidecars", _small_file),
    )


def _input(found: _Object) -> InputRecord:
    found.only(_names(InputRecord))
    return InputRecord(
        role=found.text("role"),
        model=found.text("model"),
        path=found.text("path"),
        files=found.each("files", _file),
        content_id=found.optional_text("content_id"),
        read_bytes=found.size("read_bytes"),
    )


def _file(found: _Object) -> FileRecord:
    found.only(_names(FileRecord))
    return FileRecord(
        found.text("name"), found.size("size_bytes"), found.integer("mtime_ns"), found.text("header_blake3")
    )


def _output_file(found: _Object) -> OutputFileRecord:
    found.only(_names(OutputFileRecord))
    return OutputFileRecord(found.text("name"), found.size("size_bytes"), found.text("blake3"))


def _small_file(found: _Object) -> SmallFileRecord:
    found.only(_names(SmallFileRecord))
    return SmallFileRecord(found.text("name"), found.size("size_bytes"), found.text("blake3"))


def _tensor(found: _Object) -> OutputTensor:
    found.only(_names(OutputTensor))
    return OutputTensor(
        name=found.text("name"),
        dtype=found.text("dtype"),
        shape=found.sizes("shape"),
        file=found.text("file"),
        blake3=found.text("blake3"),
        action=found.text("action"),
        reason=found.text("reason"),
    )


def _dropped(found: _Object) -> DroppedRecord:
    found.only(_names(DroppedRecord))
    return DroppedRecord(found.text("model"), found.text("tensor"), found.text("reason"))


def _realized(found: _Object) -> RealizedBytes:
    found.only(_names(RealizedBytes))
    return RealizedBytes(*(found.size(name) for name in _names(RealizedBytes)))


def _coverage(found: _Object) -> Coverage:
    found.only(_names(Coverage))
    return Coverage(
        found.size("blocks"), found.size("touched"), found.sizes("read"), found.sizes("shared"), found.sizes("free")
    )
