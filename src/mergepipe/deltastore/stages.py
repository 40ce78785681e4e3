"""One stage of symbols as stored: frequencies by context, the coder's states, its words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.parts import Parts, corrupt, joined
from mergepipe.deltastore.rans import (
    LANES,
    LOWEST_STATE,
    SKIPPED,
    TOTAL,
    Halves,
    are_frequencies,
    decode_symbols,
    encode_symbols,
    fill_table,
    scale_counts,
)
from mergepipe.deltastore.vectors import decode_symbols_by_16, has_vectors
from mergepipe.kernels.compiled import Bytes, Counts

_STATE_WORDS = LANES * 2
_DECODE = decode_symbols_by_16 if has_vectors() else decode_symbols


def encode_stage(symbols: Bytes, rows: Bytes, counts_CS: Counts) -> NDArray[np.uint8]:
    """Encode the symbols (padded, uint8) of elements that are not skipped under their contexts `rows`.

    `counts_CS`: how often each symbol occurs under each context.
    """
    frequencies_CS = scale_counts(counts_CS)
    return joined(frequencies_CS, coded_words(symbols, rows, frequencies_CS))


def decode_stage(parts: Parts, rows: Bytes, n_contexts: int, n_symbols: int, where: str) -> NDArray[np.uint8]:
    """The symbols that `encode_stage` was given; 0 for skipped elements. Takes all that is left of the piece.

    Raises:
        CorruptError: it is not what was written.
    """
    frequencies_CS = parts.take(np.uint16, n_contexts * n_symbols).reshape(n_contexts, n_symbols)
    return decoded_words(parts.rest(np.uint16), rows, frequencies_CS, where)


def coded_words(symbols: Bytes, rows: Bytes, frequencies_CS: Halves) -> Halves:
    """The states a decoder starts with, low half first, and the coded symbols."""
    words = np.empty(len(rows) + 1, np.uint16)
    states = np.zeros(LANES, np.uint32)
    n_symbols = frequencies_CS.shape[1]
    first = encode_symbols(symbols, rows, len(rows), frequencies_CS.reshape(-1), n_symbols, words, states)
    return np.concatenate([states.view(np.uint16), words[first:]])


def decoded_words(coded: Halves, rows: Bytes, frequencies_CS: Halves, where: str) -> NDArray[np.uint8]:
    """The symbols behind `coded`, 0 for skipped elements.

    Raises:
        CorruptError: the frequencies do not add up, or the words do not end where they should.
    """
    if not are_frequencies(frequencies_CS):
        raise corrupt(where, f"frequencies of symbols do not add up to {TOTAL}")
    n_words = len(coded) - _STATE_WORDS
    if not 0 <= n_words <= len(rows):
        raise corrupt(where, f"{n_words} words of coded symbols where there can be 0 to {len(rows)}")
    states = coded[:_STATE_WORDS].copy().view(np.uint32)
    words = np.empty(len(rows) + 1, np.uint16)
    words[:n_words] = coded[_STATE_WORDS:]
    words[n_words:] = 0
    table = np.zeros((SKIPPED + 1) * TOTAL, np.uint32)
    fill_table(frequencies_CS.reshape(-1), frequencies_CS.shape[1], table)
    symbols = np.empty(len(rows), np.uint8)
    n_taken = _DECODE(words, states, rows, len(rows), table, symbols)
    if n_taken != n_words or (states != LOWEST_STATE).any():
        raise corrupt(where, "coded symbols do not end where they should")
    return symbols
