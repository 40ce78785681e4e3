"""Parse a stored manifest strictly: no unknown keys, every value typed, the sid verified."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Final, NoReturn

from mergepipe.core.canonical_json import digest_of, parse_digestible
from mergepipe.core.json_fields import FieldCodes, JsonFields
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.snapshots.manifest import (
    MANIFEST_FORMAT,
    MANIFEST_VERSION,
    Coverage,
    DroppedRecord,
    FileRecord,
    InputRecord,
    LeftOutFile,
    Manifest,
    OutputFileRecord,
    OutputTensor,
    RealizedBytes,
    SmallFileRecord,
)

COMPOSITE_NAME: Final = "mergepipe-composite"
_HINT = "the snapshot is damaged: merge again"
_NAME = MANIFEST_FORMAT.partition("/")[0]
_CODES: Final = FieldCodes("manifest.damaged", "manifest.damaged", "manifest.damaged", _HINT)


def manifest_of_json(raw: bytes, where: object = "manifest") -> Manifest:
    """Parse the output of `Manifest.to_json`. Law: `manifest_of_json(m.to_json()) == m`."""
    top = JsonFields(_parse(raw, where), _CODES, where)
    check_format(top.text("format"), where)
    sid = top.text("sid")
    stated = top.text("digest")
    manifest = top.read(_manifest)
    if manifest.sid != sid:
        raise CorruptError.of(
            "manifest.damaged", where, f"its sid is '{sid[:40]}', its content's '{manifest.sid}'", _HINT
        )
    _check_digest(top, stated, where)
    return manifest


def check_format(text: str, where: object) -> None:
    """Refuse a manifest of another `format`."""
    name, _, number = text.partition("/")
    version = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
    if name == COMPOSITE_NAME:
        message = "is the record of a training checkpoint that tailor composed, not of a merged snapshot"
        hint = "`mergepipe tailor inspect` says what the checkpoint holds"
        raise UnsupportedError.of("snapshot.composite", where, message, hint)
    if name != _NAME or version < 1:
        message = f"its format is '{text[:40]}', '{MANIFEST_FORMAT}' is needed"
        raise CorruptError.of("manifest.damaged", where, message, _HINT)
    if version != MANIFEST_VERSION:
        message = f"its format is '{text[:40]}', this version reads '{MANIFEST_FORMAT}' only"
        hint = "use a newer version of MergePipe" if version > MANIFEST_VERSION else "merge again"
        raise UnsupportedError.of("format.version", where, message, hint)


def _check_digest(top: JsonFields, stated: str, where: object) -> None:
    computed_digest = digest_of({key: value for key, value in top.mapping().items() if key != "digest"})
    if stated != computed_digest:
        message = f"its digest is '{stated[:40]}', its content's '{computed_digest}'"
        raise CorruptError.of("manifest.damaged", where, message, _HINT)


def _parse(raw: bytes, where: object) -> object:
    def refuse(reason: str) -> NoReturn:
        raise CorruptError.of("manifest.damaged", where, reason, _HINT)

    return parse_digestible(raw, refuse)


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _manifest(top: JsonFields) -> Manifest:
    plan, coverage = top.optional_object("plan"), top.optional_object("coverage")
    return Manifest(
        version=top.text("version"),
        operator=top.text("operator"),
        recipe=top.text("recipe"),
        seed=top.integer("seed"),
        inputs=top.each("inputs", _input),
        files=top.each("files", _output_file),
        tensors=top.each("tensors", _tensor),
        dropped=top.each("dropped", _dropped),
        realized=top.object("realized").read(_realized),
        plan_digest=top.optional_text("plan_digest"),
        plan=None if plan is None else plan.mapping(),
        coverage=None if coverage is None else coverage.read(_coverage),
        run=_run_facts(top.object("run")),
        blocks=top.object("blocks").read(_small_file),
        sidecars=top.each("sidecars", _small_file),
        left_out=top.each("left_out", _left_out),
    )


def _input(entry: JsonFields) -> InputRecord:
    return InputRecord(
        role=entry.text("role"),
        model=entry.text("model"),
        path=entry.text("path"),
        files=entry.each("files", _file),
        content_id=entry.optional_text("content_id"),
        read_bytes=entry.size("read_bytes"),
        hub_id=entry.optional_text("hub_id"),
    )


def _file(entry: JsonFields) -> FileRecord:
    return FileRecord(
        entry.text("name"), entry.size("size_bytes"), entry.text("version"), entry.text("header_blake3"),
        entry.optional_text("sha256") if "sha256" in entry.remaining() else None,
    )  # fmt: skip


def _output_file(entry: JsonFields) -> OutputFileRecord:
    return OutputFileRecord(entry.text("name"), entry.size("size_bytes"), entry.text("blake3"))


def _small_file(entry: JsonFields) -> SmallFileRecord:
    return SmallFileRecord(entry.text("name"), entry.size("size_bytes"), entry.text("blake3"))


def _tensor(entry: JsonFields) -> OutputTensor:
    return OutputTensor(
        name=entry.text("name"),
        dtype=entry.text("dtype"),
        shape=entry.sizes("shape"),
        file=entry.text("file"),
        blake3=entry.text("blake3"),
        action=entry.text("action"),
        reason=entry.text("reason"),
    )


def _left_out(entry: JsonFields) -> LeftOutFile:
    return LeftOutFile(entry.text("name"), entry.text("reason"))


def _dropped(entry: JsonFields) -> DroppedRecord:
    return DroppedRecord(entry.text("model"), entry.text("tensor"), entry.text("reason"))


def _run_facts(entry: JsonFields) -> dict[str, float | int | str]:
    """Parse the description of the run: numbers and strings under arbitrary names."""
    facts: dict[str, float | int | str] = {}
    for key in entry.remaining():
        value = entry.take(key)
        if isinstance(value, bool) or not isinstance(value, float | int | str):
            entry.refuse(f"'{key}' is neither a number nor a string")
        if isinstance(value, float) and not math.isfinite(value):
            entry.refuse(f"'{key}' is not finite")
        facts[key] = value
    return facts


def _realized(entry: JsonFields) -> RealizedBytes:
    return RealizedBytes(*(entry.size(name) for name in _names(RealizedBytes)))


def _coverage(entry: JsonFields) -> Coverage:
    return Coverage(
        entry.size("blocks"),
        entry.size("touched"),
        entry.sizes("read"),
        entry.sizes("shared"),
        entry.sizes("free"),
    )
