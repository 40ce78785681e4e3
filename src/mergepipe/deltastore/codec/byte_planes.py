"""Codec BYTES: encode elements of any dtype as differences from the base, one entropy-coded byte plane at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind
from mergepipe.deltastore.codec.byte_arrays import look_up
from mergepipe.deltastore.codec.byte_reader import ByteReader, concatenate_bytes, corrupt
from mergepipe.deltastore.codec.rans import (
    LANES,
    MAX_CONTEXTS,
    SKIPPED,
    TOTAL,
    TWO_BYTES_FROM,
    Bits16,
    are_valid_frequencies,
    decode_single,
    encode_single,
    padded_length,
    scale_counts,
    stored_frequencies,
)
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.symbol_stages import decode_words, encode_words
from mergepipe.kernels.compiled import Bytes, Counts, kernel

# --- convert elements of any dtype to folded differences from the base, split these into byte planes, and back ---
#
# Format: "BYTES" in docs/internals/formats/delta-store.md.


Words = NDArray[np.unsignedinteger]
_SYMBOLS = 256


@kernel
def fold_differences(base: Words, expert: Words, bits: int, is_float: int, folded: Words) -> None:
    """Write differences modulo 2**bits in value order, zigzag-folded so that small magnitudes are small numbers.

    With `is_float`, elements are the bit patterns of floats.
    """
    all_bits, sign = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits), np.uint64(1) << np.uint64(bits - 1)
    shift, one = np.uint64(bits - 1), np.uint64(1)
    positive_flip = sign if is_float else np.uint64(0)
    negative_flip = all_bits if is_float else np.uint64(0)
    for i in range(len(folded)):
        base_bits, expert_bits = np.uint64(base[i]), np.uint64(expert[i])
        base_bits ^= negative_flip if base_bits >> shift else positive_flip
        expert_bits ^= negative_flip if expert_bits >> shift else positive_flip
        difference = (expert_bits - base_bits) & all_bits
        folded[i] = (difference << one) ^ (all_bits if difference >> shift else np.uint64(0))


@kernel
def unfold_differences(base: Words, folded: Words, bits: int, is_float: int, expert: Words) -> None:
    """Restore the expert's elements: the inverse of `fold_differences`."""
    all_bits, sign = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits), np.uint64(1) << np.uint64(bits - 1)
    shift, one = np.uint64(bits - 1), np.uint64(1)
    positive_flip = sign if is_float else np.uint64(0)
    negative_flip = all_bits if is_float else np.uint64(0)
    for i in range(len(expert)):
        base_bits, folded_bits = np.uint64(base[i]), np.uint64(folded[i])
        base_bits ^= negative_flip if base_bits >> shift else positive_flip
        difference = (folded_bits >> one) ^ (all_bits if folded_bits & one else np.uint64(0))
        expert_bits = (base_bits + difference) & all_bits
        expert[i] = expert_bits ^ (positive_flip if expert_bits >> shift else negative_flip)


@kernel
def insert_plane(plane: Bytes, byte: int, folded: Words) -> None:
    """Set byte number `byte` of every word, which is 0 before."""
    shift = np.uint64(8 * byte)
    for i in range(len(folded)):
        folded[i] = np.uint64(folded[i]) | (np.uint64(plane[i]) << shift)


@kernel
def extract_plane(folded: Words, byte: int, plane: Bytes) -> None:
    """Extract byte number `byte` of every word."""
    shift = np.uint64(8 * byte)
    for i in range(len(plane)):
        plane[i] = np.uint8((np.uint64(folded[i]) >> shift) & np.uint64(0xFF))


@kernel
def count_bytes(plane: Bytes, counts: NDArray[np.int64]) -> None:
    """Add the number of occurrences of each byte to `counts`."""
    # Four counters for each byte: equal neighbours would otherwise depend on each other's store.
    partial_counts = np.zeros(4 * _SYMBOLS, np.uint32)
    for i in range(len(plane)):
        partial_counts[(np.uint64(i) & np.uint64(3)) * np.uint64(_SYMBOLS) + np.uint64(plane[i])] += np.uint32(1)
    for i in range(4 * _SYMBOLS):
        counts[i % _SYMBOLS] += np.int64(partial_counts[i])


@kernel
def count_pairs(first: Bytes, second: Bytes, counts: NDArray[np.uint32]) -> None:
    """Add the number of occurrences of each pair of bytes to `counts`, a row of 256 for each first byte."""
    for i in range(len(first)):
        counts[(np.uint64(first[i]) << np.uint64(8)) | np.uint64(second[i])] += np.uint32(1)


# --- entropy-code one byte of every element, a plane; or keep it as it is ---
#
# Format: the planes of "BYTES" in docs/internals/formats/delta-store.md.


FORM_ZERO, FORM_CODED, FORM_PLAIN, FORM_BESIDE, FORM_SHORT = range(5)
SHORT_BELOW = 1 << 16
"""Shorter planes are coded with one state, which takes 250 bytes less, and up to 2 for each symbol."""
_N_SYMBOLS = 256
_MOST_CONTEXTS = 8
_LEAST_HEADER_BYTES = 6 + 4 * LANES
_NOISE_SHARE = 1 - 2.0**-10
"""Coded words are at most this much shorter than the entropy under the frequencies: quotients are whole numbers."""


def plane_room(n: int) -> Bytes:
    """Return this thread's array for a plane of `n` elements, padded, to be passed to `encode_plane`."""
    return scratch("encode-plane", padded_length(n), np.uint8)


def encode_plane(padded: Bytes, n: int) -> NDArray[np.uint8]:
    """Encode a plane of `n` bytes in the shortest form; the padding of `padded` is overwritten."""
    plane, counts = padded[:n], np.zeros(_N_SYMBOLS, np.int64)
    padded[n:] = 0
    count_bytes(plane, counts)
    if counts[0] == n:
        return np.array([FORM_ZERO], np.uint8)
    present = np.flatnonzero(counts).astype(np.uint8)
    frequencies = scale_counts(counts[None, :])
    if n < SHORT_BELOW and _entropy_bytes(counts[None, :]) <= n:
        short = _encode_short(plane, frequencies[0])
        if len(short) <= n:
            return short
    elif n >= SHORT_BELOW and _least_coded_bytes(counts[present], frequencies[0, present]) <= n:
        words = encode_words(padded, _contexts(n), frequencies)
        form_and_count = np.array([FORM_CODED, len(present) - 1], np.uint8)
        n_words = np.array([len(words)], np.uint32)
        coded = concatenate_bytes(form_and_count, present, frequencies[0, present], n_words, words)
        if len(coded) <= n:
            return coded
    return concatenate_bytes(np.array([FORM_PLAIN], np.uint8), plane)


def _encode_short(plane: Bytes, frequencies: Bits16) -> NDArray[np.uint8]:
    words, ends = scratch("encode-short", len(plane) + 1, np.uint16), np.zeros(2, np.int64)
    encode_single(plane, frequencies, words, ends)
    coded, state = words[int(ends[0]) :], ends[1:].astype(np.uint32)
    table = np.frombuffer(bytes([FORM_SHORT]) + stored_frequencies(frequencies), np.uint8)
    return concatenate_bytes(table, np.array([len(coded)], np.uint16), state, coded)


def encode_plane_beside(padded: Bytes, n: int, beside: Bytes) -> NDArray[np.uint8]:
    """Encode a plane like `encode_plane`, or in contexts by the bytes of the same elements `beside` it, if shorter."""
    counts_BS = np.zeros((_N_SYMBOLS, _N_SYMBOLS), np.uint32)
    count_pairs(beside, padded[:n], counts_BS.reshape(-1))
    context_of = _contexts_of_bytes(counts_BS)
    n_contexts = int(context_of.max()) + 1
    counts_CS = np.array([counts_BS[context_of == c].sum(axis=0, dtype=np.int64) for c in range(n_contexts)])
    present = np.flatnonzero(counts_CS.any(axis=0)).astype(np.uint8)
    counts_CS = counts_CS[:, present]
    table_bytes = _N_SYMBOLS // 2 + 2 * counts_CS.size
    if _entropy_bytes(counts_CS) + table_bytes >= _entropy_bytes(counts_CS.sum(axis=0, keepdims=True)):
        return encode_plane(padded, n)
    frequencies_CS, symbol_of = scale_counts(counts_CS), np.zeros(_N_SYMBOLS, np.uint8)
    symbol_of[present] = np.arange(len(present))
    symbols, contexts = np.zeros(len(padded), np.uint8), _contexts(n)
    look_up(symbol_of, padded, n, symbols)
    look_up(context_of, beside, n, contexts)
    words = encode_words(symbols, contexts, frequencies_CS)
    coded = concatenate_bytes(
        np.array([FORM_BESIDE], np.uint8), context_of[::2] | context_of[1::2] << 4,
        np.array([len(frequencies_CS) - 1, len(present) - 1], np.uint8), present, frequencies_CS,
        np.array([len(words)], np.uint32), words,
    )  # fmt: skip
    return coded if len(coded) <= n else encode_plane(padded, n)


def _contexts_of_bytes(counts_BS: NDArray[np.uint32]) -> Bytes:
    """The context of each byte beside a plane: bytes with equal shares of other symbols than 0, as often in each."""
    totals_B = counts_BS.sum(axis=1, dtype=np.int64)
    changed_B = totals_B - counts_BS[:, 0]
    order = np.argsort(changed_B / np.maximum(totals_B, 1), kind="stable")
    middles = np.cumsum(changed_B[order]) - changed_B[order] // 2
    contexts = np.zeros(_N_SYMBOLS, np.uint8)
    contexts[order] = np.minimum(middles * _MOST_CONTEXTS // max(int(changed_B.sum()), 1), _MOST_CONTEXTS - 1)
    return contexts


def _entropy_bytes(counts_CS: Counts) -> float:
    totals_C = counts_CS.sum(axis=1, keepdims=True)
    return float((counts_CS * np.log2(np.maximum(totals_C, 1) / np.maximum(counts_CS, 1))).sum()) / 8


def _least_coded_bytes(counts: Counts, frequencies: Bits16) -> float:
    """A lower bound of the bytes of a coded plane, so that noise need not be coded to know that it does not shrink."""
    bits = float((counts * np.log2(TOTAL / frequencies)).sum())
    return _LEAST_HEADER_BYTES + 3 * len(counts) + (bits * _NOISE_SHARE - 32 * LANES) / 8


def decode_plane(reader: ByteReader, n: int, where: str, beside: Bytes | None = None) -> NDArray[np.uint8] | None:
    """Decode one byte of all elements; None where all are 0. `beside`: bytes that may tell their contexts."""
    form = int(reader.take(np.uint8, 1)[0])
    if form == FORM_ZERO:
        return None
    if form == FORM_PLAIN:
        return reader.take(np.uint8, n)
    if form == FORM_SHORT:
        return _decode_short(reader, n, where)
    if form == FORM_BESIDE and beside is not None:
        return _decode_beside(reader, n, where, beside)
    if form != FORM_CODED:
        raise corrupt(where, f"unknown form {form} of a byte plane")
    present = reader.take(np.uint8, int(reader.take(np.uint8, 1)[0]) + 1)
    frequencies = np.zeros((1, _N_SYMBOLS), np.uint16)
    frequencies[0, present] = reader.take(np.uint16, len(present))
    n_words = int(reader.take(np.uint32, 1)[0])
    return decode_words(reader.take(np.uint16, n_words), _contexts(n), frequencies, where)[:n]


def _decode_short(reader: ByteReader, n: int, where: str) -> Bytes:
    present = np.flatnonzero(np.unpackbits(reader.take(np.uint8, _N_SYMBOLS // 8), bitorder="little"))
    frequencies = np.zeros((1, _N_SYMBOLS), np.uint16)
    for symbol in present:
        frequency = int(reader.take(np.uint8, 1)[0])
        if frequency >= TWO_BYTES_FROM:
            frequency = (frequency - TWO_BYTES_FROM) << 8 | int(reader.take(np.uint8, 1)[0])
        frequencies[0, symbol] = frequency
    if not are_valid_frequencies(frequencies) or not frequencies.any():
        raise corrupt(where, f"frequencies of symbols do not add up to {TOTAL}")
    n_words, state = int(reader.take(np.uint16, 1)[0]), int(reader.take(np.uint32, 1)[0])
    plane = np.empty(n, np.uint8)
    if not decode_single(reader.take(np.uint16, n_words), state, frequencies[0], plane):
        raise corrupt(where, "coded symbols do not end where they should")
    return plane


def _decode_beside(reader: ByteReader, n: int, where: str, beside: Bytes) -> Bytes:
    stored = reader.take(np.uint8, _N_SYMBOLS // 2)
    context_of = np.stack([stored & 15, stored >> 4], axis=1).reshape(-1)
    n_contexts, n_symbols = (reader.take(np.uint8, 2).astype(np.int64) + 1).tolist()
    if int(context_of.max()) >= n_contexts or n_contexts > MAX_CONTEXTS:
        raise corrupt(where, f"{n_contexts} contexts, and a byte in context {int(context_of.max())}")
    present = np.zeros(_N_SYMBOLS, np.uint8)
    present[:n_symbols] = reader.take(np.uint8, n_symbols)
    frequencies_CS = reader.take(np.uint16, n_contexts * n_symbols).reshape(n_contexts, n_symbols)
    contexts = _contexts(n)
    look_up(context_of, beside, n, contexts)
    n_words = int(reader.take(np.uint32, 1)[0])
    symbols = decode_words(reader.take(np.uint16, n_words), contexts, frequencies_CS, where)
    look_up(present, symbols, n, symbols)
    return symbols[:n]


def _contexts(n: int) -> NDArray[np.uint8]:
    """The contexts of `n` elements: all 0, padding skipped."""
    contexts = scratch("bytewise-rows", padded_length(n), np.uint8)
    contexts[:n], contexts[n:] = 0, SKIPPED
    return contexts


# --- codec BYTES: encode elements of any dtype as folded differences from the base, one byte plane at a time ---
#
# Format: "BYTES" in docs/internals/formats/delta-store.md.


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
    """Decode the expert's bytes: the inverse of `encode_bytewise`."""
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
