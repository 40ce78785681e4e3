"""Encode and decode stages of symbols as stored: frequencies by context, coder states, words.

Format: "Coded symbols" in docs/internals/formats/delta-store.md. The head stage holds the symbols of bands 1 and 2, the
body stage those of all other elements.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.entropy.rans import (
    LANES,
    LOWEST_STATE,
    SKIPPED,
    TOTAL,
    Bits16,
    are_valid_frequencies,
    decode_symbols,
    encode_symbols,
    fill_decode_table,
    scale_counts,
)
from mergepipe.deltastore.codec.entropy.rans_vector_decoder import decode_symbols_vector, has_vector_decoder
from mergepipe.deltastore.codec.entropy.rans_vector_encoder import (
    FREQUENCY_PLANES_BYTES,
    HAS_VECTOR_ENCODER,
    encode_codes_vector,
    fill_frequency_planes,
)
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.tiles.element_codes import (
    BODY_SYMBOLS,
    FIRST_BODY_CODE,
    HEAD_SYMBOLS,
    fill_body_contexts,
    split_codes,
)
from mergepipe.kernels.compilation.compiled import Bytes, Counts

_STATE_WORDS = LANES * 2
_DECODE_SYMBOLS = decode_symbols_vector if has_vector_decoder() else decode_symbols


def encode_stages(contexts: Bytes, codes: Bytes, counts_CK: Counts) -> tuple[tuple[Bits16, ...], tuple[Bits16, ...]]:
    """Encode both stages of a block from contexts and codes (both padded): frequencies, states and words of each.

    `counts_CK`: how often each code occurs in each context. The words are in `scratch`.
    """
    head_counts_CS = counts_CK[:, :HEAD_SYMBOLS].copy()
    head_counts_CS[:, 0] = counts_CK[:, FIRST_BODY_CODE:].sum(axis=1)
    body_counts_CS = counts_CK[:, FIRST_BODY_CODE : FIRST_BODY_CODE + BODY_SYMBOLS]
    head, body = scale_counts(head_counts_CS), scale_counts(body_counts_CS)
    if HAS_VECTOR_ENCODER:
        head_coded, body_coded = encode_stages_vector(contexts, codes, head, body)
    else:
        head_coded, body_coded = encode_stages_scalar(contexts, codes, head, body)
    return (head, *head_coded), (body, *body_coded)


def encode_stages_vector(
    contexts: Bytes, codes: Bytes, head_CS: Bits16, body_CS: Bits16
) -> list[tuple[Bits16, Bits16]]:
    """Compute states and words of both stages with the instructions of `HAS_VECTOR_ENCODER`."""
    n = len(contexts)
    planes, states, ends = (
        np.zeros(FREQUENCY_PLANES_BYTES, np.uint8),
        np.empty((2, LANES), np.uint32),
        np.empty(2, np.int64),
    )
    words = scratch("encode-words", 2 * n, np.uint16)
    fill_frequency_planes(head_CS.reshape(-1), body_CS.reshape(-1), planes)
    encode_codes_vector(contexts, codes, n, planes, words, states.reshape(-1), ends)
    stage_words = words[int(ends[0]) : n], words[int(ends[1]) :]
    return [(stage.view(np.uint16), coded) for stage, coded in zip(states, stage_words, strict=True)]


def encode_stages_scalar(
    contexts: Bytes, codes: Bytes, head_CS: Bits16, body_CS: Bits16
) -> list[tuple[Bits16, Bits16]]:
    """Encode like `encode_stages_vector`, on any machine."""
    n = len(contexts)
    head, body, body_contexts = (scratch(f"encode-{name}", n, np.uint8) for name in ("head", "body", "body-rows"))
    split_codes(codes, n, head, body)
    fill_body_contexts(contexts, head, n, body_contexts)
    coded = encode_words(head, contexts, head_CS), encode_words(body, body_contexts, body_CS)
    return [(stage[:_STATE_WORDS], stage[_STATE_WORDS:]) for stage in coded]


def encode_words(symbols: Bytes, contexts: Bytes, frequencies_CS: Bits16) -> Bits16:
    """Encode symbols: the decoder's initial states, low half first, then the words."""
    words = np.empty(len(contexts) + 1, np.uint16)
    states = np.zeros(LANES, np.uint32)
    n_symbols = frequencies_CS.shape[1]
    first = encode_symbols(symbols, contexts, len(contexts), frequencies_CS.reshape(-1), n_symbols, words, states)
    return np.concatenate([states.view(np.uint16), words[first:]])


def decode_words(coded: Bits16, contexts: Bytes, frequencies_CS: Bits16, where: str) -> NDArray[np.uint8]:
    """Decode the symbols of `coded`; skipped elements get 0.

    Raises:
        CorruptError: the frequencies do not add up, or the words do not end where they should.
    """
    if not are_valid_frequencies(frequencies_CS):
        raise corrupt(where, f"frequencies of symbols do not add up to {TOTAL}")
    n_words = len(coded) - _STATE_WORDS
    if not 0 <= n_words <= len(contexts):
        raise corrupt(where, f"{n_words} words of coded symbols where there can be 0 to {len(contexts)}")
    states = coded[:_STATE_WORDS].copy().view(np.uint32)
    stored = scratch("words", 2 * len(contexts) + 2, np.uint8)
    stored[: 2 * n_words] = coded[_STATE_WORDS:].view(np.uint8)
    table = scratch("table", (SKIPPED + 1) * TOTAL, np.uint32)
    fill_decode_table(frequencies_CS.reshape(-1), frequencies_CS.shape[1], table)
    symbols = np.empty(len(contexts), np.uint8)
    n_consumed = _DECODE_SYMBOLS(stored, 0, states, contexts, len(contexts), table, symbols)
    if n_consumed != n_words or (states != LOWEST_STATE).any():
        raise corrupt(where, "coded symbols do not end where they should")
    return symbols
