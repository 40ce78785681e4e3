"""Entropy-code one byte of every element, a plane, as bytes of one context; or keep it as it is.

Format: the planes of "BYTES" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.entropy.rans import LANES, SKIPPED, TOTAL, Bits16, padded_length, scale_counts
from mergepipe.deltastore.codec.entropy.symbol_stages import decode_words, encode_words
from mergepipe.deltastore.codec.generic.byte_differences import count_bytes
from mergepipe.deltastore.codec.generic.byte_reader import ByteReader, concatenate_bytes, corrupt
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.kernels.compilation.compiled import Bytes, Counts

FORM_ZERO, FORM_CODED, FORM_PLAIN = 0, 1, 2
_N_SYMBOLS = 256
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
    if _least_coded_bytes(counts[present], frequencies[0, present]) <= n:
        words = encode_words(padded, _contexts(n), frequencies)
        form_and_count = np.array([FORM_CODED, len(present) - 1], np.uint8)
        n_words = np.array([len(words)], np.uint32)
        coded = concatenate_bytes(form_and_count, present, frequencies[0, present], n_words, words)
        if len(coded) <= n:
            return coded
    return concatenate_bytes(np.array([FORM_PLAIN], np.uint8), plane)


def _least_coded_bytes(counts: Counts, frequencies: Bits16) -> float:
    """A lower bound of the bytes of a coded plane, so that noise need not be coded to know that it does not shrink."""
    bits = float((counts * np.log2(TOTAL / frequencies)).sum())
    return _LEAST_HEADER_BYTES + 3 * len(counts) + (bits * _NOISE_SHARE - 32 * LANES) / 8


def decode_plane(reader: ByteReader, n: int, where: str) -> NDArray[np.uint8] | None:
    """Decode one byte of all elements; None where all are 0.

    Raises:
        CorruptError: the plane is not a valid encoding.
    """
    form = int(reader.take(np.uint8, 1)[0])
    if form == FORM_ZERO:
        return None
    if form == FORM_PLAIN:
        return reader.take(np.uint8, n)
    if form != FORM_CODED:
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
