"""Contexts of a base block, and both stages of symbols: encoded, and decoded on any machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.element_codes import (
    BF16_MANTISSA_BITS,
    BODY_SYMBOLS,
    FIRST_BODY_CODE,
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
    PRECISION_BITS,
    SKIPPED,
    TOTAL,
    Bits16,
    encode_symbols,
)
from mergepipe.deltastore.codec.vector_symbols import (
    FREQUENCY_PLANES_BYTES,
    HAS_VECTOR_ENCODER,
    encode_codes_vector,
    fill_frequency_planes,
)
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, kernel, template

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


# --- encode both stages of symbols: coder states and words ---
#
# Format: "Coded symbols" in docs/internals/formats/delta-store.md. The head stage holds the symbols of bands 1 and 2,
# the body stage those of all other elements.


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


# --- decode the codes of BANDS on any machine, both stages of symbols in one loop ---


@template
def _entry_of(table: Bits32, context: np.uint8, state: np.uint32) -> np.uint32:
    """The entry of a decode table (`fill_decode_row`) for a state in a context."""
    slot = np.uint64(state & np.uint32(TOTAL - 1))
    return np.uint32(table[(np.uint64(context) << np.uint64(PRECISION_BITS)) + slot])


@template
def _without(entry: np.uint32, state: np.uint32) -> np.uint32:
    """The state without the symbol of its entry, before it is refilled."""
    offset = (entry >> np.uint32(8)) & np.uint32(0xFFF)
    return np.uint32((entry >> np.uint32(20)) * (state >> np.uint32(PRECISION_BITS)) + offset)


@template
def _refilled(state: np.uint32, stored: Bytes, position: np.uint64) -> np.uint32:
    """The state, with the word at `position` behind it where it is low."""
    word = np.uint32(stored[position]) | (np.uint32(stored[position + np.uint64(1)]) << np.uint32(8))
    return np.uint32((state << np.uint32(16)) | word) if state < np.uint32(LOWEST_STATE) else state


@template
def _taken_bytes(state: np.uint32) -> np.uint64:
    """The bytes of the word that refills a state."""
    return np.uint64(state < np.uint32(LOWEST_STATE)) << np.uint64(1)


@kernel
def decode_codes_scalar(
    stored: Bytes, positions: Bits64, states: Bits32, contexts: Bytes, n: int, head_table: Bits32, body_table: Bits32,
    codes: Bytes,
) -> None:  # fmt: skip
    """Decode the codes of `n` (padded) elements; skipped ones get the code of their zero symbols, `FIRST_BODY_CODE`.

    `positions` are the offsets in `stored` of the next words of head and body, `states` those of both; all change.
    Tables are filled by `fill_decode_row` and `fill_skipped_row`. `stored` is readable for `n + 1` words from both
    positions on: an element consumes at most one of each, so that no content makes it read outside.
    """
    head_states, body_states = states[:LANES], states[LANES : 2 * LANES]
    head_position, body_position = positions[0], positions[1]
    for i in range(0, n, LANES):
        for lane in range(LANES):
            j = np.uint64(i + lane)
            context, head_state, body_state = contexts[j], head_states[lane], body_states[lane]
            entry = _entry_of(head_table, context, head_state)
            symbol = np.uint8(entry)
            head_state = _without(entry, head_state)
            head_states[lane] = _refilled(head_state, stored, head_position)
            head_position += _taken_bytes(head_state)
            entry = _entry_of(body_table, context if symbol == np.uint8(0) else np.uint8(SKIPPED), body_state)
            body_state = _without(entry, body_state)
            body_states[lane] = _refilled(body_state, stored, body_position)
            body_position += _taken_bytes(body_state)
            codes[j] = symbol if symbol != np.uint8(0) else np.uint8(np.uint8(entry) + np.uint8(FIRST_BODY_CODE))
    positions[0], positions[1] = head_position, body_position
