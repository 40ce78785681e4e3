"""Entropy-code one byte of every element, a plane; or keep it as it is.

Format: the planes of "BYTES" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.entropy.rans import (
    LANES,
    MAX_CONTEXTS,
    SKIPPED,
    TOTAL,
    Bits16,
    are_valid_frequencies,
    padded_length,
    scale_counts,
)
from mergepipe.deltastore.codec.entropy.rans_single import (
    TWO_BYTES_FROM,
    decode_single,
    encode_single,
    stored_frequencies,
)
from mergepipe.deltastore.codec.entropy.symbol_stages import decode_words, encode_words
from mergepipe.deltastore.codec.generic.byte_differences import count_bytes, count_pairs
from mergepipe.deltastore.codec.generic.byte_lookup import look_up
from mergepipe.deltastore.codec.generic.byte_reader import ByteReader, concatenate_bytes, corrupt
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.kernels.compilation.compiled import Bytes, Counts

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
    """Decode one byte of all elements; None where all are 0. `beside`: bytes that may tell their contexts.

    Raises:
        CorruptError: the plane is not a valid encoding.
    """
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
