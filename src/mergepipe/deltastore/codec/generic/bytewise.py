"""Codec BYTES: encode elements of any dtype as folded differences from the base, one byte plane at a time.

Format: "BYTES" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind
from mergepipe.deltastore.codec.generic.byte_differences import (
    Words,
    extract_plane,
    fold_differences,
    insert_plane,
    unfold_differences,
)
from mergepipe.deltastore.codec.generic.byte_planes import decode_plane, encode_plane, encode_plane_beside, plane_room
from mergepipe.deltastore.codec.generic.byte_reader import ByteReader, concatenate_bytes
from mergepipe.deltastore.codec.scratch import scratch

UNSIGNED: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode_bytewise(base: NDArray[np.uint8], expert: NDArray[np.uint8], dtype: DType) -> NDArray[np.uint8]:
    """Encode one block: for each byte of the difference, lowest first, the plane of all elements."""
    folded = np.empty(len(expert) // dtype.itemsize, UNSIGNED[dtype.itemsize])
    is_float = int(dtype.kind is DTypeKind.FLOAT)
    fold_differences(words_of(base, dtype), words_of(expert, dtype), 8 * dtype.itemsize, is_float, folded)
    if dtype.itemsize == 1:
        plane = plane_room(len(folded))
        plane[: len(folded)] = folded
        return encode_plane_beside(plane, len(folded), base)
    return concatenate_bytes(*(encode_byte(folded, byte) for byte in range(dtype.itemsize)))


def decode_bytewise(content: NDArray[np.uint8], base: NDArray[np.uint8], dtype: DType, where: str) -> NDArray[np.uint8]:
    """Decode the expert's bytes: the inverse of `encode_bytewise`.

    Raises:
        CorruptError: `content` is not a valid encoding.
    """
    n, bits = len(base) // dtype.itemsize, 8 * dtype.itemsize
    reader = ByteReader(content, where)
    folded = scratch("bytewise", n, UNSIGNED[dtype.itemsize])
    folded[:] = 0
    for byte in range(dtype.itemsize):
        plane = decode_plane(reader, n, where, base if dtype.itemsize == 1 else None)
        if plane is not None:
            insert_plane(plane, byte, folded)
    reader.end()
    words = np.empty(n, UNSIGNED[dtype.itemsize])
    unfold_differences(words_of(base, dtype), folded, bits, int(dtype.kind is DTypeKind.FLOAT), words)
    return words.view(np.uint8)


def words_of(content: NDArray[np.uint8], dtype: DType) -> Words:
    """View stored elements as unsigned integers."""
    return content.view(UNSIGNED[dtype.itemsize])


def encode_byte(words: Words, byte: int) -> NDArray[np.uint8]:
    """Encode byte number `byte` of every word as a plane."""
    plane = plane_room(len(words))
    extract_plane(words, byte, plane[: len(words)])
    return encode_plane(plane, len(words))
