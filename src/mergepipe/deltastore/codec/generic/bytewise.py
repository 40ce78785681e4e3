"""Codec BYTES: encode elements of any dtype as folded differences from the base, one byte plane at a time.

Format: "BYTES" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind
from mergepipe.deltastore.codec.entropy.rans import SKIPPED, padded_length, scale_counts
from mergepipe.deltastore.codec.entropy.symbol_stages import decode_words, encode_words
from mergepipe.deltastore.codec.generic.byte_differences import (
    Words,
    count_bytes,
    extract_plane,
    fold_differences,
    insert_plane,
    unfold_differences,
)
from mergepipe.deltastore.codec.generic.byte_reader import ByteReader, concatenate_bytes, corrupt
from mergepipe.deltastore.codec.scratch import scratch

_FORM_ZERO, _FORM_CODED, _FORM_PLAIN = 0, 1, 2
_N_SYMBOLS = 256
_UNSIGNED: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode_bytewise(base: NDArray[np.uint8], expert: NDArray[np.uint8], dtype: DType) -> NDArray[np.uint8]:
    """Encode one block: for each byte of the difference, lowest first, the plane of all elements."""
    folded = np.empty(len(expert) // dtype.itemsize, _UNSIGNED[dtype.itemsize])
    is_float = int(dtype.kind is DTypeKind.FLOAT)
    fold_differences(_words(base, dtype), _words(expert, dtype), 8 * dtype.itemsize, is_float, folded)
    return concatenate_bytes(*(_encode_plane(folded, byte) for byte in range(dtype.itemsize)))


def decode_bytewise(content: NDArray[np.uint8], base: NDArray[np.uint8], dtype: DType, where: str) -> NDArray[np.uint8]:
    """Decode the expert's bytes: the inverse of `encode_bytewise`.

    Raises:
        CorruptError: `content` is not a valid encoding.
    """
    n, bits = len(base) // dtype.itemsize, 8 * dtype.itemsize
    reader = ByteReader(content, where)
    folded = scratch("bytewise", n, _UNSIGNED[dtype.itemsize])
    folded[:] = 0
    for byte in range(dtype.itemsize):
        plane = _decode_plane(reader, n, where)
        if plane is not None:
            insert_plane(plane, byte, folded)
    reader.end()
    words = np.empty(n, _UNSIGNED[dtype.itemsize])
    unfold_differences(_words(base, dtype), folded, bits, int(dtype.kind is DTypeKind.FLOAT), words)
    return words.view(np.uint8)


def _words(content: NDArray[np.uint8], dtype: DType) -> Words:
    return content.view(_UNSIGNED[dtype.itemsize])


def _encode_plane(folded: Words, byte: int) -> NDArray[np.uint8]:
    n = len(folded)
    symbols, counts = scratch("encode-plane", padded_length(n), np.uint8), np.zeros(_N_SYMBOLS, np.int64)
    plane = symbols[:n]
    extract_plane(folded, byte, plane)
    symbols[n:] = 0
    count_bytes(plane, counts)
    if counts[0] == n:
        return np.array([_FORM_ZERO], np.uint8)
    present = np.flatnonzero(counts).astype(np.uint8)
    frequencies = scale_counts(counts[None, :])
    words = encode_words(symbols, _contexts(n), frequencies)
    form_and_count = np.array([_FORM_CODED, len(present) - 1], np.uint8)
    n_words = np.array([len(words)], np.uint32)
    coded = concatenate_bytes(form_and_count, present, frequencies[0, present], n_words, words)
    return coded if len(coded) <= n else concatenate_bytes(np.array([_FORM_PLAIN], np.uint8), plane)


def _decode_plane(reader: ByteReader, n: int, where: str) -> NDArray[np.uint8] | None:
    """Decode one byte of all elements; None where all are 0."""
    form = int(reader.take(np.uint8, 1)[0])
    if form == _FORM_ZERO:
        return None
    if form == _FORM_PLAIN:
        return reader.take(np.uint8, n)
    if form != _FORM_CODED:
        raise corrupt(where, f"unknown form {form} of a byte plane")
    present = reader.take(np.uint8, int(reader.take(np.uint8, 1)[0]) + 1)
    frequencies = np.zeros((1, _N_SYMBOLS), np.uint16)
    frequencies[0, present] = reader.take(np.uint16, len(present))
    n_words = int(reader.take(np.uint32, 1)[0])
    return decode_words(reader.take(np.uint16, n_words), _contexts(n), frequencies, where)[:n]


def _contexts(n: int) -> NDArray[np.uint8]:
    """The contexts of `n` elements: all 0, padding skipped."""
    contexts = scratch("bytewise-rows", padded_length(n), np.uint8)
    contexts[:n], contexts[n:] = 0, SKIPPED
    return contexts
