"""Codec STANDALONE: encode elements without a base, by coding their exponents and keeping sign and mantissa."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind
from mergepipe.deltastore.codec.byte_planes import (
    FORM_PLAIN,
    FORM_ZERO,
    UNSIGNED,
    Words,
    decode_plane,
    encode_byte,
    encode_plane,
    insert_plane,
    plane_room,
    words_of,
)
from mergepipe.deltastore.codec.byte_reader import ByteReader, concatenate_bytes, corrupt
from mergepipe.deltastore.codec.rans import LANES, TOTAL
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, Doubles, kernel

# --- split elements into a prefix, which is entropy-coded, and the bits below it, which are kept as they are; and ---
#
# Format: "STANDALONE" in docs/internals/formats/delta-store.md.


ESCAPE = 0
"""Symbol of an element whose prefix is outside the window, and is stored apart."""
WINDOW = 255
GROUP = 8
"""Elements whose remaining bits are packed together."""
_RARE_SHARE = 1 << 14
_STATE_BITS = 16.0 * LANES
_SYMBOL_BITS = 24.0
_ESCAPE_BITS = 16.0


@kernel
def rotate_words(elements: Words, bits: int, rotated: Words) -> None:
    """Rotate every element left by one bit, so that a float's sign becomes its lowest bit."""
    one, sign_shift = np.uint64(1), np.uint64(bits - 1)
    for i in range(len(rotated)):
        word = np.uint64(elements[i])
        rotated[i] = (word << one) | (word >> sign_shift)


@kernel
def rotate_words_back(rotated: Words, bits: int, elements: Words) -> None:
    """Undo `rotate_words`."""
    one, sign_shift = np.uint64(1), np.uint64(bits - 1)
    for i in range(len(elements)):
        word = np.uint64(rotated[i])
        elements[i] = (word >> one) | ((word & one) << sign_shift)


@kernel
def count_prefixes(words: Words, low_bits: int, counts: Bits32) -> None:
    """Add the number of occurrences of every prefix, the bits from `low_bits` on, to `counts`."""
    # Four counters for each prefix: equal neighbours would otherwise depend on each other's store.
    n, n_prefixes, shift = len(words), len(counts), np.uint64(low_bits)
    partial_counts = np.zeros(4 * n_prefixes, np.uint32)
    for i in range(n):
        row = (np.uint64(i) & np.uint64(3)) * np.uint64(n_prefixes)
        partial_counts[row + (np.uint64(words[i]) >> shift)] += np.uint32(1)
    for i in range(4 * n_prefixes):
        counts[i % n_prefixes] += partial_counts[i]


@kernel
def _window_start(counts: Bits32, n: int) -> int:
    """The first of the `WINDOW` prefixes with symbols: up to the largest that is not rare."""
    last = len(counts) - 1
    while last > 0 and np.int64(counts[last]) * _RARE_SHARE <= n:
        last -= 1
    first = 0
    while first < last and np.int64(counts[first]) * _RARE_SHARE <= n:
        first += 1
    return max(first, last - WINDOW + 1)


@kernel
def _coded_bits(counts: Bits32, first: int, n: int) -> np.float64:
    """An estimate of the bits that coding the prefixes takes: frequencies are at least 1 of `TOTAL`."""
    stop, escapes = min(first + WINDOW, len(counts)), np.int64(n)
    total, bits = np.float64(0.0), np.float64(_STATE_BITS)
    for prefix in range(first, stop):
        if counts[prefix]:
            escapes -= np.int64(counts[prefix])
            total += max(counts[prefix] * (TOTAL / n), 1.0)
    escape_frequency = max(escapes * (TOTAL / n), 1.0)
    total += escape_frequency if escapes else 0.0
    for prefix in range(first, stop):
        if counts[prefix]:
            bits += _SYMBOL_BITS + counts[prefix] * np.log2(total / max(counts[prefix] * (TOTAL / n), 1.0))
    return np.float64(bits + escapes * (_ESCAPE_BITS + np.log2(total / escape_frequency)))


@kernel
def choose_prefix(
    counts: Bits32, low_bits: int, most_low_bits: int, n: int, chosen: Counts, estimates: Doubles
) -> None:
    """Choose how many low bits are kept as they are, from `low_bits` on, and the first prefix of the window.

    `counts` are those of prefixes above `low_bits`. `chosen` is set to the two, `estimates` to the bits of the block.
    """
    least = -1.0
    for kept_bits in range(low_bits, most_low_bits + 1):
        first = _window_start(counts, n)
        bits = float(_coded_bits(counts, first, n)) + float(n) * kept_bits
        if least < 0.0 or bits < least:
            least = bits
            chosen[0], chosen[1] = kept_bits, first
        merged = np.zeros((len(counts) + 1) // 2, np.uint32)
        for prefix in range(len(counts)):
            merged[prefix // 2] += counts[prefix]
        counts = merged
    estimates[0] = least


@kernel
def prefix_symbols(words: Words, low_bits: int, first: int, symbols: Bytes) -> None:
    """Write the symbol of every element: its prefix counted from `first`, plus one; `ESCAPE` outside the window."""
    shift, offset, window = np.uint64(low_bits), np.uint64(first), np.uint64(WINDOW)
    for i in range(len(words)):
        distance = (np.uint64(words[i]) >> shift) - offset
        symbols[i] = np.uint8(distance + np.uint64(1)) if distance < window else np.uint8(ESCAPE)


@kernel
def escaped_prefixes(words: Words, low_bits: int, symbols: Bytes, escapes: NDArray[np.uint16]) -> None:
    """Write the prefixes of the elements whose symbol is `ESCAPE`, in order."""
    at = 0
    for i in range(len(words)):
        if symbols[i] == ESCAPE:
            escapes[at] = np.uint64(words[i]) >> np.uint64(low_bits)
            at += 1


@kernel
def insert_prefixes(symbols: Bytes, low_bits: int, first: int, words: Words) -> None:
    """OR the prefixes of symbols other than `ESCAPE` into words; a prefix past the dtype's bits is cut."""
    shift, offset = np.uint64(low_bits), np.uint64(first) - np.uint64(1)
    for i in range(len(words)):
        prefix = np.uint64(symbols[i]) + offset if symbols[i] != ESCAPE else np.uint64(0)
        words[i] = np.uint64(words[i]) | (prefix << shift)


@kernel
def insert_escapes(symbols: Bytes, low_bits: int, escapes: NDArray[np.uint16], words: Words) -> int:
    """OR escaped prefixes into words, as many as there are; return the number of elements that need one."""
    at = 0
    for i in range(len(words)):
        if symbols[i] == ESCAPE:
            if at < len(escapes):
                words[i] = np.uint64(words[i]) | (np.uint64(escapes[at]) << np.uint64(low_bits))
            at += 1
    return at


@kernel
def extract_bits(words: Words, start: int, width: int, plane: Bytes) -> None:
    """Extract `width` bits (at most 8) of every word, from bit `start` on."""
    shift, mask = np.uint64(start), (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(len(plane)):
        plane[i] = np.uint8((np.uint64(words[i]) >> shift) & mask)


@kernel
def pack_low_bits(plane: Bytes, width: int, packed: Bytes) -> None:
    """Pack bytes below `1 << width` (1 to 7), eight in `width` bytes, lowest bits first.

    The length of `plane` is a multiple of 8; `packed` has `width` bytes for every eight.
    """
    fours = np.uint64(4 * width)
    twos, pairs = np.uint64(16 - 2 * width), np.uint64(8 - width)
    low8, low16, low32 = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
    groups = plane.view(np.uint64)
    for i in range(len(groups)):
        group = groups[i]
        group = (group & low8) | ((group & ~low8) >> pairs)
        group = (group & low16) | ((group & ~low16) >> twos)
        group = (group & low32) | ((group >> np.uint64(32)) << fours)
        for byte in range(width):
            packed[i * width + byte] = np.uint8((group >> np.uint64(8 * byte)) & np.uint64(0xFF))


@kernel
def unpack_low_bits(packed: Bytes, width: int, plane: Bytes) -> None:
    """Undo `pack_low_bits`."""
    fours, half = np.uint64(4 * width), np.uint64(1) << np.uint64(4 * width)
    twos, pairs = np.uint64(16 - 2 * width), np.uint64(8 - width)
    low16 = ((np.uint64(1) << np.uint64(2 * width)) - np.uint64(1)) * np.uint64(0x0000000100000001)
    low8 = ((np.uint64(1) << np.uint64(width)) - np.uint64(1)) * np.uint64(0x0001000100010001)
    groups = plane.view(np.uint64)
    for i in range(len(groups)):
        group = np.uint64(0)
        for byte in range(width):
            group |= np.uint64(packed[i * width + byte]) << np.uint64(8 * byte)
        group = (group & (half - np.uint64(1))) | ((group >> fours) << np.uint64(32))
        group = (group & low16) | ((group & ~low16) << twos)
        groups[i] = (group & low8) | ((group & ~low8) << pairs)


# --- codec STANDALONE: encode elements without a base, by coding their exponents and keeping sign and mantissa ---
#
# Format: "STANDALONE" in docs/internals/formats/delta-store.md.


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
    """Decode the expert's bytes into `out`: the inverse of `encode_standalone`."""
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
