"""Encode and decode stages of symbols as stored: frequencies by context, coder states, words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.byte_reader import corrupt
from mergepipe.deltastore.codec.element_codes import (
    BF16_MANTISSA_BITS,
    BODY_SYMBOLS,
    HEAD_SYMBOLS,
    N_EXPONENTS,
    choose_context_bounds,
    count_exponents,
    fill_body_contexts,
    fill_contexts,
    split_codes,
)
from mergepipe.deltastore.codec.rans import (
    LANES,
    LOWEST_STATE,
    MAX_CONTEXTS,
    SKIPPED,
    TOTAL,
    Bits16,
    are_valid_frequencies,
    decode_symbols,
    encode_symbols,
    fill_decode_table,
)
from mergepipe.deltastore.codec.rans_vector_decoder import decode_symbols_vector, has_vector_decoder
from mergepipe.deltastore.codec.rans_vector_encoder import (
    FREQUENCY_PLANES_BYTES,
    HAS_VECTOR_ENCODER,
    encode_codes_vector,
    fill_frequency_planes,
)
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, kernel

# --- divide the exponents of a base block into contexts, whose elements share symbol frequencies ---
#
# Format: "Contexts", and the first parts of HEAD, in docs/internals/formats/delta-store.md.


_MIN_SHARE = 64
_MIN_ELEMENTS = 512
_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 4


@dataclass(frozen=True, slots=True)
class Contexts:
    """Context c covers base exponents from `lows[c]` up to below `lows[c - 1]`; the last low is 0."""

    lows: NDArray[np.uint8]
    mantissa_bits: int = BF16_MANTISSA_BITS

    @property
    def count(self) -> int:
        return len(self.lows)

    def fill_rows(self, base: Bits16, contexts: Bytes) -> None:
        """Write the context of each element to `contexts`, whose length is padded."""
        context_of_exponent = np.empty(N_EXPONENTS, np.uint8)
        upper = N_EXPONENTS
        for context, low in enumerate(self.lows.tolist()):
            context_of_exponent[low:upper] = context
            upper = low
        fill_contexts(base, self.mantissa_bits, len(base), context_of_exponent, contexts)

    @classmethod
    def of(cls, base: Bits16, mantissa_bits: int = BF16_MANTISSA_BITS) -> Contexts:
        """Choose contexts for a base block so that each, from the largest exponents down, has enough elements."""
        counts, lows = np.zeros(N_EXPONENTS, np.int64), np.empty(MAX_CONTEXTS, np.uint8)
        stride = _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1
        count_exponents(base, mantissa_bits, stride, counts)
        enough = max(len(base) // _MIN_SHARE, _MIN_ELEMENTS) // stride
        return cls(lows[: choose_context_bounds(counts, enough, lows)], mantissa_bits)

    @property
    def stored(self) -> NDArray[np.uint8]:
        """The bytes as stored: one byte of count, then the lows."""
        return np.concatenate([np.array([self.count], np.uint8), self.lows])


# --- encode and decode stages of symbols as stored: frequencies by context, coder states, words ---
#
# Format: "Coded symbols" in docs/internals/formats/delta-store.md. The head stage holds the symbols of bands 1 and 2,
# the body stage those of all other elements.


_STATE_WORDS = LANES * 2
_DECODE_SYMBOLS = decode_symbols_vector if has_vector_decoder() else decode_symbols


@kernel
def encode_stages_vector(
    contexts: Bytes, codes: Bytes, n: int, head: Bits16, body: Bits16, words: Bits16, states: Bits32, ends: Counts
) -> None:
    """Encode both stages with the instructions of `HAS_VECTOR_ENCODER`."""
    planes = np.zeros(FREQUENCY_PLANES_BYTES, np.uint8)
    fill_frequency_planes(head, body, planes)
    encode_codes_vector(contexts, codes, n, planes, words, states, ends)


@kernel
def encode_stages_scalar(
    contexts: Bytes, codes: Bytes, n: int, head: Bits16, body: Bits16, words: Bits16, states: Bits32, ends: Counts
) -> None:
    """Encode like `encode_stages_vector`, on any machine."""
    symbols, body_symbols, body_contexts = np.empty(n, np.uint8), np.empty(n, np.uint8), np.empty(n, np.uint8)
    split_codes(codes, n, symbols, body_symbols)
    fill_body_contexts(contexts, symbols, n, body_contexts)
    half = len(words) // 2
    ends[0] = encode_symbols(symbols, contexts, n, head, HEAD_SYMBOLS, words[:half], states[:LANES])
    ends[1] = half + encode_symbols(body_symbols, body_contexts, n, body, BODY_SYMBOLS, words[half:], states[LANES:])


encode_stages = encode_stages_vector if HAS_VECTOR_ENCODER else encode_stages_scalar
"""Encode both stages of a block from contexts and codes (both padded to `n`) and frequencies by context and symbol.

`words` has two halves of `n + 1`, which are filled from their ends; `ends` are set to the indices of the first words,
`states` (two times `LANES`) to the decoder's initial states.
"""


def encode_words(symbols: Bytes, contexts: Bytes, frequencies_CS: Bits16) -> Bits16:
    """Encode symbols: the decoder's initial states, low half first, then the words."""
    words = np.empty(len(contexts) + 1, np.uint16)
    states = np.zeros(LANES, np.uint32)
    n_symbols = frequencies_CS.shape[1]
    first = encode_symbols(symbols, contexts, len(contexts), frequencies_CS.reshape(-1), n_symbols, words, states)
    return np.concatenate([states.view(np.uint16), words[first:]])


def decode_words(coded: Bits16, contexts: Bytes, frequencies_CS: Bits16, where: str) -> NDArray[np.uint8]:
    """Decode the symbols of `coded`; skipped elements get 0."""
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
