"""The codec for any dtype beside the same dtype: differences in the order of values, one byte at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind
from mergepipe.deltastore.codec.byte_differences import (
    Words,
    count_bytes,
    fold_differences,
    put_plane,
    take_plane,
    unfold_differences,
)
from mergepipe.deltastore.codec.byte_parts import Parts, corrupt, joined
from mergepipe.deltastore.codec.rans import SKIPPED, padded, scale_counts
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.symbol_stages import coded_words, decoded_words

_ZERO, _CODED, _PLAIN = 0, 1, 2
_N_SYMBOLS = 256
_UNSIGNED: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode_bytewise(base: NDArray[np.uint8], expert: NDArray[np.uint8], dtype: DType) -> NDArray[np.uint8]:
    """Encode one block: by byte of the difference, lowest first, the bytes of all elements."""
    folded = np.empty(len(expert) // dtype.itemsize, _UNSIGNED[dtype.itemsize])
    is_float = int(dtype.kind is DTypeKind.FLOAT)
    fold_differences(_words(base, dtype), _words(expert, dtype), 8 * dtype.itemsize, is_float, folded)
    return joined(*(_encode_plane(folded, byte) for byte in range(dtype.itemsize)))


def decode_bytewise(content: NDArray[np.uint8], base: NDArray[np.uint8], dtype: DType, where: str) -> NDArray[np.uint8]:
    """What `encode_bytewise` was given as expert.

    Raises:
        CorruptError: `content` is not what it wrote.
    """
    n, bits = len(base) // dtype.itemsize, 8 * dtype.itemsize
    parts = Parts(content, where)
    folded = scratch("bytewise", n, _UNSIGNED[dtype.itemsize])
    folded[:] = 0
    for byte in range(dtype.itemsize):
        plane = _decode_plane(parts, n, where)
        if plane is not None:
            put_plane(plane, byte, folded)
    parts.end()
    words = np.empty(n, _UNSIGNED[dtype.itemsize])
    unfold_differences(_words(base, dtype), folded, bits, int(dtype.kind is DTypeKind.FLOAT), words)
    return words.view(np.uint8)


def _words(content: NDArray[np.uint8], dtype: DType) -> Words:
    return content.view(_UNSIGNED[dtype.itemsize])


def _encode_plane(folded: Words, byte: int) -> NDArray[np.uint8]:
    n = len(folded)
    symbols, counts = scratch("encode-plane", padded(n), np.uint8), np.zeros(_N_SYMBOLS, np.int64)
    plane = symbols[:n]
    take_plane(folded, byte, plane)
    symbols[n:] = 0
    count_bytes(plane, counts)
    if counts[0] == n:
        return np.array([_ZERO], np.uint8)
    present = np.flatnonzero(counts).astype(np.uint8)
    frequencies = scale_counts(counts[None, :])
    words = coded_words(symbols, _rows(n), frequencies)
    head = np.array([_CODED, len(present) - 1], np.uint8)
    n_words = np.array([len(words)], np.uint32)
    coded = joined(head, present, frequencies[0, present], n_words, words)
    return coded if len(coded) <= n else joined(np.array([_PLAIN], np.uint8), plane)


def _decode_plane(parts: Parts, n: int, where: str) -> NDArray[np.uint8] | None:
    """One byte of all elements; None where all are 0."""
    form = int(parts.take(np.uint8, 1)[0])
    if form == _ZERO:
        return None
    if form == _PLAIN:
        return parts.take(np.uint8, n)
    if form != _CODED:
        raise corrupt(where, f"a plane of form {form}")
    present = parts.take(np.uint8, int(parts.take(np.uint8, 1)[0]) + 1)
    frequencies = np.zeros((1, _N_SYMBOLS), np.uint16)
    frequencies[0, present] = parts.take(np.uint16, len(present))
    n_words = int(parts.take(np.uint32, 1)[0])
    return decoded_words(parts.take(np.uint16, n_words), _rows(n), frequencies, where)[:n]


def _rows(n: int) -> NDArray[np.uint8]:
    rows = scratch("bytewise-rows", padded(n), np.uint8)
    rows[:n], rows[n:] = 0, SKIPPED
    return rows
