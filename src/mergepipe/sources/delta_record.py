"""What a delta checkpoint remembers of the expert it was made from, so that applying it can be checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from mergepipe.blocks import DTYPES, DType
from mergepipe.errors import CorruptError, UnsupportedError, did_you_mean
from mergepipe.readers.strict_json import JsonValue, parse_object, shown
from mergepipe.storage.base import Store
from mergepipe.storage.limits import DELTA_RECORD_BYTES

RECORD_NAME = "mergepipe-delta.json"
RECORD_FORMAT = "mergepipe-delta/2"
_DIGEST_DIGITS = 32


class Form(StrEnum):
    """How a delta checkpoint has one tensor of the expert."""

    DELTA = "delta"  # the difference from the base
    FULL = "full"  # as it is: the base has none of this name and shape
    SAME = "same"  # not at all: it equals the base's


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of the expert. `differing` counts the elements that base + delta does not give back bit for bit."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: Form
    stored_dtype: str
    differing: int
    worst: float  # the largest finite distance of such an element
    blake3: str  # BLAKE3-128 of the expert's bytes

    @property
    def is_exact(self) -> bool:
        return self.differing == 0

    @property
    def output_dtype(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def storage_dtype(self) -> DType:
        return DTYPES[self.stored_dtype]


@dataclass(frozen=True, slots=True)
class DeltaRecord:
    """The record of one delta checkpoint: `files` are the names of all its other files.

    Law: `record_of_json(r.to_json(), where) == r`.
    """

    base: str
    base_digest: str
    expert: str
    tensors: tuple[TensorRecord, ...]
    files: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Readable JSON with a stable order of keys."""
        document = {"format": RECORD_FORMAT, **asdict(self)}
        return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_delta_record(store: Store, path: Path) -> DeltaRecord:
    """Read a record from the file `path`.

    Raises:
        CorruptError: it is not one. UnsupportedError: it is of a newer version. StorageError: from the store.
    """
    return record_of_json(store.read_small(path, DELTA_RECORD_BYTES), path)


def record_of_json(raw: bytes, where: Path) -> DeltaRecord:
    """Read what `DeltaRecord.to_json` wrote."""
    content = parse_object(raw, where=where, code="delta.record")
    if content.get("format") != RECORD_FORMAT:
        message = f"the format {shown(content.get('format'))} is not '{RECORD_FORMAT}'"
        raise UnsupportedError.of("delta.record.newer", where, message, "use a newer version of MergePipe")
    listed = content.get("tensors")
    if not isinstance(listed, list):
        raise CorruptError.of("delta.record.field", where, "'tensors' must be a list")
    tensors = tuple(_tensor(each, where) for each in listed)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise CorruptError.of("delta.record.field", where, "a tensor is listed twice")
    base, digest, expert = (_text(content, key, where) for key in ("base", "base_digest", "expert"))
    files = content.get("files")
    if not isinstance(files, list):
        raise CorruptError.of("delta.record.field", where, "'files' must be a list of names")
    names = tuple(name for name in files if isinstance(name, str))
    if len(names) < len(files):
        raise CorruptError.of("delta.record.field", where, "'files' must be a list of names")
    return DeltaRecord(base, digest, expert, tensors, names)


def _tensor(value: JsonValue, where: Path) -> TensorRecord:
    if not isinstance(value, dict):
        raise CorruptError.of("delta.record.field", where, f"a tensor must be an object, found {shown(value)}")
    dtype, stored_dtype = (_known(value, key, tuple(DTYPES), where) for key in ("dtype", "stored_dtype"))
    digest = _text(value, "blake3", where)
    if len(digest) != _DIGEST_DIGITS:
        raise CorruptError.of("delta.record.field", where, f"'blake3' must be 32 hex digits, found {shown(digest)}")
    shape, worst, differing = value.get("shape"), value.get("worst"), value.get("differing")
    if not isinstance(shape, list) or not all(_is_count(length) for length in shape):
        raise CorruptError.of("delta.record.field", where, f"'shape' must be a list of sizes, found {shown(shape)}")
    if not _is_count(differing) or isinstance(worst, bool) or not isinstance(worst, int | float):
        raise CorruptError.of("delta.record.field", where, "'differing' and 'worst' must be numbers")
    return TensorRecord(
        name=_text(value, "name", where),
        dtype=dtype,
        shape=tuple(int(str(length)) for length in shape),
        form=Form(_known(value, "form", tuple(Form), where)),
        stored_dtype=stored_dtype,
        differing=int(str(differing)),
        worst=float(worst),
        blake3=digest,
    )


def _is_count(value: JsonValue) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _text(content: dict[str, JsonValue], key: str, where: Path) -> str:
    value = content.get(key)
    if not isinstance(value, str):
        raise CorruptError.of("delta.record.field", where, f"'{key}' must be a string, found {shown(value)}")
    return value


def _known(content: dict[str, JsonValue], key: str, known: tuple[str, ...], where: Path) -> str:
    value = _text(content, key, where)
    if value not in known:
        message = f"'{key}' is {shown(value)}"
        raise CorruptError.of("delta.record.field", where, message, did_you_mean(value[:40], known))
    return value
