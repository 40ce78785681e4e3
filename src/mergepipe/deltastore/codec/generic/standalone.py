"""Codec STANDALONE: encode elements without a base, by coding their exponents and keeping sign and mantissa.

Format: "STANDALONE" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind
from mergepipe.deltastore.codec.generic.byte_differences import Words, insert_plane
from mergepipe.deltastore.codec.generic.byte_planes import FORM_PLAIN, FORM_ZERO, decode_plane, encode_plane, plane_room
from mergepipe.deltastore.codec.generic.byte_reader import ByteReader, concatenate_bytes, corrupt
from mergepipe.deltastore.codec.generic.bytewise import UNSIGNED, encode_byte, words_of
from mergepipe.deltastore.codec.generic.prefix_words import (
    GROUP,
    choose_prefix,
    count_prefixes,
    escaped_prefixes,
    extract_bits,
    insert_escapes,
    insert_prefixes,
    pack_low_bits,
    prefix_symbols,
    rotate_words,
    rotate_words_back,
    unpack_low_bits,
)
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.kernels.compilation.compiled import Bits32, Bytes

_LOW_BITS: dict[int, tuple[int, int]] = {1: (0, 0), 2: (6, 10), 4: (22, 24), 8: (53, 56)}
"""The least and the most low bits that the encoder keeps as they are, by bytes of the element."""
_MOST_PREFIX_BITS = 16


@dataclass(frozen=True, slots=True)
class PrefixChoice:
    """How a block is split: the low bits kept as they are, the first prefix of the window, estimated bytes."""

    low_bits: int
    first: int
    estimated_bytes: float


def estimate_standalone(expert: NDArray[np.uint8], dtype: DType) -> PrefixChoice:
    """Choose how a block is split, and estimate its size; where low bits are no noise it may be smaller."""
    return _choose(_rotated(expert, dtype), dtype)


def encode_standalone(expert: NDArray[np.uint8], dtype: DType, choice: PrefixChoice | None = None) -> NDArray[np.uint8]:
    """Encode one block without a base. `choice` is its `estimate_standalone`, if the caller has it."""
    words = _rotated(expert, dtype)
    choice, n = _choose(words, dtype) if choice is None else choice, len(words)
    symbols = plane_room(n)
    prefix_symbols(words, choice.low_bits, choice.first, symbols[:n])
    escapes = np.empty(n - np.count_nonzero(symbols[:n]), np.uint16)
    if len(escapes):
        escaped_prefixes(words, choice.low_bits, symbols[:n], escapes)
    head = np.array([choice.low_bits], np.uint8)
    window = np.array([choice.first], np.uint16)
    parts: list[NDArray[np.generic]] = [
        head,
        window,
        np.array([len(escapes)], np.uint32),
        escapes,
        encode_plane(symbols, n),
    ]
    parts += [encode_byte(words, byte) for byte in range(choice.low_bits // 8)]
    if choice.low_bits % 8:
        parts += _pack_top(words, choice.low_bits)
    return concatenate_bytes(*parts)


def decode_standalone(content: NDArray[np.uint8], dtype: DType, where: str, out: NDArray[np.uint8]) -> None:
    """Decode the expert's bytes into `out`: the inverse of `encode_standalone`.

    Raises:
        CorruptError: `content` is not a valid encoding.
    """
    n, bits = len(out) // dtype.itemsize, 8 * dtype.itemsize
    reader = ByteReader(content, where)
    low_bits, first = int(reader.take(np.uint8, 1)[0]), int(reader.take(np.uint16, 1)[0])
    if not bits - _MOST_PREFIX_BITS <= low_bits < bits:
        raise corrupt(where, f"{low_bits} low bits of elements that have {bits}")
    escapes = reader.take(np.uint16, int(reader.take(np.uint32, 1)[0]))
    words = scratch("bytewise", n, UNSIGNED[dtype.itemsize])
    words[:] = 0
    symbols = decode_plane(reader, n, where)
    if symbols is None:
        symbols = np.zeros(n, np.uint8)
    insert_prefixes(symbols, low_bits, first, words)
    if insert_escapes(symbols, low_bits, escapes, words) != len(escapes):
        raise corrupt(where, f"{len(escapes)} prefixes outside the window, the symbols need another number")
    for byte in range(low_bits // 8):
        plane = decode_plane(reader, n, where)
        if plane is not None:
            insert_plane(plane, byte, words)
    if low_bits % 8:
        _insert_top(reader, low_bits, words, where)
    reader.end()
    elements = out.view(UNSIGNED[dtype.itemsize])
    if dtype.kind is DTypeKind.FLOAT:
        rotate_words_back(words, bits, elements)
    else:
        elements[:] = words


def _rotated(expert: NDArray[np.uint8], dtype: DType) -> Words:
    elements = words_of(expert, dtype)
    if dtype.kind is not DTypeKind.FLOAT:
        return elements
    rotated = scratch("standalone-words", len(elements), UNSIGNED[dtype.itemsize])
    rotate_words(elements, 8 * dtype.itemsize, rotated)
    return rotated


def _choose(words: Words, dtype: DType) -> PrefixChoice:
    least, most = _LOW_BITS[dtype.itemsize]
    counts: Bits32 = np.zeros(1 << (8 * dtype.itemsize - least), np.uint32)
    count_prefixes(words, least, counts)
    chosen, estimates = np.zeros(2, np.int64), np.zeros(1, np.float64)
    choose_prefix(counts, least, most, len(words), chosen, estimates)
    return PrefixChoice(int(chosen[0]), int(chosen[1]), float(estimates[0]) / 8)


def _pack_top(words: Words, low_bits: int) -> list[NDArray[np.uint8]]:
    """Pack the low bits above the last whole byte of them."""
    n, byte, width = len(words), low_bits // 8, low_bits % 8
    plane = _grouped(n)
    extract_bits(words, 8 * byte, width, plane[:n])
    packed = np.empty(len(plane) // GROUP * width, np.uint8)
    pack_low_bits(plane, width, packed)
    if not packed.any():
        return [np.array([FORM_ZERO], np.uint8)]
    return [np.array([FORM_PLAIN], np.uint8), packed]


def _insert_top(reader: ByteReader, low_bits: int, words: Words, where: str) -> None:
    """Undo `_pack_top`."""
    form = int(reader.take(np.uint8, 1)[0])
    if form == FORM_ZERO:
        return
    if form != FORM_PLAIN:
        raise corrupt(where, f"unknown form {form} of packed bits")
    n, byte, width = len(words), low_bits // 8, low_bits % 8
    plane = _grouped(n)
    unpack_low_bits(reader.take(np.uint8, len(plane) // GROUP * width), width, plane)
    insert_plane(plane[:n], byte, words)


def _grouped(n: int) -> Bytes:
    """Return an array of whole groups, zeros from `n` on."""
    plane = scratch("standalone-low", -(-n // GROUP) * GROUP, np.uint8)
    plane[n:] = 0
    return plane
