"""Stages of symbols as stored: frequencies by context, the coder's states, its words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.byte_parts import corrupt
from mergepipe.deltastore.codec.range_decoder import decode_symbols_by_16, has_vectors
from mergepipe.deltastore.codec.range_encoder import HAS_VECTORS, PLANES_BYTES, fill_planes, push_by_16
from mergepipe.deltastore.codec.rans import (
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
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.symbols import BODY_SYMBOLS, FIRST_BODY_CODE, HEAD_SYMBOLS, body_contexts, split_codes
from mergepipe.kernels.compiled import Bytes, Counts

_STATE_WORDS = LANES * 2
_DECODE = decode_symbols_by_16 if has_vectors() else decode_symbols


def encode_stages(contexts: Bytes, codes: Bytes, counts_CK: Counts) -> tuple[tuple[Halves, ...], tuple[Halves, ...]]:
    """Encode both stages of a block from its contexts and codes (both padded): frequencies, states and words of each.

    `counts_CK`: how often each code occurs under each context. The words are in `scratch`.
    """
    head_counts_CS = counts_CK[:, :HEAD_SYMBOLS].copy()
    head_counts_CS[:, 0] = counts_CK[:, FIRST_BODY_CODE:].sum(axis=1)
    body_counts_CS = counts_CK[:, FIRST_BODY_CODE : FIRST_BODY_CODE + BODY_SYMBOLS]
    head, body = scale_counts(head_counts_CS), scale_counts(body_counts_CS)
    if HAS_VECTORS:
        head_coded, body_coded = push_stages(contexts, codes, head, body)
    else:
        head_coded, body_coded = push_one_by_one(contexts, codes, head, body)
    return (head, *head_coded), (body, *body_coded)


def push_stages(contexts: Bytes, codes: Bytes, head_CS: Halves, body_CS: Halves) -> list[tuple[Halves, Halves]]:
    """States and words of both stages, with the vector instructions that the machine must have."""
    n = len(contexts)
    planes, states, ends = np.zeros(PLANES_BYTES, np.uint8), np.empty((2, LANES), np.uint32), np.empty(2, np.int64)
    words = scratch("encode-words", 2 * n, np.uint16)
    fill_planes(head_CS.reshape(-1), body_CS.reshape(-1), planes)
    push_by_16(contexts, codes, n, planes, words, states.reshape(-1), ends)
    own = words[int(ends[0]) : n], words[int(ends[1]) :]
    return [(stage.view(np.uint16), coded) for stage, coded in zip(states, own, strict=True)]


def push_one_by_one(contexts: Bytes, codes: Bytes, head_CS: Halves, body_CS: Halves) -> list[tuple[Halves, Halves]]:
    """As `push_stages`, on any machine."""
    n = len(contexts)
    head, body, rows = (scratch(f"encode-{name}", n, np.uint8) for name in ("head", "body", "body-rows"))
    split_codes(codes, n, head, body)
    body_contexts(contexts, head, n, rows)
    coded = coded_words(head, contexts, head_CS), coded_words(body, rows, body_CS)
    return [(both[:_STATE_WORDS], both[_STATE_WORDS:]) for both in coded]


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
    stored = scratch("words", 2 * len(rows) + 2, np.uint8)
    stored[: 2 * n_words] = coded[_STATE_WORDS:].view(np.uint8)
    table = scratch("table", (SKIPPED + 1) * TOTAL, np.uint32)
    fill_table(frequencies_CS.reshape(-1), frequencies_CS.shape[1], table)
    symbols = np.empty(len(rows), np.uint8)
    n_taken = _DECODE(stored, 0, states, rows, len(rows), table, symbols)
    if n_taken != n_words or (states != LOWEST_STATE).any():
        raise corrupt(where, "coded symbols do not end where they should")
    return symbols
