"""The header of a delta store, `mergepipe-store.json`: one record of its files and tensors.

Format: "Header" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from mergepipe.checkpoints.directory import STORE_HEADER_NAME, is_plain_name
from mergepipe.core.blocks import DTYPES, BlockGrid, DType, element_count
from mergepipe.core.records import AsText, RecordFormat, Size
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS, Piece, can_be_base_of

HEADER_NAME = STORE_HEADER_NAME
INDEX_NAME = "mergepipe-store.index"
HEADERS_NAME = "mergepipe-store.headers"
PIECE_NAMES: dict[Piece, str] = {
    piece: f"mergepipe-store.{piece.name.lower().replace('_', '-')}.bin" for piece in Piece
}
OWN_NAMES = frozenset({HEADER_NAME, INDEX_NAME, HEADERS_NAME, *PIECE_NAMES.values()})


def _name_of(dtype: DType) -> str:
    return dtype.name


_NamedDType: TypeAlias = Annotated[DType, AsText(_name_of, DTYPES.__getitem__)]


def is_own_name(name: str) -> bool:
    """Whether a file of this name belongs to the store, not to the expert."""
    return name in OWN_NAMES


def _check_name(name: str) -> None:
    """Refuse what is no relative posix path of plain parts, and the store's own names."""
    if not all(is_plain_name(part) for part in name.split("/")) or is_own_name(name):
        raise ValueError(f"invalid name: {shown(name)}")


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One weight file of the original; the headers file holds the bytes of all their headers, one after another."""

    name: str
    size_bytes: Size
    version: str
    header_bytes: Size
    header_blake3: str

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of the original that is stored unchanged, under the same name."""

    name: str
    size_bytes: Size
    blake3: str

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One tensor: its weight file, its first row of the index.

    `base_dtype`: that of the base's tensor that it is encoded relative to; None where there is none. `is_plain`: such a
    tensor whose blocks are all RAW, so that it is one byte range.
    """

    name: str
    dtype: _NamedDType
    shape: tuple[Size, ...]
    file: Size
    first_row: Size
    base_dtype: _NamedDType | None
    is_plain: bool

    def __post_init__(self) -> None:
        if self.is_plain and self.has_base:
            raise ValueError(f"tensor {shown(self.name)} is plain and has a base")
        if self.base_dtype is not None and not can_be_base_of(self.base_dtype, self.dtype):
            raise ValueError(f"invalid base_dtype: {self.base_dtype.name}")

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
    """The fields of a header; tensors are ordered by file, then by offset, their rows by name.

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
    depth: Size = 0

    @property
    def block_elements(self) -> int:
        return BLOCK_ELEMENTS

    def __post_init__(self) -> None:
        """Refuse duplicate names, tensors out of order, and files whose size is not that of their parts."""
        outputs = [file.name for file in self.files] + [file.name for file in self.kept]
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors) or len(set(outputs)) != len(outputs):
            raise ValueError("two tensors, or two files, have the same name")
        row = 0
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.name):
            if tensor.first_row != row:
                raise ValueError(f"tensor {shown(tensor.name)} does not follow the one before it")
            row += tensor.n_rows
        stored_bytes = [file.header_bytes for file in self.files]
        last = 0
        for tensor in self.tensors:
            if not last <= tensor.file < len(self.files):
                raise ValueError(f"tensor {shown(tensor.name)} does not follow the one before it")
            stored_bytes[tensor.file] += tensor.nbytes
            last = tensor.file
        for file, stored in zip(self.files, stored_bytes, strict=True):
            if stored != file.size_bytes:
                raise ValueError(f"{shown(file.name)} has {file.size_bytes} bytes, its parts have {stored}")


HEADER_FORMAT: Final = RecordFormat(
    "mergepipe-delta-store", 7, StoreHeader, "pack the expert again", stated=("block_elements",)
)
