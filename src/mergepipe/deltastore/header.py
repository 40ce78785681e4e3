"""The header of a delta store, `mergepipe-store.json`: a frozen value, written as JSON and parsed strictly.

Format: "Header" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn, TypeVar

from mergepipe.checkpoints.directory import STORE_HEADER_NAME, is_plain_name
from mergepipe.core.blocks import DTYPES, BlockGrid, DType, element_count
from mergepipe.core.canonical_json import digest_of
from mergepipe.core.strict_json import JsonValue, parse_object, shown
from mergepipe.deltastore.codec.arrays import corrupt
from mergepipe.deltastore.codec.levels import BANDED_DTYPES, BLOCK_ELEMENTS, Piece, can_be_base_of
from mergepipe.errors import UnsupportedError
from mergepipe.storage.location import Location

HEADER_NAME = STORE_HEADER_NAME
INDEX_NAME = "mergepipe-store.index"
HEADERS_NAME = "mergepipe-store.headers"
PIECE_NAMES: dict[Piece, str] = {
    piece: f"mergepipe-store.{piece.name.lower().replace('_', '-')}.bin" for piece in Piece
}
OWN_NAMES = frozenset({HEADER_NAME, INDEX_NAME, HEADERS_NAME, *PIECE_NAMES.values()})
FORMAT_NAME = "mergepipe-delta-store"
FORMAT_VERSION = 5
FORMAT = f"{FORMAT_NAME}/{FORMAT_VERSION}"
_LARGEST_CUT = (2 - 2.0**-23) * 2.0**127  # the largest float32
_SMALLEST_CUT = 2.0**-149
T = TypeVar("T")


def is_own_name(name: str) -> bool:
    """Whether a file of this name belongs to the store, not to the expert."""
    return name in OWN_NAMES


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One weight file of the original; the headers file holds the bytes of all their headers, one after another."""

    name: str
    size_bytes: int
    version: str
    header_bytes: int
    header_blake3: str


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of the original that is stored unchanged, under the same name."""

    name: str
    size_bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One tensor: its weight file, its first row of the index, its cuts.

    Tensors are ordered by file, then by offset. `base_dtype`: that of the base's tensor that it is encoded relative to;
    None where there is none. `is_plain`: such a tensor whose blocks are all RAW, so that it is one byte range.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: int
    first_row: int
    base_dtype: DType | None
    is_plain: bool
    cuts: tuple[float, float, float] | None

    @property
    def has_base(self) -> bool:
        return self.base_dtype is not None

    @property
    def n_rows(self) -> int:
        return BlockGrid(element_count(self.shape), BLOCK_ELEMENTS).n_blocks

    @property
    def nbytes(self) -> int:
        return element_count(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """The fields of a header.

    `base` and `expert` are the paths that were packed, as hints; `base` is empty where no base was named.
    `base_files` is a digest of the base's file fingerprints. `content_id` is that of the expert
    (`checkpoints.content_id`). `depth`: the number of stores below it that it is packed on, one on another; `base` is
    then a store itself.
    """

    base: str
    base_files: str
    expert: str
    is_bare_file: bool
    index_blake3: str
    files: tuple[PackedFile, ...]
    kept: tuple[KeptFile, ...]
    tensors: tuple[PackedEntry, ...]
    content_id: str
    depth: int = 0

    def to_json(self) -> bytes:
        """Readable JSON with a digest of itself."""
        content: dict[str, object] = {"format": FORMAT, "block_elements": BLOCK_ELEMENTS, **asdict(self)}
        content["tensors"] = [_entry_json(tensor) for tensor in self.tensors]
        if not self.depth:
            del content["depth"]
        document = {**content, "digest": digest_of(content)}
        return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _entry_json(tensor: PackedEntry) -> dict[str, object]:
    base_dtype = None if tensor.base_dtype is None else tensor.base_dtype.name
    return {**asdict(tensor), "dtype": tensor.dtype.name, "base_dtype": base_dtype}


def parse_header(raw: bytes, path: Location) -> StoreHeader:
    """Parse and check a header."""
    document = parse_object(raw, where=path, code="store.damaged")
    fields = _Fields(document, path)
    _check_version(fields.get("format", str), path)
    claimed = fields.get("digest", str)
    if digest_of({key: value for key, value in document.items() if key != "digest"}) != claimed:
        raise corrupt(path, "the header is damaged: its digest does not fit")
    if fields.get("block_elements", int) != BLOCK_ELEMENTS:
        fields.refuse("block_elements", document["block_elements"])
    header = StoreHeader(
        base=fields.get("base", str),
        base_files=fields.get("base_files", str),
        expert=fields.get("expert", str),
        is_bare_file=fields.get("is_bare_file", bool),
        index_blake3=fields.get("index_blake3", str),
        files=fields.each("files", _packed_file),
        kept=fields.each("kept", _kept_file),
        tensors=fields.each("tensors", _entry),
        content_id=fields.get("content_id", str),
        depth=0 if fields.raw("depth") is None else fields.get("depth", int),
    )
    _check_tensors(header, path)
    return header


def _check_version(format_name: str, path: Location) -> None:
    name, _, version = format_name.partition("/")
    if name != FORMAT_NAME or not version.isdecimal():
        raise corrupt(path, f"the format is {shown(format_name)}, not {FORMAT}")
    if int(version) != FORMAT_VERSION:
        hint = "update mergepipe" if int(version) > FORMAT_VERSION else "pack the expert again"
        message = f"a delta store of version {version}; this program reads version {FORMAT_VERSION}"
        raise UnsupportedError.of("format.version", path, message, hint)


def _check_tensors(header: StoreHeader, path: Location) -> None:
    """Refuse duplicate names, tensors out of order, and files whose size is not that of their parts."""
    names = [tensor.name for tensor in header.tensors]
    outputs = [file.name for file in header.files] + [file.name for file in header.kept]
    if len(set(names)) != len(names) or len(set(outputs)) != len(outputs):
        raise corrupt(path, "two tensors, or two files, have the same name")
    row, file_number = 0, 0
    for tensor in header.tensors:
        if tensor.first_row != row or not file_number <= tensor.file < len(header.files):
            raise corrupt(path, f"tensor {shown(tensor.name)} does not follow the one before it")
        if tensor.is_plain and tensor.has_base:
            raise corrupt(path, f"tensor {shown(tensor.name)} is plain and has a base")
        row, file_number = row + tensor.n_rows, tensor.file
    for number, file in enumerate(header.files):
        stored = file.header_bytes + sum(tensor.nbytes for tensor in header.tensors if tensor.file == number)
        if stored != file.size_bytes:
            raise corrupt(path, f"{shown(file.name)} has {file.size_bytes} bytes, its parts have {stored}")


class _Fields:
    """Typed access to one JSON object."""

    def __init__(self, document: Mapping[str, JsonValue], path: Location) -> None:
        self._document = document
        self.path = path

    def refuse(self, key: str, value: object) -> NoReturn:
        raise corrupt(self.path, f"invalid {key}: {shown(value)}")

    def get(self, key: str, kind: type[T]) -> T:
        value = self._document.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(key, value)
        if isinstance(value, int) and value < 0:
            self.refuse(key, value)
        return value

    def raw(self, key: str) -> JsonValue:
        return self._document.get(key)

    def each(self, key: str, make: Callable[[_Fields], T]) -> tuple[T, ...]:
        made = []
        for item in self.get(key, list):
            if not isinstance(item, dict):
                self.refuse(key, item)
            made.append(make(_Fields(item, self.path)))
        return tuple(made)

    def dtype(self, key: str) -> DType:
        name = self.get(key, str)
        return DTYPES.get(name) or self.refuse(key, name)

    def output_name(self) -> str:
        """Read a relative posix path of plain parts that is none of the store's own names."""
        name = self.get("name", str)
        if not all(is_plain_name(part) for part in name.split("/")) or is_own_name(name):
            self.refuse("name", name)
        return name


def _packed_file(fields: _Fields) -> PackedFile:
    return PackedFile(
        fields.output_name(), fields.get("size_bytes", int), fields.get("version", str),
        fields.get("header_bytes", int), fields.get("header_blake3", str),
    )  # fmt: skip


def _kept_file(fields: _Fields) -> KeptFile:
    return KeptFile(fields.output_name(), fields.get("size_bytes", int), fields.get("blake3", str))


def _entry(fields: _Fields) -> PackedEntry:
    dtype = fields.dtype("dtype")
    base_dtype = None if fields.raw("base_dtype") is None else fields.dtype("base_dtype")
    shape = [size for size in fields.get("shape", list) if isinstance(size, int) and not isinstance(size, bool)]
    if len(shape) != len(fields.get("shape", list)) or any(size < 0 for size in shape):
        fields.refuse("shape", fields.get("shape", list))
    if base_dtype is not None and not can_be_base_of(base_dtype, dtype):
        fields.refuse("base_dtype", base_dtype.name)
    return PackedEntry(
        fields.get("name", str), dtype, tuple(shape), fields.get("file", int), fields.get("first_row", int),
        base_dtype, fields.get("is_plain", bool), _cuts(fields, dtype, base_dtype),
    )  # fmt: skip


def _cuts(fields: _Fields, dtype: DType, base_dtype: DType | None) -> tuple[float, float, float] | None:
    cuts = fields.raw("cuts")
    if cuts is None:
        return None
    if not isinstance(cuts, list) or len(cuts) != 3 or dtype is not base_dtype or dtype not in BANDED_DTYPES:
        return fields.refuse("cuts", cuts)
    if all(isinstance(cut, float) for cut in cuts):
        first, second, third = (float(cut) for cut in cuts if isinstance(cut, float))
        if _LARGEST_CUT >= first >= second >= third >= _SMALLEST_CUT:
            return first, second, third
    return fields.refuse("cuts", cuts)
