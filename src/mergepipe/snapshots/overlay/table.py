"""The table that locates each block of an overlay, in its own file or in a base file: `mergepipe.overlay-table`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import NoReturn

from mergepipe.core.canonical_json import canonical_json
from mergepipe.core.values import dataclass
from mergepipe.errors import CorruptError, UnsupportedError

SIDECAR_FOLDER = "mergepipe.sidecars"
OVERLAY_VERSION = 2
STORED = 0  # the source of blocks that the overlay stores itself; base files count from 1
_MAGIC = b"MPOVRLAY"
_HEAD = struct.Struct("<8sIIQQQ")  # magic, version, base files, blocks, bytes of the base files' list, stored bytes
_ROW = struct.Struct("<IQ")  # source, offset in its file
_HINT = "merge again, or `mergepipe replay` it"


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A base file that blocks are read from, in its state when the overlay was made.

    `path` is absolute, and in the file, unless asked otherwise, relative to the overlay: see `recorded_paths`.
    """

    path: str
    size_bytes: int
    version: str
    header_blake3: str


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The location of a block: `offset` in the overlay's own file (`STORED`), else in base file `source - 1`."""

    source: int
    offset: int

    @property
    def is_stored(self) -> bool:
        """Whether the overlay holds the block itself."""
        return self.source == STORED


@dataclass(frozen=True, slots=True)
class OverlayTable:
    """The base's files, the size of the overlay's own, and the location of every block in `mergepipe.blocks` order.

    Law: `overlay_table_of(t.to_bytes(), where, block_bytes) == t` for the sizes of the blocks of `t`.
    """

    files: tuple[BaseFile, ...]
    stored_bytes: int
    places: tuple[BlockPlace, ...]

    def with_paths(self, change: Callable[[str], str]) -> OverlayTable:
        """The same table with the paths of the base's files changed."""
        return replace(self, files=tuple(replace(file, path=change(file.path)) for file in self.files))

    def to_bytes(self) -> bytes:
        """Encode the side file (`docs/internals/formats/overlay.md`)."""
        files = canonical_json([list(astuple(file)) for file in self.files])
        head = _HEAD.pack(_MAGIC, OVERLAY_VERSION, len(self.files), len(self.places), len(files), self.stored_bytes)
        return b"".join((head, files, *(_ROW.pack(place.source, place.offset) for place in self.places)))


def overlay_table_of(raw: bytes, where: object, block_bytes: Sequence[int]) -> OverlayTable:
    """Decode `OverlayTable.to_bytes`, given the sizes of the blocks from the manifest.

    Raises:
        UnsupportedError: `overlay.newer`, `overlay.older`.
        CorruptError: `overlay.format`, it is no table, or one of other blocks, or a block is outside its file.
    """

    def refuse(message: str) -> NoReturn:
        raise CorruptError.of("overlay.format", where, message, _HINT)

    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        refuse("is not the table of an overlay")
    _, version, n_files, n_blocks, files_bytes, stored_bytes = _HEAD.unpack_from(raw)
    if version > OVERLAY_VERSION:
        message = f"its version is {version}, {OVERLAY_VERSION} is known"
        raise UnsupportedError.of("overlay.newer", where, message, "use a newer version of MergePipe")
    if 0 < version < OVERLAY_VERSION:
        message = f"its version is {version}, {OVERLAY_VERSION} is known"
        raise UnsupportedError.of("overlay.older", where, message, _HINT)
    rows_start = _HEAD.size + files_bytes
    if version < 1 or n_blocks != len(block_bytes) or len(raw) != rows_start + n_blocks * _ROW.size:
        refuse(f"version {version}, {n_blocks} blocks in {len(raw)} bytes; the manifest has {len(block_bytes)} blocks")
    files = _files(raw[_HEAD.size : rows_start])
    if files is None or len(files) != n_files:
        refuse("its list of base files is damaged")
    places = tuple(BlockPlace(source, offset) for source, offset in _ROW.iter_unpack(raw[rows_start:]))
    stored = 0
    for number, (place, nbytes) in enumerate(zip(places, block_bytes, strict=True)):
        if place.source > n_files or (place.is_stored and place.offset != stored):
            refuse(f"block {number} is recorded at {place.offset} of file {place.source}")
        if not place.is_stored and place.offset + nbytes > files[place.source - 1].size_bytes:
            refuse(f"block {number} is recorded beyond the end of {files[place.source - 1].path}")
        stored += nbytes if place.is_stored else 0
    if stored != stored_bytes:
        refuse(f"{stored_bytes} bytes are said to be stored, its blocks are {stored}")
    return OverlayTable(files, stored_bytes, places)


def _files(raw: bytes) -> tuple[BaseFile, ...] | None:
    """The list of base files; None if it is none."""
    try:
        rows = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        return None
    kinds = (str, int, str, str)
    if not all(type(value) is kind for row in rows for value, kind in zip(row, kinds, strict=True)):
        return None
    return tuple(BaseFile(*row) for row in rows)
