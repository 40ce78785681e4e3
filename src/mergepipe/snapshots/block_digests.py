"""The digests of all blocks of a snapshot, and the side file that holds them: `mergepipe.blocks`."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from blake3 import blake3

from mergepipe.errors import CorruptError, UnsupportedError

BLOCKS_NAME = "mergepipe.blocks"
BLOCKS_VERSION = 1
DIGEST_BYTES = 16
_MAGIC = b"MPBLOCKS"
_HEAD = struct.Struct("<8sIIII")  # magic, version, bytes of a digest, files, blocks
_BLOCK_ELEMENTS = struct.Struct("<Q")
_HINT = "`mergepipe repair` makes it again"


def block_digest(content: object) -> bytes:
    """BLAKE3-128 of a buffer."""
    return blake3(content).digest(DIGEST_BYTES)  # type: ignore[arg-type] # any contiguous buffer of bytes


def root_of(blocks: Sequence[bytes]) -> str:
    """The Merkle root of a tensor: BLAKE3-128 of its concatenated block digests, 32 hex digits."""
    return blake3(b"".join(blocks)).hexdigest(DIGEST_BYTES)


def packed_digests(blocks: Sequence[bytes]) -> str:
    """Encode block digests for a record."""
    return base64.b64encode(b"".join(blocks)).decode()


def unpacked_digests(packed: str) -> tuple[bytes, ...]:
    """Decode block digests. Law: `unpacked_digests(packed_digests(b)) == b`; raises ValueError for anything else."""
    content = base64.b64decode(packed, validate=True)
    if len(content) % DIGEST_BYTES:
        raise ValueError("is cut within a digest")
    return tuple(content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES))


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Digests of the headers of all weight files, then of all blocks of all tensors, in the manifest's order.

    Law: `block_table_of(t.to_bytes(), ...) == t` for the counts of blocks of `t`.
    """

    block_elements: int
    headers: tuple[bytes, ...]
    tensors: tuple[tuple[bytes, ...], ...]

    def to_bytes(self) -> bytes:
        """Encode the side file (`docs/internals/formats/blocks.md`)."""
        blocks = [block for tensor in self.tensors for block in tensor]
        head = _HEAD.pack(_MAGIC, BLOCKS_VERSION, DIGEST_BYTES, len(self.headers), len(blocks))
        return b"".join((head, _BLOCK_ELEMENTS.pack(self.block_elements), *self.headers, *blocks))


def block_table_of(raw: bytes, where: object, n_files: int, element_counts: Sequence[int]) -> BlockTable:
    """Decode `BlockTable.to_bytes`, given the counts of files and blocks from the manifest."""

    def refuse(message: str) -> NoReturn:
        raise CorruptError.of("manifest.damaged", where, message, _HINT)

    fixed = _HEAD.size + _BLOCK_ELEMENTS.size
    if len(raw) < fixed or not raw.startswith(_MAGIC):
        refuse("is not a table of block digests")
    _, version, digest_bytes, files, blocks = _HEAD.unpack_from(raw)
    if version > BLOCKS_VERSION:
        message = f"its version is {version}, {BLOCKS_VERSION} is known"
        raise UnsupportedError.of("format.version", where, message, "use a newer version of MergePipe")
    (block_elements,) = _BLOCK_ELEMENTS.unpack_from(raw, _HEAD.size)
    if version < 1 or digest_bytes != DIGEST_BYTES or not 0 < block_elements < 2**63:
        refuse(f"version {version}, digests of {digest_bytes} bytes, blocks of {block_elements} elements")
    counts = [-(-n // block_elements) for n in element_counts]
    if (files, blocks) != (n_files, sum(counts)) or len(raw) != fixed + DIGEST_BYTES * (files + blocks):
        refuse(f"{blocks} blocks in {files} files in {len(raw)} bytes, the manifest has {sum(counts)} in {n_files}")
    digests = [raw[at : at + DIGEST_BYTES] for at in range(fixed, len(raw), DIGEST_BYTES)]
    tensors, position = [], files
    for count in counts:
        tensors.append(tuple(digests[position : position + count]))
        position += count
    return BlockTable(block_elements, tuple(digests[:files]), tuple(tensors))
