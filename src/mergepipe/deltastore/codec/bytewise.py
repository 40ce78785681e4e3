"""The codec for any dtype beside the same dtype: differences in the order of values, one byte at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.blocks import DType, DTypeKind
from mergepipe.deltastore.codec.folding import Words, count_bytes, fold_differences, take_plane
from mergepipe.deltastore.codec.parts import Parts, corrupt, joined
from mergepipe.deltastore.codec.rans import SKIPPED, padded, scale_counts
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.stages import coded_words, decoded_words

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
    n = len(base) // dtype.itemsize
    parts = Parts(content, where)
    planes_NB = np.empty((n, dtype.itemsize), np.uint8)
    for i in range(dtype.itemsize):
        planes_NB[:, i] = _decode_plane(parts, n, where)
    parts.end()
    folded = planes_NB.reshape(-1).view(_UNSIGNED[dtype.itemsize])
    words = _disordered(_unfolded(folded, dtype) + _ordered(_words(base, dtype), dtype), dtype)
    return words.view(np.uint8)


def _words(content: NDArray[np.uint8], dtype: DType) -> Words:
    return content.view(_UNSIGNED[dtype.itemsize])


def _constants(dtype: DType) -> tuple[Words, Words, int]:
    unsigned = _UNSIGNED[dtype.itemsize]
    bits = dtype.itemsize * 8
    return np.array(1 << (bits - 1), unsigned), np.array((1 << bits) - 1, unsigned), bits - 1


def _ordered(words: Words, dtype: DType) -> Words:
    """Floats so that neighbours in value are neighbours in number; other dtypes as they are."""
    if dtype.kind is not DTypeKind.FLOAT:
        return words
    sign, every, shift = _constants(dtype)
    return np.asarray(words ^ np.where(words >> words.dtype.type(shift), every, sign))


def _disordered(words: Words, dtype: DType) -> Words:
    if dtype.kind is not DTypeKind.FLOAT:
        return words
    sign, every, shift = _constants(dtype)
    return np.asarray(words ^ np.where(words >> words.dtype.type(shift), sign, every))


def _unfolded(folded: Words, dtype: DType) -> Words:
    _, every, _ = _constants(dtype)
    one = folded.dtype.type(1)
    return np.asarray((folded >> one) ^ np.where(folded & one, every, 0).astype(folded.dtype))


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


def _decode_plane(parts: Parts, n: int, where: str) -> NDArray[np.uint8]:
    form = int(parts.take(np.uint8, 1)[0])
    if form == _ZERO:
        return np.zeros(n, np.uint8)
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
    rows = np.full(padded(n), SKIPPED, np.uint8)
    rows[:n] = 0
    return rows
